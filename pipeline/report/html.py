"""``runs/<run>/report.html``: one self-contained page: inline CSS and SVG, no script, nothing fetched."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pipeline.errors import ArtifactError, UnreachableError
from pipeline.records import Plan
from pipeline.report import units
from pipeline.report.charts import plots_section
from pipeline.report.data import data_section, read_data
from pipeline.report.gate import GATE_PAGE, gate_section
from pipeline.report.page import cards, document
from pipeline.report.phases import phases_section
from pipeline.report.plans import PLAN_PAGE
from pipeline.report.records import read_records
from pipeline.report.summary import reachable_gain, shrunk_lines, total_seconds
from pipeline.report.tables import config_section, facts, plan_section, stages_section
from pipeline.report.towers import TOWERS_PAGE
from pipeline.store import Store

RELIABILITY = "reliability.json"


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything the page shows; parts that are not known stay empty.

    ``plan_problem``: why ``plan.json`` is there but was not read.
    ``reliability``: ``predicted``, ``observed``, ``rows`` by bin, as ``evaluation.reliability`` gives them.
    ``finished``: seconds since 1970 at which the youngest artifact was committed. ``plan_page``, ``towers_page``,
    ``gate_page``: where the plan's, the towers' and the gate's own pages lie, relative to this one. ``data``: of the
    dataset, as ``read_data`` gives it.
    """

    result: Mapping[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    plan: Plan | None = None
    plan_problem: str = ""
    reliability: Mapping[str, list[Any]] | None = None
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
    found = [artifact for path in paths.values() if (artifact := store.find(path)) is not None]
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
        reliability=store.read_json(curve) if store.exists(curve) else None,
        config=config,
        plan_page=_page(store, planned, PLAN_PAGE),
        towers_page=_page(store, paths.get("partition"), TOWERS_PAGE),
        gate_page=_page(store, paths.get("publish"), GATE_PAGE),
        data=read_data(store, store.find(paths["ingest"]) if "ingest" in paths else None),
        finished=max((artifact.created for artifact in found), default=None),
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
        return Plan.from_json(store.read_json(f"{artifact.path}/plan.json")), ""
    except UnreachableError:
        raise
    except ArtifactError as error:
        return None, str(error)


def render(data: ReportData) -> str:
    """The page as text; everything that comes from the run is escaped."""
    result = data.result
    parts = [
        _header(data),
        _error(result),
        _figures(result),
        gate_section(result.get("gate", {}), result.get("model", {}), data.gate_page),
        stages_section(result.get("stages", {})),
        data_section(result.get("ingest", {}), data.data),
        plots_section(data.records, result.get("eval", {}), data.reliability),
        phases_section(result.get("train", {})),
        _details(result),
        plan_section(result.get("plan", {}), data.plan, data.plan_page, data.plan_problem, data.towers_page),
        config_section(data.config),
    ]
    return document(f"Nightjar run {result.get('run', '')}", parts, "result.json and metrics.jsonl")


def _header(data: ReportData) -> str:
    status = str(data.result.get("status", "unknown"))
    said = []
    dataset = str(data.result.get("stages", {}).get("ingest", {}).get("artifact") or "").split("/")
    if len(dataset) == 3:
        said.append(f"data {dataset[1]}")
    if data.plan is not None:
        said.append(f"{data.plan.world_size} {data.plan.device} rank{'s' * (data.plan.world_size != 1)}")
    if data.finished is not None:
        verb = "finished" if status == "done" else "last artifact"
        said.append(f"{verb} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(data.finished))} UTC")
    return (
        f'<header><h1>{escape(str(data.result.get("run", "")))}</h1><span class="pill {escape(status)}">'
        f"{escape(status)}</span><p>{escape(' · '.join(['Nightjar run report', *said]))}</p></header>"
    )


def _error(result: Mapping[str, Any]) -> str:
    error = result.get("error")
    if not error:
        return ""
    text = f"{error.get('message', '')} (exit code {error.get('exit_code', units.ABSENT)})"
    hint = f"<p>What to do: {escape(str(error['hint']))}</p>" if error.get("hint") else ""
    return f'<section class="error"><h2>What stopped the run</h2>{escape(text)}{hint}</section>'


def _figures(result: Mapping[str, Any]) -> str:
    """The cards at the top: what a glance should take away."""
    scores, train, rows = (result.get(name, {}) for name in ("eval", "train", "ingest"))
    gain, found = reachable_gain(scores), []
    if scores:
        best = units.decimal(scores.get("bayes_ne"))
        found.append(("NE", units.decimal(scores.get("ne")), "normalised entropy, 1 is the base rate"))
        if gain is not None:
            found.append(("Reachable gain", units.percent(gain), f"the best reachable NE is {best}"))
        found.append(("AUC", units.decimal(scores.get("auc")), f"log loss {units.decimal(scores.get('logloss'))}"))
        found.append(("Calibration", units.decimal(scores.get("calibration"), 3), "predicted / observed clicks"))
    if train:
        wait = f"{units.percent(train.get('data_wait_share'))} waiting for data"
        found.append(("Samples/s", units.count(train.get("samples_per_s")), wait))
    if rows:
        found.append(
            ("Rows", units.count(rows.get("rows")), f"{units.count(rows.get('rows_quarantined'))} in quarantine")
        )
    stages = result.get("stages", {})
    done = sum(stage.get("status") == "done" for stage in stages.values())
    found.append(("Duration", units.duration(total_seconds(result)), f"{done} of {len(stages)} stages ran"))
    return cards(found)


def _details(result: Mapping[str, Any]) -> str:
    """The remaining figures of ``result.json``, two or three columns of name and value."""
    rows, train, saved, scores = (result.get(name, {}) for name in ("ingest", "train", "checkpoint", "eval"))
    sent = train.get("bytes_per_sample", {})
    found = [
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
    return facts("Details", [(name, value) for name, value in found if value != units.ABSENT])
