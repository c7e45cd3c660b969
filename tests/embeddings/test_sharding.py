"""All shardings on real ranks give what one process gives; bad plans give one message."""

import dataclasses

import pytest
import torch

from pipeline.config.features import TAKEN_NAMES
from pipeline.core.errors import PlanError
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.embeddings.tables import TableSpec
from tests.embeddings.cases import DIM, ROWS, SEED, STEPS, assemble, reference, run_shardings
from tests.embeddings.ranks import plan_for, spawn

TYPES = ["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"]
KINDS = {kind: kind for kind in TYPES} | {"mixed": ["row_wise", "data_parallel", "column_wise"]}
# Ranks and ranks per host. With one rank per host only the types that know hosts differ.
WORLDS = {"1x1": (1, 1), "1x2": (2, 2), "2x1": (2, 1)}
CASES = [(w, kind) for w in WORLDS for kind in KINDS if w != "2x1" or kind in ("grid_shard", "table_row_wise")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("shardings")
    for name, (world, local) in WORLDS.items():
        kinds = {kind: KINDS[kind] for w, kind in CASES if w == name}
        spawn(run_shardings, world, root / name, kinds, local, local=local)
    return root


@pytest.mark.parametrize(("world", "kind"), CASES)
def test_outputs_tables_and_sums_equal_one_process(runs, world, kind):
    size = WORLDS[world][0]
    start, zero, _ = assemble(runs / world, f"{kind}-start", size)
    for name, rows in ROWS.items():
        assert torch.equal(start[name], initial_rows(SEED, TableSpec(name, rows, DIM), 0, rows))
        assert all((part == 0).all() for part in zero[name].values())
    end, sums, outputs = assemble(runs / world, f"{kind}-end", size)
    cuts = {name: [*sorted(parts), DIM] for name, parts in sums.items()}
    expected_outputs, expected, expected_sums = reference(start, cuts)
    for name in ROWS:
        torch.testing.assert_close(end[name], expected[name], rtol=0, atol=1e-6)
        for k, column in enumerate(cuts[name][:-1]):
            torch.testing.assert_close(sums[name][column], expected_sums[name][k], rtol=1e-5, atol=1e-8)
    for step in range(STEPS):
        torch.testing.assert_close(outputs[step], expected_outputs[step], rtol=0, atol=1e-6)


CLIP = 0.004  # between the gradients of the toy model's lookups


@pytest.mark.parametrize("world", [1, 2])
def test_clipped_gradients_are_those_of_one_process_on_every_sharding(tmp_path, world):
    spawn(run_shardings, world, tmp_path, KINDS, world, CLIP)
    for kind in KINDS:
        start, _, _ = assemble(tmp_path, f"{kind}-start", world)
        end, sums, _ = assemble(tmp_path, f"{kind}-end", world)
        cuts = {name: [*sorted(parts), DIM] for name, parts in sums.items()}
        _, expected, expected_sums = reference(start, cuts, CLIP)
        _, _, free_sums = reference(start, cuts)
        for name in ROWS:
            torch.testing.assert_close(end[name], expected[name], rtol=0, atol=1e-6, msg=f"{kind} {name}")
            for k, column in enumerate(cuts[name][:-1]):
                torch.testing.assert_close(sums[name][column], expected_sums[name][k], rtol=1e-5, atol=1e-8)
                assert (expected_sums[name][k].sum() / free_sums[name][k].sum()) < 0.9, "the limit does nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharding": "diagonal"}, "table 'b' has sharding 'diagonal', which TorchRec does not know"),
        ({"kernel": "key_value"}, "table 'b' is planned with kernel 'key_value', expected fused or dense on CPU"),
        ({"shards": ()}, "the shards of table 'b' hold 0 values, expected all 23 x 8"),
    ],
)
def test_bad_plan_is_one_message(change, message):
    plan = plan_for("table_wise", 1)
    tables = plan.tables | {"b": dataclasses.replace(plan.tables["b"], **change)}
    with pytest.raises(PlanError, match=message):
        to_sharding_plan(dataclasses.replace(plan, tables=tables), "collection")


def test_placements_name_rank_and_device():
    plan = dataclasses.replace(plan_for("row_wise", 4, 2), device="cuda")
    sharding = to_sharding_plan(plan, "collection").plan["collection"]["long"]
    assert [str(s.placement) for s in sharding.sharding_spec.shards] == [
        "rank:0/cuda:0",
        "rank:1/cuda:1",
        "rank:2/cuda:0",
        "rank:3/cuda:1",
    ]
    assert sharding.ranks == [0, 1, 2, 3] and sharding.compute_kernel == "fused"


def test_every_name_that_modules_have_is_known_to_the_check():
    names = {name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_")}
    assert names - TAKEN_NAMES == set()
