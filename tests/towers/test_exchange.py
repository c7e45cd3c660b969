"""Ranks of a tower's host that exchange through shared memory train the same bits as ranks that use the network."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.records import TowerModuleSpec
from pipeline.training import step
from tests.embeddings.ranks import spawn
from tests.tiers import Together, with_slow
from tests.towers.cases import with_towers

ASSIGNED = [("cab", [0]), ("ed", [1])]
LOW_RANK = TowerModuleSpec(name="low_rank", dim=4, rank=6)
FP32, BF16 = {"precision": "fp32"}, {"precision": "bf16"}
CASES = {
    "pass-through": (2, ASSIGNED, None, {}, FP32),
    "pass-through, bf16": (2, ASSIGNED, None, {}, BF16),
    "low rank, bf16": (2, ASSIGNED, LOW_RANK, {}, BF16),
    "low rank, bf16, tables by rows and columns": (
        2,
        ASSIGNED,
        LOW_RANK,
        {"a": "row_wise", "b": "column_wise", "c": "data_parallel"},
        BF16,
    ),
    "projection, bf16": (2, ASSIGNED, TowerModuleSpec(name="dlrm", dim=4), {}, BF16),
    "whole matrices, bf16": (2, ASSIGNED, TowerModuleSpec(name="dcn", dim=4), {}, BF16),
    "low rank, bf16, l2": (2, ASSIGNED, LOW_RANK, {}, {**BF16, "embedding_l2": 0.5}),
}
DEFAULT = ("pass-through, bf16", "low rank, bf16, tables by rows and columns")  # the other cases are slow
NARROW = {name for name, case in CASES.items() if name.startswith(("low", "projection")) and "l2" not in name}


def both_ways(folder, names):
    """Every case through memory, then through the network; rank 0 leaves the types of what the modules read."""
    made, between = [], step.memory_between

    def kept(*arguments, **keywords):
        made.append(between(*arguments, **keywords))
        return made[-1]

    step.memory_between = kept
    with_towers(folder, {f"memory: {name}": CASES[name] for name in names})
    assert [memory.dtype for memory in made] == [torch.bfloat16 if name in NARROW else None for name in names]
    step.memory_between = lambda *_, **__: None
    with_towers(folder, {f"network: {name}": CASES[name] for name in names})
    (folder / f"done-{dist.get_rank()}").touch()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By case the folder with what its ranks left."""

    def train_together(names):
        folder = tmp_path_factory.mktemp("exchange")
        spawn(both_ways, 4, folder, names, local=2)
        assert len(list(folder.glob("done-*"))) == 4
        return dict.fromkeys(names, folder)

    return Together(train_together, DEFAULT, [name for name in CASES if name not in DEFAULT])


@pytest.mark.parametrize("name", with_slow(CASES, DEFAULT))
def test_memory_and_network_end_in_the_same_bits(trained, name):
    for rank in range(4):
        one, two = (load_file(trained[name] / f"{way}: {name}-{rank}.safetensors") for way in ("memory", "network"))
        assert one.keys() == two.keys()
        assert [key for key in one if not torch.equal(one[key], two[key])] == []
