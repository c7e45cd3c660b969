"""The data of a run: rows, quarantine by reason, and how far each feature moved since the previous day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import units
from pipeline.records import IngestPart
from pipeline.report.page import PageTable, with_meter
from pipeline.store import Artifact, Store

QUALITY, PROFILE = "quality.json", "profile.json"
MOST_FEATURES, MOST_REASONS = 200, 8
FULL_METER = 0.5  # PSI at which the meter is full


def read_data(store: Store, dataset: Artifact | None) -> dict[str, Any]:
    """Quality, profile and bytes of ``dataset``; empty if it has no ``quality.json``."""
    if dataset is None or QUALITY not in dataset.files:
        return {}
    files = {name: store.read_json(f"{dataset.path}/{name}") for name in (QUALITY, PROFILE) if name in dataset.files}
    return {**files, "bytes": sum(entry.bytes for entry in dataset.files.values())}


def data_words(part: IngestPart, data: Mapping[str, Any]) -> str:
    """A line about a run's dataset. ``data``: from ``read_data``."""
    against = data[QUALITY]["checks"]["against"]
    parts = [
        f"{units.count(part.rows_train)} train{_looked_at(part)} and {units.count(part.rows_test)} test rows, "
        f"{units.size(data['bytes'])} written",
        f"test rows from {part.split_time['test_from']} UTC on" if part.split_time else "",
        f"{units.count(part.rows_gap)} rows left out before them" if part.rows_gap else "",
        f"day {part.day}" if part.day else "",
        f"replaces {part.replaces}" if part.replaces else "",
        *(f"{units.count(rows)} rows kept for {day}" for day, rows in (part.rows_late or {}).items()),
        *(f"{units.count(rows)} rows of {name} freed" for name, rows in (part.rows_freed or {}).items()),
        *(f"{units.count(rows)} of them replaced in {name}" for name, rows in (part.rows_replaced or {}).items()),
        "split by file and row number" if part.split_by_place else "",
        f"compared with {against}" if against else "no previous day to compare with",
    ]
    return "; ".join(text for text in parts if text) + "."


def _looked_at(part: IngestPart) -> str:
    return "" if part.rows_validation is None else f", {units.count(part.rows_validation)} validation"


def quarantine_table(quarantine: Mapping[str, Any]) -> PageTable:
    """Reasons and their rows, the most common first."""
    reasons = list(quarantine["reasons"].items())
    rows = [(reason, units.count(n), units.percent(n / quarantine["rows"])) for reason, n in reasons[:MOST_REASONS]]
    return PageTable(("Quarantine reason~", "Rows*", "Share*"), rows)


def features_table(data: Mapping[str, Any]) -> PageTable:
    """One row per feature, the largest change first."""
    profile, drift = data.get(PROFILE, {}), data[QUALITY]["checks"]["drift"]
    kinds = {name: kind for kind in ("dense", "sparse") for name in profile.get(kind, {})}
    order = sorted(kinds, key=lambda name: -drift.get(name, {}).get("psi", 0.0))[:MOST_FEATURES]
    rows = [_feature(name, kinds[name], profile[kinds[name]][name], data) for name in order]
    return PageTable(("Feature", "Kind", "Missing*", "Mean*", "Distinct*", "Table rows*", "Drift (PSI)*"), rows)


def _feature(name: str, kind: str, profile: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, ...]:
    moved = data[QUALITY]["checks"]["drift"].get(name, {}).get("psi")
    shown = units.decimal(moved, 3)
    distinct = data[QUALITY]["distribution"]["features"].get(name, {}).get("distinct")
    return (
        name,
        kind,
        units.percent(profile["missing_share"]),
        units.short(profile.get("mean")) if kind == "dense" else units.ABSENT,
        # Numbers are counted in buckets of a sketch, which are fewer than the values.
        units.count(distinct if kind != "dense" else None),
        units.count(profile.get("rows")),
        with_meter(shown, moved / FULL_METER, least=0.0) if moved is not None else shown,
    )
