"""Plan reuse: the plan of an earlier night, where nothing it depends on has changed, so that tables stay in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.record import read
from pipeline.store.artifacts import Store

MOST_CHANGE = 0.1  # of a table's lookups per sample


def reused_plan(
    store: Store, former: str, covered: Mapping[str, Any], schema: DatasetSchema, profile: Profile, profile_key: str
) -> tuple[Plan | None, str]:
    """The plan of the artifact at path ``former``, or None where a new one is needed, and the reason in words.

    A plan is reused where the settings that its key covers (now: ``covered``) and every table's rows are the same, and
    its lookups per sample differ by at most 10 %.
    """
    artifact = store.find(former)
    if artifact is None:
        return None, f"{former} is gone"
    try:
        store.verify(artifact, "plan.json")
        plan = read(Plan, store, f"{former}/plan.json")
    except ArtifactError as error:
        return None, error.message
    # The settings of an older plan may say train.global_batch=auto; the plan itself has the number.
    then = {**artifact.config, "train": {**artifact.config.get("train", {}), "global_batch": plan.global_batch}}
    change = _setting(then, covered) or _table(plan, schema, profile)
    if change:
        return None, change
    return dataclasses.replace(plan, profile_key=profile_key), "tables and settings are the same"


def _setting(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first setting that differs, in words; "" where none does."""
    then, now = ({**side, "plan": {**side["plan"], "former": None}} for side in (then, now))
    return _difference(then, now, "")


def _difference(then: Any, now: Any, path: str) -> str:
    if isinstance(then, dict) and isinstance(now, dict):
        differences = (_difference(then.get(name), now.get(name), f"{path}.{name}") for name in {**then, **now})
        return next(filter(None, differences), "")
    return "" if then == now else f"{path[1:]} was {then}, is {now}"


def _table(plan: Plan, schema: DatasetSchema, profile: Profile) -> str:
    """The first table that differs, in words; "" where none does."""
    names = {table.name for table in schema.tables}
    if other := names ^ plan.tables.keys():
        return f"table {min(other)} is {'new' if min(other) in names else 'gone'}"
    for column in schema.tables:
        then, pooling = plan.tables[column.name], profile.table(column.columns).pooling
        if then.rows != column.rows:
            return f"table {column.name} had {then.rows:,} rows, has {column.rows:,}"
        if abs(pooling - then.pooling) > MOST_CHANGE * then.pooling:
            return f"table {column.name} had {then.pooling:.2f} lookups a sample, has {pooling:.2f}"
    return ""
