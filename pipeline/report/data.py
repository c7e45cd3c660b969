"""What came in: rows, quarantine by reason, every feature and how far it moved from the day before."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from pipeline.report import units
from pipeline.report.tables import head_cells, number, scroll_table, section
from pipeline.store import Artifact, Store

QUALITY, PROFILE = "quality.json", "profile.json"
MOST_FEATURES, MOST_REASONS = 200, 8
FULL_METER = 0.5  # PSI at which the meter is full; above 0.25 much has moved


def read_data(store: Store, dataset: Artifact | None) -> dict[str, Any]:
    """What the page says of ``dataset``: its quality and profile, empty where it has none, and its size in bytes."""
    if dataset is None or QUALITY not in dataset.files:
        return {}
    found = {name: store.read_json(f"{dataset.path}/{name}") for name in (QUALITY, PROFILE) if name in dataset.files}
    return {**found, "bytes": sum(entry.bytes for entry in dataset.files.values())}


def data_section(part: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The dataset of a run; ``part``: ``ingest`` of ``result.json``, ``data``: as ``read_data`` gives it."""
    if not data or not part:
        return ""
    quality = data[QUALITY]
    warnings = "".join(f"<li>{escape(line)}</li>" for line in quality["checks"]["warnings"])
    said = f'<p class="muted small">{escape(_words(part, data))}</p>' + (f"<ul>{warnings}</ul>" if warnings else "")
    return section("Data", said + _quarantine(quality["quarantine"]) + _features(data))


def _words(part: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    against = data[QUALITY]["checks"]["against"]
    said = [
        f"{units.count(part.get('rows_train'))} train and {units.count(part.get('rows_test'))} test rows, "
        f"{units.size(data['bytes'])} written",
        f"day {part['day']}" if part.get("day") else "",
        f"in the place of {part['replaces']}" if part.get("replaces") else "",
        *(f"{units.count(rows)} rows kept for {day}" for day, rows in part.get("rows_late", {}).items()),
        *(f"{units.count(rows)} rows of {name} freed" for name, rows in part.get("rows_freed", {}).items()),
        *(f"{units.count(rows)} of them replaced in {name}" for name, rows in part.get("rows_replaced", {}).items()),
        "split by file and row number" if part.get("split_by_place") else "",
        f"compared with {against}" if against else "no day before to compare with",
    ]
    return "; ".join(text for text in said if text) + "."


def _quarantine(found: Mapping[str, Any]) -> str:
    """Reasons and their rows, the most common first; nothing where every row was good."""
    reasons = list(found["reasons"].items())
    rows = [
        f"<tr><td>{escape(reason)}</td>{number(units.count(count))}{number(units.percent(count / found['rows']))}</tr>"
        for reason, count in reasons[:MOST_REASONS]
    ]
    more = f'<p class="muted small">and {len(reasons) - MOST_REASONS} more</p>' if len(reasons) > MOST_REASONS else ""
    return scroll_table(head_cells(("Quarantined because", "Rows*", "Share*")), rows) + more if rows else ""


def _features(data: Mapping[str, Any]) -> str:
    """A row a feature, the one that moved furthest first."""
    profile, drift = data.get(PROFILE, {}), data[QUALITY]["checks"]["drift"]
    kinds = {name: kind for kind in ("dense", "sparse") for name in profile.get(kind, {})}
    order = sorted(kinds, key=lambda name: -drift.get(name, {}).get("psi", 0.0))[:MOST_FEATURES]
    rows = [_feature(name, kinds[name], profile[kinds[name]][name], data) for name in order]
    head = head_cells(("Feature", "Kind", "Missing*", "Mean*", "Distinct*", "Table rows*", "Moved (PSI)*"))
    return scroll_table(head, rows) if rows else ""


def _feature(name: str, kind: str, profile: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    moved = data[QUALITY]["checks"]["drift"].get(name, {}).get("psi")
    distinct = data[QUALITY]["distribution"]["features"].get(name, {}).get("distinct")
    meter = (
        '<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{min(100 * (moved or 0) / FULL_METER, 100):.1f}" height="8"/></svg>'
    )
    return (
        f"<tr><td>{escape(name)}</td><td>{kind}</td>"
        + number(units.percent(profile["missing_share"]))
        + number(units.short(profile.get("mean")) if kind == "dense" else units.ABSENT)
        + number(units.count(distinct))
        + number(units.count(profile.get("rows")))
        + f'<td class="number">{units.decimal(moved, 3)}{meter if moved is not None else ""}</td></tr>'
    )
