"""The outcome of a night: its record, completed from the run's artifacts, and its page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config.paths import config_changes
from pipeline.errors import ArtifactError, NightjarError
from pipeline.records.gate import GATE, GateRecord
from pipeline.records.night import HELD, Base, NightRecord
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.records.result import IngestPart, Result
from pipeline.records.runs import run_directory
from pipeline.report.night import NIGHT_PAGE, NIGHT_TEXT, night_markdown, night_page
from pipeline.report.summary import hosts_lines
from pipeline.store.artifacts import Store
from pipeline.units import decimal, plural

# Settings that differ from night to night anyway, or only say where and how things run.
_EXPECTED = (
    "run",
    "store",
    "stages",
    "force",
    "launch",
    "schedule",
    "nightly",
    "data.day",
    "data.mapping_from",
    "checkpoint.init_from",
    "plan.former",
    "gate.force",
)
MOST_SETTINGS = 12


def finished_record(store: Store, record: NightRecord, error: NightjarError | None) -> NightRecord:
    """``record`` with the verdict, figures, rows, seconds and changes from the run's result and artifacts.

    ``error``: what ended the night before its run began; None if there was a run.
    """
    run = run_directory(record.run)
    record = replace(record, summary=f"{run}/{NIGHT_PAGE}")
    if error is not None:
        return replace(record, message=error.message, hint=error.hint)
    path = f"{run}/{Result.FILE}"
    result = read(Result, store, path) if store.exists(path) else Result(run=record.run, status="failed")
    gate, problem, rows = result.gate, result.error, result.ingest or IngestPart()
    record = replace(
        record,
        message=problem.message if problem else "",
        hint=(problem.hint if problem else None) or "",
        verdict=gate.verdict if gate else None,
        reasons=gate.reasons if gate else (),
        warnings=(gate.warnings if gate else None) or (),
        version=gate.version if gate else None,
        incumbent=gate.incumbent if gate else None,
        forced=gate.forced if gate else None,
        rows=rows.rows,
        rows_quarantined=rows.rows_quarantined,
        stages=result.stages,
        shrunk=result.shrunk or (),
        grown=result.grown,
        seconds={name: stage.seconds for name, stage in result.stages.items() if stage.status != "skipped"},
    )
    record = _with_figures(store, record, result.artifact("publish"))
    return replace(record, changed=tuple(_changes(store, record, result)))


def _with_figures(store: Store, record: NightRecord, published: str | None) -> NightRecord:
    """``record`` with the gate's NE of candidate and incumbent on the same rows, with their intervals."""
    path = f"{published}/{GATE}"
    if not published or not store.exists(path):
        return record
    gate, record = read(GateRecord, store, path), replace(record, gate_page=f"{published}/gate.html")
    if gate.candidate is None:
        return record
    ours = gate.candidate.ne
    record = replace(record, ne=ours.point, ne_interval=(ours.low, ours.high), rows_scored=gate.rows)
    if gate.incumbent is None or gate.change is None:
        return record
    return replace(record, incumbent_ne=gate.incumbent.ne.point, ne_change=gate.change.ne)


def _changes(store: Store, record: NightRecord, result: Result) -> list[str]:
    """What changed since the base of this night was trained, in sentences."""
    base, smaller = record.base, hosts_lines(result.shrunk, result.grown)
    if base is None:
        return ["the first version, trained from scratch with new id mappings", *smaller]
    lines = [f"started from {base.version}, which was trained on {base.day or base.run}"]
    lines += _rows(store, base.dataset, result.artifact("ingest"))
    lines += _plan(store, base.plan, result.artifact("plan"))
    return lines + smaller + _settings(store, base, record.run)


def _rows(store: Store, before: str, now: str | None) -> list[str]:
    then = store.find(before)
    new = store.find(now) if now else None
    if then is None or new is None:
        return []
    rows, former = new.summary["rows"], then.summary["rows"]
    lines = [f"{plural(rows, 'row')}, {rows / former - 1:+.1%} on {then.summary.get('day') or 'the previous dataset'}"]
    for name, what in (
        ("rows_late", "rows of other days were kept for those days"),
        ("rows_freed", "table rows were freed"),
        ("rows_replaced", "of them went to ids that are looked up more often"),
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
        again = "was reused from the previous night" if plan.summary["reused"] else "was rebuilt"
        lines.append(f"the plan {again}: {plan.summary['why']}")
    try:
        then, new = (read(Plan, store, f"{path}/plan.json").tables for path in (before, plan.path))
    except ArtifactError:
        return lines
    grown = {name: new[name].rows - then[name].rows for name in new if name in then}
    grown = {name: rows for name, rows in grown.items() if rows}
    if grown:
        lines.append(f"{plural(len(grown), 'table')} grew by {plural(sum(grown.values()), 'row')} for new ids")
    places = ("tier", "sharding", "ranks")
    before_places = store.get(before, "plan").summary["tables"]
    moved = [
        name
        for name, table in plan.summary["tables"].items()
        if name in before_places and any(table[p] != before_places[name][p] for p in places)
    ]
    if moved:
        lines.append(f"{plural(len(moved), 'table')} moved: {', '.join(moved[:5])}{', ...' if len(moved) > 5 else ''}")
    return lines


def _settings(store: Store, base: Base, run: str) -> list[str]:
    """Settings that differ from those of the base."""
    sides = []
    for each in (base.run, run):
        path = f"{run_directory(each)}/config.yaml"
        if not store.exists(path):
            return []
        sides.append(_read_yaml(store, path))
    if sides[0].get("train", {}).get("global_batch") == "auto":
        sides[0]["train"]["global_batch"] = _batch_of(store, base.checkpoint)
    changes = {
        path: pair
        for path, pair in config_changes(*sides).items()
        if not any(path == name or path.startswith(f"{name}.") for name in _EXPECTED)
    }
    lines = [f"{path} was {_shown(then)}, is {_shown(now)}" for path, (then, now) in sorted(changes.items())]
    more = len(lines) - MOST_SETTINGS
    return lines if more <= 0 else [*lines[:MOST_SETTINGS], f"and {plural(more, 'other setting')}"]


def _shown(value: Any) -> str:
    """A setting's value as an override has it."""
    return "null" if value is None else str(value)


def _batch_of(store: Store, checkpoint: str) -> int | str:
    """The batch size that auto meant in the training of ``checkpoint``, which nights keep; auto if unknown."""
    try:
        artifact = store.find(checkpoint)
    except ArtifactError:
        artifact = None
    batch = artifact.config.get("train", {}).get("global_batch") if artifact is not None else None
    return batch if isinstance(batch, int) else "auto"


def _read_yaml(store: Store, path: str) -> dict[str, Any]:
    import yaml

    with store.open(path) as source:
        settings: dict[str, Any] = yaml.safe_load(source.read().decode())
    return settings


def write_summary(store: Store, record: NightRecord) -> None:
    """Write ``nightly.html`` and ``nightly.md`` beside the record."""
    run = run_directory(record.run)
    store.write_bytes(f"{run}/{NIGHT_PAGE}", night_page(record).encode())
    store.write_bytes(f"{run}/{NIGHT_TEXT}", night_markdown(record).encode())


def line_of(record: NightRecord) -> str:
    """The outcome in one line."""
    line = f"{record.date} of model {record.model}: {record.outcome.upper()}"
    if record.version:
        line += f" {record.version}"
    if record.ne is not None:
        line += f", NE {decimal(record.ne)}"
    if record.incumbent_ne is not None:
        line += f" (incumbent {decimal(record.incumbent_ne)})"
    why = record.reasons if record.outcome == HELD else (record.message,)
    return line + "".join(f"; {reason}" for reason in (why or ())[:1] if reason)
