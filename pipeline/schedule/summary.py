"""What a night came to: its record filled in from the run's artifacts, and the page for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.checkpoint.commands import config_changes
from pipeline.errors import ArtifactError, NightjarError
from pipeline.records.step import run_directory
from pipeline.report.night import NIGHT_PAGE, NIGHT_TEXT, night_markdown, night_page
from pipeline.report.summary import shrunk_lines
from pipeline.report.units import decimal, plural
from pipeline.store import Store

# Settings that differ from night to night by themselves, or say where and how things run.
_EXPECTED = ("run", "store", "stages", "force", "launch", "schedule", "nightly", "data.day", "data.mapping_from",
             "checkpoint.init_from", "plan.former", "gate.force")  # fmt: skip
MOST_SETTINGS = 12


def finished_record(store: Store, record: dict[str, Any], error: NightjarError | None) -> dict[str, Any]:
    """``record`` with what the run's result and artifacts say: verdict, figures, rows, seconds, what changed.

    ``error``: what ended the night before there was a run; None where there was one.
    """
    run = run_directory(record["run"])
    record = {**record, "summary": f"{run}/{NIGHT_PAGE}"}
    if error is not None:
        return {**record, "message": error.message, "hint": error.hint}
    result = store.read_json(f"{run}/result.json") if store.exists(f"{run}/result.json") else {}
    gate, stages = result.get("gate", {}), result.get("stages", {})
    record |= {
        "message": result.get("error", {}).get("message", ""), "hint": result.get("error", {}).get("hint", ""),
        "verdict": gate.get("verdict"), "reasons": gate.get("reasons", []),
        "warnings": gate.get("warnings", []), "version": gate.get("version"),
        "incumbent": gate.get("incumbent"), "forced": gate.get("forced"),
        "rows": result.get("ingest", {}).get("rows"),
        "rows_quarantined": result.get("ingest", {}).get("rows_quarantined"),
        "seconds": {name: stage["seconds"] for name, stage in stages.items() if stage["status"] != "skipped"},
        "stages": stages, "shrunk": result.get("shrunk", []),
    }  # fmt: skip
    record |= _figures(store, stages.get("publish", {}).get("artifact"))
    return {**record, "changed": _changes(store, record, stages)}


def _figures(store: Store, published: str | None) -> dict[str, Any]:
    """NE of candidate and incumbent on the same rows, with their intervals, as the gate found them."""
    path = f"{published}/gate.json"
    if not published or not store.exists(path):
        return {}
    gate = store.read_json(path)
    if "candidate" not in gate:
        return {"gate_page": f"{published}/gate.html"}
    found = {"ne": gate["candidate"]["ne"][0], "ne_interval": gate["candidate"]["ne"][1:], "rows_scored": gate["rows"]}
    if "incumbent" in gate:
        found |= {"incumbent_ne": gate["incumbent"]["ne"][0], "ne_change": gate["change"]["ne"]}
    return {**found, "gate_page": f"{published}/gate.html"}


def _changes(store: Store, record: Mapping[str, Any], stages: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the model this night started from was trained, in words."""
    base, smaller = record["base"], shrunk_lines(record)
    if base is None:
        return ["the first model: it was trained from scratch, with id mappings of its own", *smaller]
    lines = [f"started from {base['version']}, which learnt from {base['day'] or base['run']}"]
    lines += _rows(store, base["dataset"], stages.get("ingest", {}).get("artifact"))
    lines += _plan(store, base["plan"], stages.get("plan", {}).get("artifact"))
    return lines + smaller + _settings(store, record)


def _rows(store: Store, before: str, now: str | None) -> list[str]:
    then = store.find(before)
    new = store.find(now) if now else None
    if then is None or new is None:
        return []
    rows, former = new.summary["rows"], then.summary["rows"]
    lines = [f"{plural(rows, 'row')}, {rows / former - 1:+.1%} on {then.summary.get('day') or 'the dataset before'}"]
    for name, what in (
        ("rows_late", "rows of other days kept for those"),
        ("rows_freed", "rows of tables freed"),
        ("rows_replaced", "of them went to ids that are looked up more"),
    ):
        if count := sum(new.summary.get(name, {}).values()):
            lines.append(f"{count:,} {what}")
    if quarantined := new.summary["rows_quarantined"]:
        lines.append(f"{plural(quarantined, 'row')} in quarantine ({then.summary['rows_quarantined']:,} before)")
    return lines


def _plan(store: Store, before: str, now: str | None) -> list[str]:
    plan = store.find(now) if now else None
    if plan is None:
        return []
    lines = []
    if "why" in plan.summary:
        again = "is that of the night before" if plan.summary["reused"] else "was made anew"
        lines.append(f"the plan {again}: {plan.summary['why']}")
    try:
        then, new = (store.read_json(f"{path}/plan.json")["tables"] for path in (before, plan.path))
    except ArtifactError:
        return lines
    grown = {name: new[name]["rows"] - then[name]["rows"] for name in new if name in then}
    grown = {name: rows for name, rows in grown.items() if rows}
    if grown:
        lines.append(f"{plural(len(grown), 'table')} grew by {plural(sum(grown.values()), 'row')} for new ids")
    places = ("tier", "sharding", "ranks")
    before_places = store.get(before, "plan").summary["tables"]
    moved = [name for name, table in plan.summary["tables"].items()
             if name in before_places and any(table[p] != before_places[name][p] for p in places)]  # fmt: skip
    if moved:
        lines.append(f"{plural(len(moved), 'table')} moved: {', '.join(moved[:5])}{', ...' if len(moved) > 5 else ''}")
    return lines


def _settings(store: Store, record: Mapping[str, Any]) -> list[str]:
    """Settings that differ from those the base was trained with."""
    sides = []
    for run in (record["base"]["run"], record["run"]):
        path = f"{run_directory(run)}/config.yaml"
        if not store.exists(path):
            return []
        sides.append(_read_yaml(store, path))
    if sides[0].get("train", {}).get("global_batch") == "auto":
        sides[0]["train"]["global_batch"] = _batch_of(store, record["base"]["checkpoint"])
    changes = {
        path: pair for path, pair in config_changes(*sides).items()
        if not any(path == name or path.startswith(f"{name}.") for name in _EXPECTED)
    }  # fmt: skip
    lines = [f"{path} was {then}, is {now}" for path, (then, now) in sorted(changes.items())]
    more = len(lines) - MOST_SETTINGS
    return lines if more <= 0 else [*lines[:MOST_SETTINGS], f"and {plural(more, 'other setting')}"]


def _batch_of(store: Store, checkpoint: str) -> int | str:
    """The batch size that auto stood for in the training of ``checkpoint``: nights carry it on. auto if not known."""
    try:
        found = store.find(checkpoint)
    except ArtifactError:
        found = None
    batch = found.config.get("train", {}).get("global_batch") if found is not None else None
    return batch if isinstance(batch, int) else "auto"


def _read_yaml(store: Store, path: str) -> dict[str, Any]:
    import yaml

    with store.open(path) as source:
        found: dict[str, Any] = yaml.safe_load(source.read().decode())
    return found


def write_summary(store: Store, record: Mapping[str, Any]) -> None:
    """``nightly.html`` and ``nightly.md`` beside the record."""
    run = run_directory(record["run"])
    store.write_bytes(f"{run}/{NIGHT_PAGE}", night_page(record).encode())
    store.write_bytes(f"{run}/{NIGHT_TEXT}", night_markdown(record).encode())


def line_of(record: Mapping[str, Any]) -> str:
    """The outcome in one line."""
    said = f"{record['date']} of model {record['model']}: {record['outcome'].upper()}"
    if record.get("version"):
        said += f" {record['version']}"
    if "ne" in record:
        said += f", NE {decimal(record['ne'])}"
    if "incumbent_ne" in record:
        said += f" (incumbent {decimal(record['incumbent_ne'])})"
    why = record.get("reasons") if record["outcome"] == "held" else [record.get("message")]
    return said + "".join(f"; {reason}" for reason in (why or [])[:1] if reason)
