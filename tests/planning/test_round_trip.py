"""plan.json and back to TorchRec's own plan, for every sharding type."""

from __future__ import annotations

import json

import pytest
from plan_cases import configure, cpu, dataset

from pipeline.config import TablePin
from pipeline.core.errors import ArtifactError
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.planning import PlanInputs, make_plan
from pipeline.records import Plan
from pipeline.stages.stage_inputs import read_plan
from pipeline.store import Store

TYPES = ["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise"]


@pytest.mark.parametrize("sharding", TYPES)
def test_the_loader_rebuilds_torchrecs_plan(sharding):
    config = configure(cpu(2, 2), dim=64)
    config.plan.tables = {"big": TablePin(sharding=sharding)}
    plan = make_plan(PlanInputs.of(config, *dataset({"small": 100, "big": 10_007})))
    loaded = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert loaded == plan
    built = to_sharding_plan(loaded, "collection").plan["collection"]
    assert set(built) == {"small", "big"}
    big, table = built["big"], plan.tables["big"]
    assert (big.sharding_type, big.compute_kernel) == (sharding, table.kernel)
    assert big.ranks == [shard.rank for shard in table.shards]
    if sharding == "data_parallel":
        assert big.sharding_spec is None
        return
    placed = [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in big.sharding_spec.shards]
    assert placed == [([s.row, s.column], [s.rows, s.columns], f"rank:{s.rank}/cpu") for s in table.shards]


def test_a_plan_changed_since_it_was_made_is_refused(tmp_path):
    store, plan = Store(str(tmp_path)), make_plan(PlanInputs.of(configure(cpu(1, 1)), *dataset({"small": 100})))
    with store.draft("plans/k", kind="plan", key="k", config={}, inputs={}) as draft:
        draft.write_json("plan.json", plan.to_json())
        artifact = draft.commit({})
    assert read_plan(store, artifact) == plan
    store.write_json("plans/k/plan.json", {**plan.to_json(), "global_batch": 17})
    with pytest.raises(ArtifactError, match=r"plan\.json is corrupt: .* expected") as caught:
        read_plan(store, artifact)
    assert caught.value.hint == "nightjar plan force=true makes it again"
