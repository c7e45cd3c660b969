"""Bytes by class of link, against what the sizes of batch, features and embeddings say."""

import json

import pytest
import torch

from pipeline.core.errors import ConfigError
from pipeline.records import TowerModuleSpec
from pipeline.towers.transform import flat_exchange_codecs
from tests.embeddings.ranks import plan_for, spawn
from tests.towers.cases import BATCH, DIM, count_bytes

STEPS, WORLD = 2, 4
B = BATCH // WORLD
# Of each all-to-all of ids: lengths of its two tensors and the batch size as int64 for each rank.
SIZES = 3 * 8
ID = 4 + 4  # an int32 id and its int32 length
ROW = DIM * 4
TOWERS = [("ab", [0]), ("cd", [1])]
COMPRESSED = TowerModuleSpec(name="dlrm", c=0, p=1, dim=DIM)
CASES = {
    "flat": (None, None, "fp32", "table_wise"),
    "flat row-wise": (None, None, "fp32", "row_wise"),
    "flat bf16": (None, None, "bf16", "table_wise"),
    "flat row-wise bf16": (None, None, "bf16", "row_wise"),
    "flat int8": (None, None, "int8", "table_wise"),
    "flat data-parallel": (None, None, "fp32", "data_parallel"),
    "towers": (TOWERS, None, "fp32", None),
    "compressed": (TOWERS, COMPRESSED, "fp32", None),
    "towers fp16": (TOWERS, None, "fp16", None),
    "towers bf16": (TOWERS, None, "bf16", None),
    "towers int8": (TOWERS, None, "int8", None),
}


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    spawn(count_bytes, WORLD, folder, 2, CASES)
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(WORLD)] for name in CASES}


def per_step(sent, name):
    """(within hosts, between hosts) of one rank and step; every rank sends the same."""
    assert len({tuple(record["sent"][:2]) for record in sent[name]}) == 1
    return tuple(value / STEPS for value in sent[name][0]["sent"][:2])


def test_a_flat_model_sends_every_feature_to_every_rank(sent):
    each = SIZES + B * ID + 2 * B * ROW  # one table here: its ids there, its rows and their gradients back
    assert per_step(sent, "flat") == (each, 2 * each)


def test_a_row_wise_table_sends_a_part_of_its_sum_to_every_rank(sent):
    # Sums of all four tables there and gradients back, lengths of all ids; ids go where their rows are.
    fixed = 2 * 4 * B * ROW + SIZES + 4 * B * 4
    ids = 0
    for record in sent["flat row-wise"]:
        within, between = (value / STEPS for value in record["sent"][:2])
        assert fixed <= within <= fixed + 4 * B * 4 and 2 * fixed <= between <= 2 * fixed + 4 * B * 4
        ids += within + between - 3 * fixed
    assert ids == pytest.approx(3 / 4 * WORLD * 4 * B * 4, rel=0.1)


def test_pass_through_towers_move_the_same_embeddings_between_hosts(sent):
    within, between = per_step(sent, "towers")
    assert between == SIZES + 2 * B * ID + 2 * 2 * B * ROW
    assert within == SIZES + 2 * B * ID + 2 * 2 * B * ROW
    assert per_step(sent, "flat")[1] - between == SIZES


def test_a_tower_module_sends_its_outputs_alone(sent):
    within, between = per_step(sent, "compressed")
    assert between == SIZES + 2 * B * ID + 2 * B * ROW
    assert within == per_step(sent, "towers")[0]


def test_dense_gradients_are_a_ring_over_all_ranks(sent):
    for name in ("flat", "towers"):
        for rank, record in enumerate(sent[name]):
            ring = STEPS * 2 * 3 / 4 * record["dense"]
            assert record["sent"][2:] == ([ring, 0] if rank % 2 == 0 else [0, ring])
    own = (2 * DIM * DIM + DIM) * 4  # a tower's weight and bias, reduced inside its host alone
    for rank, record in enumerate(sent["compressed"]):
        ring = 2 * 3 / 4 * record["dense"]
        within = STEPS * (own + (ring if rank % 2 == 0 else 0))
        assert record["sent"][2:] == [within, 0 if rank % 2 == 0 else STEPS * ring]


def test_data_parallel_tables_count_as_embeddings(sent):
    tables = sum(20 + i for i in range(4)) * DIM * 4
    for rank, record in enumerate(sent["flat data-parallel"]):
        ring = STEPS * 2 * 3 / 4 * tables
        assert record["sent"][:2] == ([ring, 0] if rank % 2 == 0 else [0, ring])


@pytest.mark.parametrize(("name", "forward"), [("fp16", 2), ("bf16", 2)])
def test_half_precision_halves_embeddings_and_gradients(sent, name, forward):
    assert per_step(sent, f"towers {name}")[1] == SIZES + 2 * B * ID + 2 * B * DIM * (forward + 2)


@pytest.mark.parametrize("name", ["towers fp16", "towers bf16", "towers int8", "flat bf16", "flat int8"])
def test_a_smaller_exchange_is_smaller_and_close(sent, name):
    full = name.split()[0]
    assert per_step(sent, name)[1] < 0.7 * per_step(sent, full)[1]
    for record, reference in zip(sent[name], sent[full], strict=True):
        found, exact = torch.tensor(record["logits"]), torch.tensor(reference["logits"])
        assert not torch.equal(found, exact)
        torch.testing.assert_close(found, exact, rtol=0, atol=0.03)


def test_int8_is_refused_where_embeddings_are_summed_on_their_way():
    plan = plan_for(["row_wise", "table_wise", "row_wise"], 2)
    with pytest.raises(ConfigError, match="int8, but the row-wise tables b, long need sums on the way") as caught:
        flat_exchange_codecs("int8", plan)
    assert "plan.sharding_types=" in caught.value.hint
    assert flat_exchange_codecs("fp32", plan) is None
