"""The outcome of a night: its record, completed from the run's artifacts, its page, and the post to the webhook."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.config.prices import ON_DEMAND, SPOT, offer_of
from pipeline.config.renamed import config_changes, parse_recorded, with_new_names
from pipeline.core.errors import ArtifactError, NightjarError
from pipeline.core.units import decimal, plural
from pipeline.launch.elastic import MoreRoomError
from pipeline.publishing.versions import version_path
from pipeline.records.gate import GATE, GateRecord
from pipeline.records.night import HELD, Base, Cost, NightRecord
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.records.result import Grown, IngestPart, Result, Shrunk
from pipeline.records.runs import run_directory
from pipeline.report.night import NIGHT_PAGE, NIGHT_TEXT, night_markdown, night_page
from pipeline.report.summary import hosts_lines
from pipeline.store.artifacts import Store

# Settings that differ from night to night anyway, or only say where and how things run. Each ends with a dot, as do the
# paths compared with it, so that ``data.day`` is not taken for the beginning of ``data.day_column``.
_EXPECTED = (
    *("run.", "store.", "stages.", "force.", "launch.", "schedule.", "nightly.", "gate.force."),
    *("data.day.", "data.mapping_from.", "checkpoint.init_from.", "plan.former."),
)
MAX_SETTINGS = 12
MAX_WARNINGS = 6
TRIES = 3  # tries to post a verdict
TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 2.0
log = logging.getLogger(__name__)


def finished_record(store: Store, record: NightRecord, error: NightjarError | None) -> NightRecord:
    """Complete ``record`` with verdict, figures, rows, seconds and changes from the run's result and artifacts.

    Args:
        error: What ended the night before its run began; None if there was a run.
    """
    run = run_directory(record.run)
    record = replace(record, summary=f"{run}/{NIGHT_PAGE}")
    if error is not None:
        return replace(record, message=error.message, hint=error.hint)
    path = f"{run}/{Result.FILE}"
    result = Result(run=record.run, status="failed")
    if store.exists(path):
        result = read(Result, store, path)
    gate, rows = result.gate, result.ingest or IngestPart()
    message = hint = ""
    if result.error is not None:
        message, hint = result.error.message, result.error.hint or ""
    # Skipped stages took no time, so they are left out.
    seconds = {name: stage.seconds for name, stage in result.stages.items() if stage.status != "skipped"}
    record = replace(
        record,
        message=message,
        hint=hint,
        reasons=(),
        warnings=(),
        rows=rows.rows,
        rows_quarantined=rows.rows_quarantined,
        stages=result.stages,
        shrunk=result.shrunk or (),
        grown=result.grown,
        seconds=seconds,
    )
    if gate is not None:
        record = replace(
            record,
            verdict=gate.verdict,
            reasons=gate.reasons,
            warnings=gate.warnings or (),
            version=gate.version,
            incumbent=gate.incumbent,
            forced=gate.forced,
        )
    record = _with_figures(store, record, result.artifact("publish"))
    return replace(record, changed=tuple(_describe_changes(store, record, result)))


def with_cost(config: Config, record: NightRecord) -> NightRecord:
    """Add what the stages of a night cost by ``nightly.prices``; nothing without prices, or if no stage ran.

    The file of prices may have changed since the night began. Then a warning says why there is no cost.
    """
    settings, hosts = config.nightly, config.hardware.hosts
    if settings.prices is None or not record.seconds:
        return record
    try:
        offer, currency = offer_of(settings.prices, settings.priced_as, spot=settings.priced_spot, path="nightly")
    except NightjarError as error:
        return replace(record, warnings=(*(record.warnings or ()), f"the night has no cost: {error.message}"))
    by = SPOT if settings.priced_spot else ON_DEMAND
    amount = offer.cost(by, hosts, host_seconds(record, hosts) / hosts)
    cost = Cost(amount=round(amount, 4), currency=currency, offer=offer.name, hosts=hosts, spot=settings.priced_spot)
    return replace(record, cost=cost)


def host_seconds(record: NightRecord, hosts: int) -> float:
    """Sum the seconds of a night's stages, each times the hosts that it had.

    Args:
        hosts: The number at the night's start; ``record.shrunk`` and ``record.grown`` say how it changed.
    """
    total = 0.0
    every: list[Shrunk | Grown] = [*(record.shrunk or ()), *(record.grown or ())]
    for name, seconds in (record.seconds or {}).items():
        changes = [each for each in every if each.stage == name]
        outcome = (record.stages or {}).get(name)
        attempts = (outcome.attempts if outcome is not None else None) or ()
        # The attempts give the mean number of hosts; the stage's own seconds may be more than theirs.
        on_attempts, weighted = sum(attempt.seconds for attempt in attempts), 0.0
        for attempt in attempts:
            weighted += attempt.seconds * hosts
            ended = attempt.error.message if attempt.error is not None else ""
            # A change of hosts ends an attempt, and is its error. After any other end, the hosts stay.
            for change in changes:
                why = change.why if isinstance(change, Shrunk) else str(MoreRoomError(change.hosts - change.from_hosts))
                if change.from_hosts == hosts and why == ended:
                    hosts = change.hosts
                    changes.remove(change)
                    break
        for change in changes:
            hosts = change.hosts
        total += seconds * (weighted / on_attempts if on_attempts else hosts)
    return total


def _with_figures(store: Store, record: NightRecord, published: str | None) -> NightRecord:
    # Add the gate's NE of candidate and incumbent on the same rows, with their intervals.
    path = f"{published}/{GATE}"
    if not published or not store.exists(path):
        return record
    gate = read(GateRecord, store, path)
    record = replace(record, gate_page=f"{published}/gate.html", budget=gate.budget)
    if gate.candidate is None:
        return record
    ne = gate.candidate.ne
    record = replace(record, ne=ne.point, ne_interval=(ne.low, ne.high), rows_scored=gate.rows)
    if gate.gauc is not None and gate.gauc.candidate is not None:
        record = replace(record, gauc=gate.gauc.candidate)
    if gate.incumbent is None or gate.change is None:
        return record
    if gate.gauc is not None:
        record = replace(record, gauc_change=gate.gauc.change)
    return replace(record, incumbent_ne=gate.incumbent.ne.point, ne_change=gate.change.ne)


def _describe_changes(store: Store, record: NightRecord, result: Result) -> list[str]:
    # Describe in sentences what changed since the base of this night was trained.
    warnings = (result.ingest or IngestPart()).warnings or ()
    found = [f"ingestion warns: {line}" for line in warnings[:MAX_WARNINGS]]
    if len(warnings) > MAX_WARNINGS:
        found.append(f"and {plural(len(warnings) - MAX_WARNINGS, 'other warning')} of ingestion")
    base, hosts = record.base, hosts_lines(result.shrunk, result.grown)
    if base is None:
        return ["the first version, trained from scratch with new id mappings", *found, *hosts]
    return [
        f"started from {base.version}, which was trained on {base.day or base.run}",
        *_describe_rows(store, base.dataset, result.artifact("ingest")),
        *found,
        *_describe_plan(store, base.plan, result.artifact("plan")),
        *hosts,
        *_describe_settings(store, record.model, base, record.run),
    ]


def _describe_rows(store: Store, before: str, now: str | None) -> list[str]:
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
        count = sum(new.summary.get(name, {}).values())
        if count:
            lines.append(f"{count:,} {what}")
    quarantined = new.summary["rows_quarantined"]
    if quarantined:
        lines.append(f"{plural(quarantined, 'row')} in quarantine ({then.summary['rows_quarantined']:,} before)")
    return lines


def _describe_plan(store: Store, before: str, now: str | None) -> list[str]:
    plan = store.find(now) if now else None
    if plan is None:
        return []
    lines = []
    if "why" in plan.summary:
        again = "was reused from the previous night" if plan.summary["reused"] else "was rebuilt"
        lines.append(f"the plan {again}: {plan.summary['why']}")
    try:
        then = read(Plan, store, f"{before}/plan.json").tables
        new = read(Plan, store, f"{plan.path}/plan.json").tables
    except ArtifactError:
        # The former plan may be gone, or be of another release. The summary leaves it out.
        return lines
    grown = []
    for name in new:
        if name in then and new[name].rows != then[name].rows:
            grown.append(new[name].rows - then[name].rows)
    if grown:
        lines.append(f"{plural(len(grown), 'table')} grew by {plural(sum(grown), 'row')} for new ids")
    moved = []
    former_tables = store.get(before, "plan").summary["tables"]
    for name, table in plan.summary["tables"].items():
        former = former_tables.get(name)
        if former is not None and any(table[place] != former[place] for place in ("tier", "sharding", "ranks")):
            moved.append(name)
    if moved:
        line = f"{plural(len(moved), 'table')} moved: {', '.join(moved[:5])}"
        if len(moved) > 5:
            line += ", ..."
        lines.append(line)
    return lines


def _describe_settings(store: Store, model: str, base: Base, run: str) -> list[str]:
    # List the settings that differ from those of the base.
    lines = []
    for path, values in sorted(config_changes(*read_settings(store, model, base, run)).items()):
        if not is_expected(path):
            # Write "null" as in YAML, not Python's None.
            then, now = (str(value) if value is not None else "null" for value in values)
            lines.append(f"{path} was {then}, is {now}")
    if len(lines) > MAX_SETTINGS:
        lines[MAX_SETTINGS:] = [f"and {plural(len(lines) - MAX_SETTINGS, 'other setting')}"]
    return lines


def read_settings(store: Store, model: str, base: Base, run: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the settings of the run that made ``base`` of ``model`` and those of ``run``.

    A version keeps its settings after its run is gone. Both are empty if one is missing.
    """
    configs: list[Any] = []
    before = f"{run_directory(base.run)}/config.yaml"
    if not store.exists(before):
        before = f"{version_path(model, base.version)}/config.yaml"
    for path in (before, f"{run_directory(run)}/config.yaml"):
        if not store.exists(path):
            return {}, {}
        with store.open(path) as source:
            configs.append(parse_recorded(source.read().decode()))
    then, now = map(with_new_names, configs)
    if then.get("train", {}).get("global_batch") == "auto":
        # Nights keep the batch size that auto meant when the base's checkpoint was trained.
        batch = None
        with suppress(ArtifactError):
            checkpoint = store.find(base.checkpoint)
            if checkpoint is not None:
                batch = checkpoint.config.get("train", {}).get("global_batch")
        if isinstance(batch, int):
            then["train"]["global_batch"] = batch
    return then, now


def is_expected(path: str) -> bool:
    """Return whether the setting at ``path`` differs from night to night, or only says where and how things run."""
    return f"{path}.".startswith(_EXPECTED)


def write_summary(store: Store, record: NightRecord) -> None:
    """Write ``nightly.html`` and ``nightly.md`` to the run's folder."""
    run = run_directory(record.run)
    store.write_bytes(f"{run}/{NIGHT_PAGE}", night_page(record).encode())
    store.write_bytes(f"{run}/{NIGHT_TEXT}", night_markdown(record).encode())


def line_of(record: NightRecord) -> str:
    """Return the outcome in one line."""
    line = f"{record.date} of model {record.model}: {record.outcome.upper()}"
    if record.version:
        line += f" {record.version}"
    if record.ne is not None:
        line += f", NE {decimal(record.ne)}"
    if record.incumbent_ne is not None:
        line += f" (incumbent {decimal(record.incumbent_ne)})"
    reasons = record.reasons if record.outcome == HELD else (record.message,)
    if reasons and reasons[0]:
        line += f"; {reasons[0]}"
    return line


def deliver(
    url: str, verdict: Mapping[str, Any], *, timeout: float = TIMEOUT_SECONDS, pause: float = PAUSE_SECONDS
) -> bool:
    """POST ``verdict`` to ``url`` in up to three tries. This never changes the outcome of a night.

    Logs a failure, without the secret part of the URL. A redirection is a failure, because the verdict would not be
    sent along.

    Args:
        timeout: Seconds.
        pause: Seconds, doubled after each try.

    Returns:
        Whether it was accepted.
    """
    # Messages name only the host, because the rest of the URL is secret.
    at = ""
    with suppress(ValueError):
        if host := urlsplit(url).hostname:
            at = f" at {host}"
    opener, problem = urllib.request.build_opener(_NoRedirection), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            request = urllib.request.Request(
                url,
                data=json.dumps(verdict).encode(),
                method="POST",
                headers={"Content-Type": "application/json", "User-Agent": "nightjar"},
            )
            with opener.open(request, timeout=timeout):
                return True
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code} {error.reason}"
        except (ValueError, http.client.InvalidURL):
            # The messages of these errors quote the URL, so they are not logged.
            log.warning("the verdict was not delivered to nightly.webhook%s: its URL is not valid", at)
            return False
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    log.warning("the verdict was not delivered to nightly.webhook%s in %d tries: %s", at, TRIES, problem)
    return False


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Treat a redirection as an error."""
