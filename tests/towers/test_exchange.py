"""Ranks of a tower's host that exchange through shared memory train the same bits as ranks that use the network."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.config import ClipConfig
from pipeline.core.kernels import load_kernels
from pipeline.embeddings.tables import kernels
from pipeline.records import TowerModuleSpec
from pipeline.training import step
from tests.embeddings.ranks import spawn
from tests.tiers import Together, with_slow
from tests.towers.cases import COLUMNS, UNWEIGHTED, with_towers

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
    "low-rank cross, bf16": (2, ASSIGNED, TowerModuleSpec(name="dcn_low_rank", dim=4, rank=6), {}, BF16),
    "low rank, bf16, ids with weights": (2, ASSIGNED, LOW_RANK, {}, BF16),
    "low rank, bf16, clipped": (2, ASSIGNED, LOW_RANK, {}, {**BF16, "clip": ClipConfig(table_value=0.0005)}),
    "low rank, bf16, l2": (2, ASSIGNED, LOW_RANK, {}, {**BF16, "embedding_l2": 0.5}),
}
DEFAULT = ("pass-through, bf16", "low rank, bf16, tables by rows and columns")  # the other cases are slow
NARROW = {name for name, case in CASES.items() if name.startswith(("low", "projection")) and "l2" not in name}


def both_ways(folder, names):
    """Every case through memory, then through the network; they leave the dtypes of their lookups."""
    made, narrowed, between, narrow = [], [], step.memory_between, step.narrow_exchanged

    def kept(*arguments, **keywords):
        made.append(between(*arguments, **keywords))
        return made[-1]

    def kept_narrow(model, dtype):
        narrow(model, dtype)
        forward = [kernel.module.forward for kernel in kernels(model)]
        narrowed.append(str({getattr(each, "trained_dtype", None) for each in forward}))

    step.memory_between, step.narrow_exchanged = kept, kept_narrow
    columns = {name: COLUMNS if "ids with weights" in name else UNWEIGHTED for name in names}
    for name in names:
        with_towers(folder, {f"memory: {name}": CASES[name]}, columns[name])
    assert [memory.dtype for memory in made] == [torch.bfloat16 if name in NARROW else None for name in names]
    assert len(narrowed) == sum(name in NARROW and "clipped" not in name for name in names)
    step.memory_between = lambda *_, **__: None
    for name in names:
        with_towers(folder, {f"network: {name}": CASES[name]}, columns[name])
    (folder / f"done-{dist.get_rank()}").write_text("\n".join(narrowed))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By case the folder with what its ranks left."""

    def train_together(names):
        folder = tmp_path_factory.mktemp("exchange")
        spawn(both_ways, 4, folder, names, local=2)
        narrowed = [path.read_text() for path in folder.glob("done-*")]
        assert len(narrowed) == 4
        if load_kernels("steps") is not None:  # a rank without whole tables of its own narrows none
            assert any("bfloat16" in dtypes for dtypes in narrowed), narrowed
        return dict.fromkeys(names, folder)

    return Together(train_together, DEFAULT, [name for name in CASES if name not in DEFAULT])


@pytest.mark.parametrize("name", with_slow(CASES, DEFAULT))
def test_memory_and_network_end_in_the_same_bits(trained, name):
    for rank in range(4):
        one, two = (load_file(trained[name] / f"{way}: {name}-{rank}.safetensors") for way in ("memory", "network"))
        assert one.keys() == two.keys()
        assert [key for key in one if not torch.equal(one[key], two[key])] == []
