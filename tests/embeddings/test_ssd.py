"""Tables on SSD train bit for bit like tables in memory, leave nothing behind, and fail with one message."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.embeddings import RowValues, SsdStore, TableSpec, TouchedRows, initial_rows, to_sharding_plan
from pipeline.embeddings.ssd.budget import resident_bytes, trim
from pipeline.embeddings.ssd.buffers import Buffer
from pipeline.embeddings.ssd.figures import resident
from pipeline.embeddings.ssd.files import ScratchFile
from pipeline.embeddings.ssd.lazy import rows_at
from pipeline.embeddings.ssd.prefetch import pages_of, will_need
from pipeline.errors import ConfigError, PlanError
from tests.embeddings.cases import SEED, batch, kjt_of, make, shards_to_tensors, train
from tests.embeddings.ranks import DIM, on_tier, plan_for, spawn

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


def test_pinned_rows_are_memory_and_a_trim_drops_the_coldest_of_the_others(tmp_path):
    size, pinned = 1 << 20, 1 << 16
    buffer = Buffer(ScratchFile(tmp_path, size, "a test", unused=pinned), size // 4, pinned)
    values = torch.arange(size // 4, dtype=torch.float32)
    buffer.values.copy_(values)
    os.fsync(buffer.file.fd)
    assert resident_bytes(buffer, 0, size) == size
    assert trim([buffer], size) == size - pinned
    assert resident_bytes(buffer, 0, size) == resident_bytes(buffer, 0, pinned) == pinned
    on_disk = os.pread(buffer.file.fd, size, 0)
    assert on_disk[:pinned] == bytes(pinned) and on_disk[pinned:] == values.numpy().tobytes()[pinned:]
    assert torch.equal(buffer.values, values)


@pytest.mark.parametrize("width", [4, 20, 256, 4096, 6000])
def test_pages_hold_the_rows_and_are_asked_for_once(tmp_path, width):
    file = ScratchFile(tmp_path, 1 << 20, "a test")
    os.pwrite(file.fd, bytes(1 << 20), 0)
    os.fsync(file.fd)
    buffer = Buffer(file, (1 << 20) // 4)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident_bytes(buffer, 0, 1 << 20) == 0
    places = np.random.default_rng(width).integers(0, (1 << 20) // width, 30)
    pages = pages_of(places, width, pinned=8192)
    expected = {page for place in places for page in range(place * width // 4096, -(-(place + 1) * width // 4096))}
    assert pages.tolist() == sorted(expected - {0, 1})
    will_need(buffer.address, pages)
    while resident(buffer.address, pages) < len(pages):  # the kernel reads behind the call
        pass
    assert resident_bytes(buffer, 0, 1 << 20) == len(pages) * 4096


def on_one_rank(folder):
    ssd = SsdStore(on_tier(plan_for("row_wise", 1), "ssd"), [str(folder)], 0)
    dmp, access = make(on_tier(plan_for("row_wise", 1), "ssd"), ssd=ssd)
    shards = {shard.table: shard for shard in access.local_shards(fill=False)}
    assert not any(shard.weight.any() for shard in shards.values())  # TorchRec fills tables twice; not these
    first = access.read("long", torch.tensor([7, 3]))[0]
    spec = access.tables["long"]
    assert torch.equal(first.weight, initial_rows(SEED, spec, 0, spec.rows)[[7, 3]])
    assert (shards["long"].weight.abs().sum(1) > 0).nonzero().flatten().tolist() == [3, 7]
    access.write("long", torch.tensor([5]), [RowValues(0, DIM, torch.ones(1, DIM), {"adagrad_sum": torch.ones(1)})])
    ids, _ = batch(0)
    dmp(kjt_of(ids))
    expected = initial_rows(SEED, spec, 0, spec.rows)
    expected[5] = 1
    used = sorted({3, 5, 7, *ids[2].flatten().tolist()})
    assert torch.equal(shards["long"].weight[used], expected[used])
    assert (shards["long"].weight.abs().sum(1) > 0).sum() == len(used) < spec.rows
    assert torch.equal({s.table: s for s in access.local_shards()}["long"].weight, expected)
    access.initialise(SEED + 1)
    assert torch.equal(shards["long"].weight, initial_rows(SEED + 1, spec, 0, spec.rows))
    assert (shards["long"].state["adagrad_sum"] == 0).all()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    starts = {int(line.split("-")[0], 16) for line in mapped}
    assert {shard.weight.data_ptr() for shard in shards.values()} <= starts


def test_rows_get_their_values_when_they_are_first_used(tmp_path):
    spawn(on_one_rank, 1, tmp_path)


def test_plans_that_ssd_cannot_hold_and_paths_that_cannot_be_used_are_one_message(tmp_path):
    with pytest.raises(
        PlanError, match="table 'b' on tier ssd is sharded column_wise, expected table_wise or row_wise"
    ):
        to_sharding_plan(on_tier(plan_for("column_wise", 1), "ssd"), "collection")
    plan = on_tier(plan_for("row_wise", 1), "ssd")
    with pytest.raises(ConfigError, match="hardware.ssd_paths names no directory"):
        SsdStore(plan, [], 0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="names .*file', which is not a directory"):
        SsdStore(plan, [str(tmp_path), str(tmp_path / "file")], 0)
