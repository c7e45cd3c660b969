"""What the manifest of a version refers to: its inputs, its run and its checkpoint."""

from __future__ import annotations

from pipeline.store import MANIFEST
from pipeline.store.references import Record, RecordKind, References, key_of, of_manifest, run_of


def _version(record: Record) -> References:
    made, summary = of_manifest(record), record.get("summary") or {}
    runs = run_of(summary.get("run")).union(*(run_of(path) for path in made.checkpoints))
    return made | References(keys=key_of(summary.get("dataset")), runs=runs)


RECORDS = (
    RecordKind(name="model", pattern=f"models/*/{MANIFEST}", refers=_version, pins=True),  # written by other programs
    RecordKind(name="version", pattern=f"models/*/*/{MANIFEST}", refers=_version, pins=True),
)
