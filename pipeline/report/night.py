"""A night on one page, for people: HTML and Markdown, both from its record ``nightly.json``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report import units
from pipeline.report.page import cards, document
from pipeline.report.tables import section, stages_section

NIGHT_PAGE, NIGHT_TEXT = "nightly.html", "nightly.md"
SKIPPED = "Missed days that were skipped: this night learns nothing from them"
_PILL = {"published": "PASS", "held": "HOLD"}


def night_page(record: Mapping[str, Any]) -> str:
    """The page; everything that comes from data is escaped, parts that are not known are left out."""
    parts = [
        _header(record),
        _reasons(record),
        section("Worth a look", _items(record["warnings"])) if record.get("warnings") else "",
        cards(_cards(record)),
        section(SKIPPED, _items(record["skipped"])) if record.get("skipped") else "",
        section("What changed", _items(record["changed"])) if record.get("changed") else "",
        stages_section(record.get("stages", {})),
        section("Where to look", _linked(_links(record))),
    ]
    return document(f"Night {record['date']}: {record['outcome']}", parts, "nightly.json and result.json")


def night_markdown(record: Mapping[str, Any]) -> str:
    """The same as Markdown, for a ticket or a chat."""
    lines = [f"# {record['model']}, night of {record['date']}: {record['outcome']}", "", _sentence(record), ""]
    lines += [*(f"- {reason}" for reason in _why(record)), ""] if _why(record) else []
    lines += [f"What to do: {record['hint']}", ""] if record.get("hint") else []
    lines += [*(f"- warning: {words}" for words in record.get("warnings", ())), ""] if record.get("warnings") else []
    found = _cards(record)
    if found:
        lines += ["| figure | value | |", "|---|---|---|", *(f"| {' | '.join(cells)} |" for cells in found), ""]
    if record.get("skipped"):
        lines += [f"## {SKIPPED}", "", *(f"- {line}" for line in record["skipped"]), ""]
    if record.get("changed"):
        lines += ["## What changed", "", *(f"- {line}" for line in record["changed"]), ""]
    if record.get("seconds"):
        lines += ["| stage | time |", "|---|---|"]
        lines += [*(f"| {name} | {units.duration(value)} |" for name, value in record["seconds"].items()), ""]
    return "\n".join([*lines, *(f"- {name}: `{path}`" for name, path in _links(record)), ""])


def _why(record: Mapping[str, Any]) -> list[str]:
    reasons = [str(reason) for reason in record.get("reasons", ())]
    return reasons or ([str(record["message"])] if record.get("message") else [])


def _sentence(record: Mapping[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.get("finished")))
    serving = {
        "published": f"{record.get('version')} serves",
        "held": f"{record['incumbent']} goes on serving" if record.get("incumbent") else "nothing serves yet",
    }.get(record["outcome"], "what served goes on serving")
    return f"{serving} · exit code {record['exit_code']} · finished {when} UTC"


def _header(record: Mapping[str, Any]) -> str:
    pill, outcome = _PILL.get(record["outcome"], "failed"), str(record["outcome"])
    title = f"{record['model']}, night of {record['date']}"
    return (
        f'<header><h1>{escape(title)}</h1><span class="pill {pill}">{escape(outcome)}</span>'
        f"<p>{escape(_sentence(record))}</p></header>"
    )


def _reasons(record: Mapping[str, Any]) -> str:
    why = _why(record)
    if not why:
        return ""
    title = {"published": "What was overridden", "held": "Why it is held"}.get(record["outcome"], "What stopped it")
    kind = "" if record["outcome"] == "published" else "error"
    hint = f"<p>What to do: {escape(str(record['hint']))}</p>" if record.get("hint") else ""
    return f'<section class="{kind}"><h2>{title}</h2>{_items(why)}{hint}</section>'


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _cards(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value, a few words."""
    found = []
    if "ne" in record:
        under = f"on {units.count(record.get('rows_scored'))} held-out rows"
        found.append(("NE of the candidate", units.decimal(record["ne"]), under))
    if "incumbent_ne" in record:
        change, low, high = record["ne_change"]
        under = f"the candidate's is {change:+.2%} [{low:+.2%}, {high:+.2%}]"
        found.append(("NE of the incumbent", units.decimal(record["incumbent_ne"]), under))
    if record.get("rows") is not None:
        quarantined = f"{units.count(record.get('rows_quarantined'))} in quarantine"
        found.append(("Rows", units.count(record["rows"]), quarantined))
    if seconds := record.get("seconds"):
        longest = max(seconds, key=lambda name: seconds[name])
        found.append(("Stages took", units.duration(sum(seconds.values())), f"most of it {longest}"))
    if record.get("seconds_waited"):
        found.append(("Waited", units.duration(record["seconds_waited"]), "for the day's logs"))
    return found


def _linked(links: Sequence[tuple[str, str]]) -> str:
    """Pages of the store can be opened from here: this one lies in the run's folder, two below the store."""
    items = []
    for name, path in links:
        shown = f"<code>{escape(path)}</code>"
        page = path.endswith(".html")
        items.append(
            f"<li>{escape(name)}: " + (f'<a href="../../{escape(path)}">{shown}</a>' if page else shown) + "</li>"
        )
    return f"<ul>{''.join(items)}</ul>"


def _links(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = [("Verdict", record.get("gate_page")), ("Run", f"runs/{record['run']}/report.html")]
    if base := record.get("base"):
        found += [("Started from", base["checkpoint"]), ("Id mappings from", base["dataset"])]
    return [(name, path) for name, path in found if path]
