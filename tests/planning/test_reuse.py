"""A former plan is taken over where nothing it rests on changed, and nowhere else."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.plandiff import reused_plan
from pipeline.records import DatasetSchema, FeatureProfile, Plan, Profile, SparseColumn
from pipeline.store import Artifact, Store
from tests.keys import key_config

CONFIG = compose(["model.embedding_dim=8", "train.global_batch=4096"])


def schema(**rows: int) -> DatasetSchema:
    sparse = tuple(SparseColumn(name=name, rows=count) for name, count in rows.items())
    return DatasetSchema(dense=(), sparse=sparse, rows={"train": 100}, files={}, groups={})


def profile(pooling: float = 1.0, **rows: int) -> Profile:
    sparse = {
        name: FeatureProfile(
            rows=count, distinct=count, missing_share=0.0, pooling=pooling, hot_rows=[count], hot_share=[1.0]
        )
        for name, count in rows.items()
    }
    return Profile(rows={"train": 100}, label_rate={"train": 0.2}, dense={}, sparse=sparse)


@pytest.fixture
def former(tmp_path: Path) -> tuple[Store, Artifact]:
    """A store and the artifact of a plan for tables a and b."""
    store, covered = Store(str(tmp_path)), key_config("plan", CONFIG)
    plan = make_plan(PlanInputs.of(CONFIG, schema(a=40, b=50), profile(a=40, b=50)), "then")
    with store.draft("plans/p", kind="plan", key="p", config=covered, inputs={}) as draft:
        draft.write_json("plan.json", plan.to_json())
        return store, draft.commit({})


def carried(store: Store, rows: dict[str, int], pooling: float = 1.0, *overrides: str) -> tuple[Plan | None, str]:
    config = compose(["model.embedding_dim=8", "train.global_batch=4096", "plan.former=plans/p", *overrides])
    covered = key_config("plan", config)
    return reused_plan(store, "plans/p", covered, schema(**rows), profile(pooling, **rows), "now")


def test_the_plan_is_taken_over_where_nothing_changed(former: tuple[Store, Artifact]) -> None:
    plan, why = carried(former[0], {"a": 40, "b": 50}, 1.05)
    assert why == "tables and settings are the same"
    then = Plan.from_json(former[0].read_json("plans/p/plan.json"))
    assert plan == replace(then, profile_key="now")


def test_a_plan_made_with_the_automatic_batch_is_compared_by_its_number(former: tuple[Store, Artifact]) -> None:
    store, artifact = former
    covered = key_config("plan", compose(["model.embedding_dim=8"]))
    assert covered["train"]["global_batch"] == "auto"
    numbers = [{**covered, "train": {**covered["train"], "global_batch": number}} for number in (4096, 128)]
    with store.draft("plans/auto", kind="plan", key="auto", config=covered, inputs={}) as draft:
        draft.write_json("plan.json", store.read_json(f"{artifact.path}/plan.json"))
        draft.commit({})
    tables = schema(a=40, b=50), profile(a=40, b=50), "now"
    plan, why = reused_plan(store, "plans/auto", numbers[0], *tables)
    assert plan is not None, why
    assert reused_plan(store, "plans/auto", numbers[1], *tables) == (
        None,
        "train.global_batch was 4096, is 128",
    )


@pytest.mark.parametrize(
    ("rows", "pooling", "override", "words"),
    [
        ({"a": 41, "b": 50}, 1.0, "seed=3", "table a had 40 rows, has 41"),
        ({"a": 40}, 1.0, "seed=3", "table b is gone"),
        ({"a": 40, "b": 50, "c": 9}, 1.0, "seed=3", "table c is new"),
        ({"a": 40, "b": 50}, 1.2, "seed=3", "table a had 1.00 lookups a sample, has 1.20"),
        ({"a": 40, "b": 50}, 1.0, "train.global_batch=64", "train.global_batch was 4096, is 64"),
        ({"a": 40, "b": 50}, 1.0, "plan.ddr_reserve=0.3", "plan.ddr_reserve was 0.1, is 0.3"),
    ],
)
def test_what_changed_is_said(
    former: tuple[Store, Artifact], rows: dict[str, int], pooling: float, override: str, words: str
) -> None:
    assert carried(former[0], rows, pooling, override) == (None, words)


def test_a_plan_that_is_gone_or_changed_by_hand_is_made_anew(former: tuple[Store, Artifact], tmp_path: Path) -> None:
    path = tmp_path / "plans" / "p" / "plan.json"
    path.write_text(path.read_text().replace('"rows": 40', '"rows": 41'))
    plan, why = carried(former[0], {"a": 40, "b": 50})
    assert plan is None
    assert "plan.json" in why
    assert carried(Store(str(tmp_path / "empty")), {"a": 40, "b": 50}) == (None, "plans/p is gone")
