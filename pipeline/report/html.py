"""``runs/<run>/report.html``: one self-contained page: inline CSS and SVG, no script, nothing fetched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import units
from pipeline.errors import ArtifactError, UnreachableError
from pipeline.records import Curve, Plan, read
from pipeline.report.charts import run_figures
from pipeline.report.data import MOST_REASONS, QUALITY, data_words, features_table, quarantine_table, read_data
from pipeline.report.gate import GATE_PAGE
from pipeline.report.page import from_template, items, pill
from pipeline.report.phases import phases_table
from pipeline.report.plans import PLAN_PAGE
from pipeline.report.records import read_records
from pipeline.report.summary import reachable_gain, shrunk_lines, total_seconds
from pipeline.report.tables import config_excerpt, plan_table, plan_words, stages_bar, stages_table
from pipeline.report.towers import TOWERS_PAGE
from pipeline.store import Store

RELIABILITY = "reliability.json"


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything the page shows; parts that are not known stay empty.

    ``plan_problem``: why ``plan.json`` is there but was not read.
    ``finished``: seconds since 1970 at which the youngest artifact was committed. ``plan_page``, ``towers_page``,
    ``gate_page``: where the plan's, the towers' and the gate's own pages lie, relative to this one. ``data``: of the
    dataset, as ``read_data`` gives it.
    """

    result: Mapping[str, Any]
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


def write_report(store: Store, run: str) -> str:
    """Write the page of ``run`` from what its directory and artifacts hold; returns its path relative to the store.

    The calibration plot needs ``reliability.json`` in the evaluate artifact. A plan that is damaged or another
    release's is said to be so on the page. Raises ArtifactError where the run has no ``result.json`` or another file
    is damaged.
    """
    path = f"runs/{run}/report.html"
    store.write_bytes(path, render(read_run(store, run)).encode())
    return path


def read_run(store: Store, run: str) -> ReportData:
    """Gather what is known about ``run``; ArtifactError where it has no ``result.json``."""
    result = store.read_json(f"runs/{run}/result.json")
    paths = {name: stage["artifact"] for name, stage in result.get("stages", {}).items() if stage.get("artifact")}
    artifacts = [artifact for path in paths.values() if (artifact := store.find(path)) is not None]
    curve = f"{paths.get('evaluate')}/{RELIABILITY}"
    planned = paths.get("partition" if "towers" in result else "plan")
    plan, problem = _read_plan(store, planned)
    config = ""
    if store.exists(f"runs/{run}/config.yaml"):
        with store.open(f"runs/{run}/config.yaml") as source:
            config = source.read().decode("utf-8", errors="replace")
    return ReportData(
        result=result,
        records=read_records(store, run),
        plan=plan,
        plan_problem=problem,
        reliability=read(Curve, store, curve) if store.exists(curve) else None,
        config=config,
        plan_page=_page(store, planned, PLAN_PAGE),
        towers_page=_page(store, paths.get("partition"), TOWERS_PAGE),
        gate_page=_page(store, paths.get("publish"), GATE_PAGE),
        data=read_data(store, store.find(paths["ingest"]) if "ingest" in paths else None),
        finished=max((artifact.created for artifact in artifacts), default=None),
    )


def _page(store: Store, path: str | None, name: str) -> str:
    """URL of page ``name`` of the artifact at ``path`` relative to the report, "" where there is none."""
    return f"../../{path}/{name}" if path and store.exists(f"{path}/{name}") else ""


def _read_plan(store: Store, path: str | None) -> tuple[Plan | None, str]:
    """The plan in the artifact at ``path``, if it is as it was committed; else what is the matter with it."""
    artifact = store.find(path) if path else None
    if artifact is None:
        return None, ""
    try:
        store.verify(artifact, "plan.json")
        return read(Plan, store, f"{artifact.path}/plan.json"), ""
    except UnreachableError:
        raise
    except ArtifactError as error:
        return None, str(error)


def render(data: ReportData) -> str:
    """The page as text; everything that comes from the run is escaped."""
    result, status = data.result, str(data.result.get("status", "unknown"))
    stages, train, scores = (result.get(name, {}) for name in ("stages", "train", "eval"))
    return from_template(
        "report.html", title=f"Nightjar run {result.get('run', '')}", files="result.json and metrics.jsonl",
        run=result.get("run", ""), status=pill(status, status), about=_about(data, status), error=_error(result),
        summary=_figures(result), gate=_gate(result, data.gate_page), stages=stages_table(stages),
        stages_bar=stages_bar(stages), data=_data(result.get("ingest", {}), data.data),
        plots=run_figures(data.records, scores, data.reliability), phases=phases_table(train),
        has_phases=bool(train.get("phases")), details=_details(result), plan=_plan(result.get("plan", {}), data),
        config=config_excerpt(data.config),
    )  # fmt: skip


def _about(data: ReportData, status: str) -> str:
    parts = ["Nightjar run report"]
    dataset = str(data.result.get("stages", {}).get("ingest", {}).get("artifact") or "").split("/")
    if len(dataset) == 3:
        parts.append(f"data {dataset[1]}")
    if data.plan is not None:
        parts.append(units.plural(data.plan.world_size, f"{data.plan.device} rank"))
    if data.finished is not None:
        verb = "finished" if status == "done" else "last artifact"
        parts.append(f"{verb} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(data.finished))} UTC")
    return " · ".join(parts)


def _error(result: Mapping[str, Any]) -> dict[str, str] | None:
    error = result.get("error")
    if not error:
        return None
    text = f"{error.get('message', '')} (exit code {error.get('exit_code', units.ABSENT)})"
    return {"text": text, "hint": str(error.get("hint", ""))}


def _gate(result: Mapping[str, Any], page: str) -> dict[str, Any] | None:
    """Verdict, reasons and what is published; ``page``: relative URL of the gate's own page."""
    gate, uri = result.get("gate"), result.get("model", {}).get("uri")
    if not gate:
        return None
    verdict, against = str(gate.get("verdict", "")), gate.get("incumbent")
    beside = f" beside {against}" if against else ", no incumbent"
    where = f"; published at {uri}" if uri else "; not published" if verdict == "HOLD" else ""
    reasons = [*items(gate, "reasons"), *(f"warning: {line}" for line in items(gate, "warnings"))]
    text = f"{gate.get('version', '')}{beside}{where}"
    return {"verdict": pill(verdict, verdict), "text": text, "reasons": reasons, "page": page}


def _data(part: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dataset; ``part``: ``ingest`` of ``result.json``, ``data``: as ``read_data`` gives it."""
    if not data or not part:
        return None
    quality = data[QUALITY]
    more = len(quality["quarantine"]["reasons"]) - MOST_REASONS
    return {
        "text": data_words(part, data), "warnings": quality["checks"]["warnings"],
        "quarantine": quarantine_table(quality["quarantine"]), "more": f"and {more} more" if more > 0 else "",
        "features": features_table(data),
    }  # fmt: skip


def _plan(part: Mapping[str, Any], data: ReportData) -> dict[str, Any] | None:
    tables = part.get("tables")
    if not tables:
        return None
    return {
        "text": plan_words(part, data.plan), "table": plan_table(tables, data.plan), "problem": data.plan_problem,
        "page": data.plan_page, "towers": data.towers_page,
    }  # fmt: skip


def _figures(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The cards at the top: what a glance should take away."""
    scores, train, rows = (result.get(name, {}) for name in ("eval", "train", "ingest"))
    gain = reachable_gain(scores)
    figures: list[tuple[str, str, str]] = []
    if scores:
        best = units.decimal(scores.get("bayes_ne"))
        figures.append(("NE", units.decimal(scores.get("ne")), "normalised entropy, 1 is the base rate"))
        if gain is not None:
            figures.append(("Reachable gain", units.percent(gain), f"the best reachable NE is {best}"))
        figures.append(("AUC", units.decimal(scores.get("auc")), f"log loss {units.decimal(scores.get('logloss'))}"))
        figures.append(("Calibration", units.decimal(scores.get("calibration"), 3), "predicted / observed clicks"))
    if train:
        wait = f"{units.percent(train.get('data_wait_share'))} waiting for data"
        figures.append(("Samples/s", units.count(train.get("samples_per_s")), wait))
    if rows:
        figures.append(
            ("Rows", units.count(rows.get("rows")), f"{units.count(rows.get('rows_quarantined'))} in quarantine")
        )
    stages = result.get("stages", {})
    done = sum(stage.get("status") == "done" for stage in stages.values())
    figures.append(("Duration", units.duration(total_seconds(result)), f"{done} of {len(stages)} stages ran"))
    return figures


def _details(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The remaining figures of ``result.json``, two or three columns of name and value."""
    rows, train, saved, scores = (result.get(name, {}) for name in ("ingest", "train", "checkpoint", "eval"))
    sent = train.get("bytes_per_sample", {})
    figures = [
        ("Raw bytes read", units.size(rows.get("bytes_in"))),
        ("Ingestion, rows/s", units.count(rows.get("rows_per_s"))),
        ("Training steps", units.count(train.get("steps"))),
        ("Training samples", units.count(train.get("samples"))),
        ("Steps before this session", units.count(train.get("resumed", {}).get("step"))),
        ("Training time", units.duration(train.get("seconds"))),
        ("Ranks", units.count(train.get("world_size"))),
        ("Fewer hosts", "; ".join(shrunk_lines(result)) or units.ABSENT),
        ("Peak memory", units.size(train.get("peak_rss_bytes"))),
        ("Embeddings between hosts, bytes per sample", units.count(sent.get("inter_host"))),
        ("Embeddings within hosts, bytes per sample", units.count(sent.get("intra_host"))),
        ("Dense gradients between hosts, bytes per sample", units.count(sent.get("dense_inter_host"))),
        ("Checkpoints written", units.count(saved.get("count"))),
        ("Checkpoint bytes", units.size(saved.get("bytes_written"))),
        ("Had all been full", units.size(saved.get("bytes_full_equivalent"))),
        ("Stalled by checkpoints", units.percent(saved.get("stall_share"))),
        ("Checkpoints skipped", units.count(saved.get("skipped") or None)),
        ("Checkpoints failed", units.count(saved.get("failed") or None)),
        ("Held-out rows", units.count(scores.get("samples"))),
    ]
    return [(name, value) for name, value in figures if value != units.ABSENT]
