"""Tables that learn by rules of their own, on every sharding and tier: frozen, limited, another optimizer or rate."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.core.errors import ConfigError
from pipeline.embeddings.initial import initial_rows, rows_at
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.table_optimizers import Frozen, MaxNormOptimizer, TableRules, table_rules
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.touched import TouchedRows
from pipeline.specs import TABLE_OPTIMIZERS
from tests.embeddings.cases import ROWS, SEED, make, shards_to_tensors, train
from tests.embeddings.ranks import DIM, on_tier, plan_for, spawn

ADAGRAD = TABLE_OPTIMIZERS.get("rowwise_adagrad")
NORM = 0.45
RULES = TableRules(
    ADAGRAD,
    {"b": Frozen(), "a": MaxNormOptimizer.of(ADAGRAD, NORM), "long": TABLE_OPTIMIZERS.get("adagrad")},
    {"long": 0.02},
)
KINDS = ["table_wise", "row_wise", "data_parallel"]


def with_states(plan):
    """``plan`` with room for the state of every table's optimizer."""
    room = {name: RULES.of(name) for name in plan.tables}
    tables = {
        name: dataclasses.replace(table, state_bytes=room[name].row_bytes, value_state_bytes=room[name].value_bytes)
        for name, table in plan.tables.items()
    }
    return dataclasses.replace(plan, tables=tables)


def learn(folder, kinds, tier="ddr"):
    """Train by the rules under each sharding; leave the tables, and which rows were marked, in ``folder``."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for kind in kinds:
        plan, ssd = plan_for(kind, world), None
        if tier == "ssd":
            plan = with_states(on_tier(plan, "ssd", 8))
            ssd = SsdStore(plan, [str(folder)], rank)
        dmp, access = make(plan, ssd=ssd, optimizer=RULES)
        touched = TouchedRows(dmp)
        start = shards_to_tensors(access)
        train(dmp)
        touched.unite()
        marks = {
            f"{t}|{row}|{column}|marks": touched.mask((t, row, column)).clone() for t, row, column in touched.shards()
        }
        save_file({**start}, folder / f"{kind}-start-{rank}.safetensors")
        save_file({**shards_to_tensors(access), **marks}, folder / f"{kind}-end-{rank}.safetensors")
        if ssd is not None:
            ssd.close()


def whole(folder, stem, world, what):
    """{table: its rows} of ``what`` from the shards of all ranks."""
    found = {}
    for rank in range(world):
        for key, tensor in load_file(folder / f"{stem}-{rank}.safetensors").items():
            table, row, _, part = key.split("|")
            if part == what and tensor.numel():
                found.setdefault(table, {})[int(row)] = tensor
    return {table: torch.cat([parts[row] for row in sorted(parts)]) for table, parts in found.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("rules")
    for world in (1, 2):
        spawn(learn, world, root / f"{world}", KINDS)
    spawn(learn, 1, root / "ssd", ["table_wise"], "ssd")
    return root


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_table_learns_by_its_own_rule(runs, world, kind):
    start, end = (whole(runs / f"{world}", f"{kind}-{when}", world, "weight") for when in ("start", "end"))
    marks, state = (whole(runs / f"{world}", f"{kind}-end", world, what) for what in ("marks", "sum"))
    assert torch.equal(start["b"], end["b"]) and not marks["b"].any() and "b" not in state, "frozen"
    lengths = end["a"].norm(dim=1)
    assert start["a"].norm(dim=1).max() > 1.1 * NORM >= lengths.max() * 1.0999, "rows that began longer met the limit"
    assert state["a"].shape == (ROWS["a"],) and marks["a"].any()
    assert state["long"].shape == (ROWS["long"], DIM) and not torch.equal(start["long"], end["long"])
    assert (end["long"] - start["long"]).abs().max() <= 0.02 * 5 + 1e-6, "five steps of at most its rate"


@pytest.mark.parametrize("other", [("1", "row_wise"), ("1", "data_parallel"), *(("2", kind) for kind in KINDS)])
def test_shardings_and_ranks_agree(runs, other):
    expected = whole(runs / "1", "table_wise-end", 1, "weight")
    found = whole(runs / other[0], f"{other[1]}-end", int(other[0]), "weight")
    for name in ROWS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_tables_on_disk_learn_the_same_to_the_bit(runs):
    for what in ("weight", "sum", "marks"):
        expected, found = (whole(runs / place, "table_wise-end", 1, what) for place in ("1", "ssd"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_limit_scales_long_rows_only():
    weights = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    MaxNormOptimizer.of(TABLE_OPTIMIZERS.get("sgd"), 1.0).update(weights, torch.zeros(2, 2), {}, 0.1, 1)
    torch.testing.assert_close(weights, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=0, atol=1e-7)
    assert torch.equal(weights[1], torch.tensor([0.3, 0.4])), "a short row keeps its bits"


def test_initial_values_are_within_the_bound_of_the_table():
    table = TableSpec("t", 1000, 4, bound=0.01)
    rows = initial_rows(SEED, table, 0, 1000)
    assert rows.abs().max() <= 0.01 < rows.abs().max() * 1.01
    assert torch.equal(torch.from_numpy(rows_at(SEED, table, torch.arange(7).numpy())), rows[:7])
    assert not initial_rows(SEED, TableSpec("t", 9, 4, bound=0.0), 0, 9).any()


def test_rules_come_from_the_settings():
    from pipeline.config.compose import compose

    features = [f"+data.sparse.{name}={{}}" for name in ("a", "b", "c", "d")]
    own = ["+model.tables={a: {frozen: true}, b: {max_norm: 1, lr: 0.5}, c: {optimizer: ftrl}, d: {dim: 8}}"]
    config = compose(["data=parquet", "data.path=/logs", *features, *own])
    rules = table_rules(config.model, config.train)
    assert rules.of("a").frozen and rules.of("c").name == "ftrl" and rules.of("d") is rules.common
    assert rules.of("b").name == "rowwise_adagrad with max_norm" and rules.lr("b", 0.1, 0.5) == 0.25
    assert rules.lr("c", 0.1, 0.5) == 0.05 and rules.kind("d") == "" and len({rules.kind(t) for t in "abcd"}) == 4
    with pytest.raises(ConfigError, match="model.tables.a is frozen and sets lr"):
        compose(["data=parquet", "data.path=/logs", *features, "+model.tables.a={frozen: true, lr: 1}"])
