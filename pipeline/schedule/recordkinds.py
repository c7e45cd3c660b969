"""Every kind of record that names something else in the store: records of models, runs and nights."""

from __future__ import annotations

from pipeline.publishing.recordkinds import RECORDS
from pipeline.records import NIGHT
from pipeline.specs import STAGES
from pipeline.specs.stage import Stage
from pipeline.store import MANIFEST
from pipeline.store.references import Record, RecordKind, References, key_of, of_manifest, run_of


def _steps(record: Record) -> References:
    shared = {stage.name for stage in STAGES if stage.shared}  # their artifacts are outside the run
    return References(meant=frozenset(str(step["key"]) for step in record.get("steps", ()) if step["name"] in shared))


def _result(record: Record) -> References:
    stages = record.get("stages", {})
    return References(keys=frozenset().union(*(key_of(stage["artifact"]) for stage in stages.values())))


def _night(record: Record) -> References:
    base = record.get("base") or {}
    return References(keys=key_of(base.get("dataset")) | key_of(base.get("plan")), runs=run_of(base.get("run")))


def _config(record: Record) -> References:
    """What the settings of a run name."""
    part = {name: record.get(name) or {} for name in ("data", "plan", "checkpoint", "partition")}
    return References(
        keys=key_of(part["data"].get("mapping_from")) | key_of(part["plan"].get("former")),
        runs=run_of(part["checkpoint"].get("init_from")) | run_of(part["partition"].get("probe")),
    )


def _made_by(stage: Stage) -> RecordKind:
    """The artifacts of a stage that are inside the run's folder."""
    pattern = f"runs/*/{stage.name}/*/{MANIFEST}"
    return RecordKind(name=f"{stage.name} artifact", pattern=pattern, refers=of_manifest, pins=stage.trains)


SPECS = (
    *RECORDS,
    *(_made_by(stage) for stage in STAGES if not stage.shared),
    RecordKind(name="run's steps", pattern="runs/*/steps.json", refers=_steps),
    RecordKind(name="run's result", pattern="runs/*/result.json", refers=_result),
    RecordKind(name="night", pattern=f"runs/*/{NIGHT}", refers=_night, starts=True),
    RecordKind(name="run's configuration", pattern="runs/*/config.yaml", refers=_config, starts=True),
)
