"""Tables on SSD train bit for bit like tables in memory, leave nothing behind, and fail with one message."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.embeddings import SsdStore, TableSpec, TouchedRows, initial_rows
from pipeline.embeddings.ssd.lazy import rows_at
from tests.embeddings.cases import make, shards_to_tensors, train
from tests.embeddings.ranks import on_tier, plan_for, spawn

STEPS = 24
KINDS = {"rw": "row_wise", "tw": "table_wise", "mixed": ["row_wise", "table_wise", "data_parallel"]}


def outcome(dmp, access):
    """Train, and everything that came of it."""
    touched = TouchedRows(dmp)
    outputs = train(dmp, 0, STEPS)
    marks = {"|".join(map(str, key)) + "|touched": touched.mask(key).clone() for key in touched.shards()}
    return {**outputs, **marks, **shards_to_tensors(access)}


def compare_tiers(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    paths = [folder / "disk0", folder / "disk1"]
    for path in paths:
        path.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        plan = plan_for(kind, world)
        ssd = SsdStore(on_tier(plan, "ssd"), [str(path) for path in paths], rank)
        save_file(outcome(*make(plan)), folder / f"{name}-ddr-{rank}.safetensors")
        save_file(outcome(*make(on_tier(plan, "ssd"), ssd=ssd)), folder / f"{name}-ssd-{rank}.safetensors")
        assert [list(path.iterdir()) for path in paths] == [[], []]
        ssd.close()


@pytest.mark.parametrize("world", [1, 2])
def test_tables_on_ssd_end_like_tables_in_memory(tmp_path, world):
    spawn(compare_tiers, world, tmp_path)
    for name in KINDS:
        for rank in range(world):
            ddr, ssd = (load_file(tmp_path / f"{name}-{tier}-{rank}.safetensors") for tier in ("ddr", "ssd"))
            assert sorted(ddr) == sorted(ssd) and any("sum" in key for key in ddr)
            assert [key for key in ddr if not torch.equal(ddr[key], ssd[key])] == []


@pytest.mark.parametrize("dim", [1, 4, 5, 12, 64])
def test_scattered_initial_rows_equal_the_sequential_ones(dim):
    table = TableSpec("t", 20_000, dim)
    rows = np.random.default_rng(dim).integers(0, table.rows, 300)
    rows[:4] = 0, 8191, 8192, 19_999
    assert np.array_equal(rows_at(3, table, rows), initial_rows(3, table, 0, table.rows).numpy()[rows])
