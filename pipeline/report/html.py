"""``runs/<run>/report.html``: the page of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.core import units
from pipeline.core.errors import ArtifactError, UnreachableError
from pipeline.records.gate import HOLD, Curve
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.records.result import Evaluation, IngestPart, PlanPart, Result, TrainPart
from pipeline.records.towers import TowerChoice, Towers
from pipeline.report import run_tables
from pipeline.report.charts import run_figures, sequence_figures
from pipeline.report.gate import GATE_PAGE
from pipeline.report.page import from_template, pill
from pipeline.report.plans import PLAN_PAGE
from pipeline.report.records import read_records
from pipeline.report.summary import doubts, error_text, hosts_lines, reachable_gain
from pipeline.report.towers import TOWERS_PAGE, choice_part
from pipeline.specs import STAGES
from pipeline.store.artifacts import Store

RELIABILITY, ATTENTION = "reliability.json", "attention.json"


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that the page shows; unknown parts are empty.

    ``plan_problem``: why ``plan.json`` could not be read. ``finished``: when the youngest artifact was committed,
    seconds since 1970. ``plan_page``, ``towers_page``, ``gate_page``: relative URLs. ``data``: from ``read_data``.
    ``attention``: what events of example rows weigh, by sequence. ``choice``: of ``partition.auto``.
    """

    result: Result
    records: list[dict[str, Any]] = field(default_factory=list)
    plan: Plan | None = None
    plan_problem: str = ""
    reliability: Curve | None = None
    config: str = ""
    finished: float | None = None
    plan_page: str = ""
    towers_page: str = ""
    gate_page: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] = field(default_factory=dict)
    choice: TowerChoice | None = None


def write_report(store: Store, run: str) -> str:
    """Write the page of ``run`` from its records and artifacts, and return its path in the store.

    If the plan cannot be read, the page says why. Raises ArtifactError if ``result.json`` is missing or another file is
    damaged.
    """
    path = f"runs/{run}/report.html"
    store.write_bytes(path, render(read_run(store, run)).encode())
    return path


def read_run(store: Store, run: str) -> ReportData:
    """Read what is known about ``run``; ArtifactError if it has no ``result.json``."""
    result = read(Result, store, f"runs/{run}/{Result.FILE}")
    paths, artifacts = {}, {}
    for name, stage in result.stages.items():
        if stage.artifact:
            paths[name] = stage.artifact
            if (artifact := store.find(stage.artifact)) is not None:
                artifacts[name] = artifact
    curve, attention = f"{paths.get('evaluate')}/{RELIABILITY}", f"{paths.get('evaluate')}/{ATTENTION}"
    # If features were partitioned, the plan for their towers is the one that was used for training.
    planner = "plan" if result.towers is None else "partition"
    planned, plan, problem = paths.get(planner), None, ""
    if planner in artifacts:
        try:
            store.verify(artifacts[planner], "plan.json")
            plan = read(Plan, store, f"{planned}/plan.json")
        except UnreachableError:
            raise
        except ArtifactError as error:
            problem = str(error)
    config = ""
    if store.exists(f"runs/{run}/config.yaml"):
        with store.open(f"runs/{run}/config.yaml") as source:
            config = source.read().decode("utf-8", errors="replace")
    found: dict[str, Any] = {}
    if store.exists(curve):
        found["reliability"] = read(Curve, store, curve)
    if store.exists(attention):
        found["attention"] = store.read_json(attention)
    if "partition" in artifacts:
        found["choice"] = read(Towers, store, f"{paths['partition']}/{Towers.FILE}").choice
    return ReportData(
        result=result,
        records=read_records(store, run),
        plan=plan,
        plan_problem=problem,
        config=config,
        plan_page=_page_url(store, planned, PLAN_PAGE),
        towers_page=_page_url(store, paths.get("partition"), TOWERS_PAGE),
        gate_page=_page_url(store, paths.get("publish"), GATE_PAGE),
        data=run_tables.read_data(store, artifacts.get("ingest")),
        finished=max((artifact.created for artifact in artifacts.values()), default=None),
        **found,
    )


def _page_url(store: Store, path: str | None, name: str) -> str:
    # Return the URL of a file in the artifact at ``path``, relative to the report; "" if there is none.
    if not path or not store.exists(f"{path}/{name}"):
        return ""
    return f"../../{path}/{name}"


def render(data: ReportData) -> str:
    result, status = data.result, data.result.status
    shown = (status, status)
    # A run that the gate held has status "failed", though nothing went wrong.
    if status == "failed" and result.gate is not None and result.gate.verdict == HOLD:
        shown = (HOLD, "held")
    stages, train, scores = result.stages, result.train or TrainPart(), result.eval or Evaluation()
    # List the remaining figures of ``result.json``, except those of stages that did not run.
    details = []
    for stage in STAGES:
        for name, value in stage.facts(result):
            if value != units.ABSENT:
                details.append((name, value))
    if changes := hosts_lines(result.shrunk, result.grown):
        details.append(("Hosts", "; ".join(changes)))
    error = None
    if result.error is not None:
        error = {"text": error_text(result.error), "hint": result.error.hint or ""}
    return from_template(
        "report.html",
        title=f"Nightjar run {result.run}",
        files="result.json and metrics.jsonl",
        run=result.run,
        status=pill(*shown),
        about=_about(data, status),
        error=error,
        summary=_figures(result),
        doubts=doubts(scores),
        gate=_gate(result, data.gate_page),
        stages=run_tables.stages_table(stages),
        stages_bar=run_tables.stages_bar(stages),
        data=_data(result.ingest, data.data),
        tasks=run_tables.tasks_table(scores),
        sequences=sequence_figures((result.ingest or IngestPart()).sequences or {}, data.attention),
        plots=run_figures(data.records, scores, data.reliability),
        phases=run_tables.phases_table(train),
        has_phases=bool(train.phases),
        prediction=run_tables.prediction_table(result.prediction),
        prediction_words=run_tables.prediction_words(result.prediction),
        details=details,
        plan=_plan(result.plan, data),
        choice=choice_part(data.choice),
        config=run_tables.config_excerpt(data.config),
    )


def _about(data: ReportData, status: str) -> str:
    parts = ["Nightjar run report"]
    dataset = (data.result.artifact("ingest") or "").split("/")
    if len(dataset) == 3:
        parts.append(f"data {dataset[1]}")
    if data.plan is not None:
        parts.append(units.plural(data.plan.world_size, f"{data.plan.device} rank"))
    if data.finished is not None:
        verb = "finished" if status == "done" else "last artifact"
        parts.append(f"{verb} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(data.finished))} UTC")
    return " · ".join(parts)


def _gate(result: Result, page: str) -> dict[str, Any] | None:
    gate, model = result.gate, result.model
    if gate is None:
        return None
    text = f"{gate.version}, no incumbent"
    if gate.incumbent:
        text = f"{gate.version} beside {gate.incumbent}"
    if model:
        text += f"; published at {model.uri}"
    elif gate.verdict == HOLD:
        text += "; not published"
    reasons = [*gate.reasons, *(f"warning: {line}" for line in gate.warnings or ())]
    return {"verdict": pill(gate.verdict, gate.verdict), "text": text, "reasons": reasons, "page": page}


def _data(part: IngestPart | None, data: Mapping[str, Any]) -> dict[str, Any] | None:
    # ``part`` is ``ingest`` of ``result.json``, and ``data`` comes from ``read_data``.
    if not data or part is None or part.rows is None:
        return None
    quality = data[run_tables.QUALITY]
    left_out, more = len(quality["quarantine"]["reasons"]) - run_tables.MOST_REASONS, ""
    if left_out > 0:
        more = f"and {left_out} more"
    return {
        "text": run_tables.data_words(part, data),
        "warnings": quality["checks"]["warnings"],
        "quarantine": run_tables.quarantine_table(quality["quarantine"]),
        "more": more,
        "features": run_tables.features_table(data),
    }


def _plan(part: PlanPart | None, data: ReportData) -> dict[str, Any] | None:
    if part is None or not part.tables:
        return None
    return {
        "text": run_tables.plan_words(part, data.plan),
        "table": run_tables.plan_table(part.tables, data.plan),
        "problem": data.plan_problem,
        "page": data.plan_page,
        # The page of an automatic choice exists for the flat model, too.
        "towers": "" if data.result.towers is None else data.towers_page,
    }


def _figures(result: Result) -> list[tuple[str, str, str]]:
    scores, train, rows = result.eval, result.train, result.ingest
    figures: list[tuple[str, str, str]] = []
    if scores is not None:
        best, gain = units.decimal(scores.bayes_ne), reachable_gain(scores)
        figures.append(("NE", units.decimal(scores.ne), f"{_interval_prefix(scores.ne_interval)}1 is the base rate"))
        if gain is not None:
            figures.append(("Reachable gain", units.percent(gain), f"the best reachable NE is {best}"))
        loss = f"{_interval_prefix(scores.auc_interval)}log loss {units.decimal(scores.logloss)}"
        figures.append(("AUC", units.decimal(scores.auc), loss))
        if scores.gauc is not None:
            groups = f"within {units.plural(scores.gauc_groups, 'group')} by {scores.group_by}"
            figures.append(("GAUC", units.decimal(scores.gauc), f"{_interval_prefix(scores.gauc_interval)}{groups}"))
        figures.append(("Calibration", units.decimal(scores.calibration, 3), "predicted / observed clicks"))
    if train is not None:
        wait = f"{units.percent(train.data_wait_share)} waiting for data"
        figures.append(("Samples/s", units.count(train.samples_per_s), wait))
    if rows is not None:
        figures.append(("Rows", units.count(rows.rows), f"{units.count(rows.rows_quarantined)} in quarantine"))
    done = [stage.status for stage in result.stages.values()].count("done")
    figures.append(("Duration", units.duration(result.seconds), f"{done} of {len(result.stages)} stages ran"))
    return figures


def _interval_prefix(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    return f"{units.decimal(low)} to {units.decimal(high)} (95%); "
