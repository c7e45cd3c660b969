"""The page of a night as HTML and Markdown, from ``nightly.json``; what spoilt it as text, from ``bisect.json``."""

from __future__ import annotations

import time

from pipeline.core import units
from pipeline.records.bisection import BisectRecord
from pipeline.records.night import NightRecord
from pipeline.report.page import from_template, markdown_items, pill
from pipeline.report.run_tables import stages_bar, stages_table

NIGHT_PAGE, NIGHT_TEXT = "nightly.html", "nightly.md"
SKIPPED = "Skipped days: not in the training data of this night"
_PILL = {"published": "PASS", "held": "HOLD"}


def night_page(record: NightRecord) -> str:
    """Return the page as HTML. Unknown parts are left out."""
    outcome, stages = record.outcome, record.stages or {}
    why = {"published": "Overridden checks", "held": "Reasons for the hold"}.get(outcome, "Error")
    return from_template(
        "night.html",
        title=f"Night {record.date}: {outcome}",
        files="nightly.json and result.json",
        heading=f"{record.model}, night of {record.date}",
        outcome=pill(_PILL.get(outcome, "failed"), outcome),
        about=_sentence(record),
        why=why,
        reasons=_why(record),
        culprit=record.culprit,
        stopped=outcome != "published",
        hint=record.hint,
        warnings=record.warnings,
        summary=_cards(record),
        skipped_title=SKIPPED,
        skipped=record.skipped,
        changed=record.changed,
        stages=stages_table(stages),
        stages_bar=stages_bar(stages),
        links=_links(record),
    )


def night_markdown(record: NightRecord) -> str:
    """Return the same as Markdown, for a ticket or a chat."""
    lines = [f"# {record.model}, night of {record.date}: {record.outcome}", "", _sentence(record), ""]
    lines += markdown_items("", _why(record))
    if record.culprit:
        lines += [f"Culprit: {units.for_chat(record.culprit)}", ""]
    if record.hint:
        lines += [f"What to do: {units.for_chat(record.hint)}", ""]
    lines += markdown_items("warning: ", record.warnings)
    if cards := _cards(record):
        lines += ["| figure | value | |", "|---|---|---|"]
        for cells in cards:
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    if record.skipped:
        lines += [f"## {SKIPPED}", "", *markdown_items("", record.skipped)]
    if record.changed:
        lines += ["## Changes since the base version", "", *markdown_items("", record.changed)]
    if record.seconds:
        lines += ["| stage | time |", "|---|---|"]
        for name, seconds in record.seconds.items():
            lines.append(f"| {name} | {units.duration(seconds)} |")
        lines.append("")
    for name, path in _links(record):
        lines.append(f"- {name}: `{path}`")
    return "\n".join([*lines, ""])


def bisect_text(record: BisectRecord) -> str:
    """Return ``nightjar bisect``: the culprit, what was tried with its figures, and all suspects."""
    lines = [f"run {record.run} was held beside {record.incumbent} of model {record.model}"]
    if record.culprit is not None:
        lines += ["", record.culprit.words]
        if record.stopped:
            lines.append(f"not tried: {record.stopped}")
    else:
        lines += ["", f"no culprit was found: {record.stopped or 'all suspects were tried'}"]
    head = ("replay", "gate", "NE*", "change*", "of the loss*", "seconds*", "without, or with the former")
    rows = [("(held)", "HOLD", units.decimal(record.ne, 5), units.ABSENT, units.ABSENT, units.ABSENT, units.ABSENT)]
    for replay in record.replays:
        change = units.ABSENT
        if replay.change is not None:
            change = f"{replay.change.point:+.2%}"
        figures = (units.decimal(replay.ne, 5), change, units.percent(replay.explained, 0))
        verdict, names = replay.verdict or "none", ", ".join(replay.names)
        rows.append((replay.run, verdict, *figures, units.decimal(replay.seconds, 1), names))
    lines += ["", units.text_table(head, rows)]
    for replay in record.replays:
        # The message says why there is no verdict, such as settings that do not go together.
        if replay.message:
            lines.append(f"{replay.run}: {replay.message}")
    if record.suspects:
        lines += ["", "suspects, in the order in which they are tried:"]
    for number, suspect in enumerate(record.suspects, 1):
        sign = suspect.sign
        if record.culprit is not None and sign in record.culprit.words:
            sign = "named above"
        lines.append(f"  {number}. {suspect.title}: {sign}")
    return "\n".join(lines)


def _why(record: NightRecord) -> list[str]:
    if record.reasons:
        return [*record.reasons]
    # A night that ended before the gate judged it has only a message.
    if record.message:
        return [record.message]
    return []


def _sentence(record: NightRecord) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(record.finished))
    serving = "the serving version is unchanged"
    if record.outcome == "published":
        serving = f"{record.version} serves"
    elif record.outcome == "held":
        # There is no incumbent in the first night.
        serving = f"{record.incumbent} keeps serving" if record.incumbent else "no version serves yet"
    return f"{serving} · exit code {record.exit_code} · finished {when} UTC"


def _cards(record: NightRecord) -> list[tuple[str, str, str]]:
    # Each card is a name, a value and a few words.
    cards = []
    if record.ne is not None:
        under = f"on {units.count(record.rows_scored)} test rows"
        cards.append(("NE of the candidate", units.decimal(record.ne), under))
    if record.ne_change is not None:
        change, low, high = record.ne_change
        under = f"the candidate's is {change:+.2%} [{low:+.2%}, {high:+.2%}]"
        cards.append(("NE of the incumbent", units.decimal(record.incumbent_ne), under))
    if record.gauc is not None:
        under = f"interval {record.gauc.low:.4f} to {record.gauc.high:.4f}"
        if record.gauc_change is not None:
            change, low, high = record.gauc_change
            under = f"{change:+.4f} [{low:+.4f}, {high:+.4f}] beside the incumbent"
        cards.append(("GAUC of the candidate", units.decimal(record.gauc.point), under))
    if record.budget is not None:
        cards.append(("Error budget spent", f"{record.budget.spent:.2g}", record.budget.words))
    if record.rows is not None:
        quarantined = f"{units.count(record.rows_quarantined)} in quarantine"
        cards.append(("Rows", units.count(record.rows), quarantined))
    if seconds := record.seconds:
        longest = max(seconds, key=lambda name: seconds[name])
        cards.append(("Duration of the stages", units.duration(sum(seconds.values())), f"mostly {longest}"))
    if (cost := record.cost) is not None:
        under = f"{cost.offer} x {cost.hosts}"
        if cost.spot:
            under += " on spot"
        cards.append(("Cost", units.money(cost.amount, cost.currency), under))
    if record.seconds_waited:
        cards.append(("Waited", units.duration(record.seconds_waited), "for the day's logs"))
    return cards


def _links(record: NightRecord) -> list[tuple[str, str]]:
    links = [("Gate", record.gate_page)]
    # A run that was refused before its first stage has no page.
    if record.stages or record.seconds:
        links.append(("Run", f"runs/{record.run}/report.html"))
    if base := record.base:
        links += [("Started from", base.checkpoint), ("Id mappings from", base.dataset)]
    # Without a verdict there is no gate page.
    return [(name, path) for name, path in links if path]
