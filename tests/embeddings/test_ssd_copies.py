"""A checkpoint's copies of tables on SSD: spread over the disks, their space taken before training begins."""

import dataclasses
import resource
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.row_copies import CopyBuffers, copy_rows, full_values
from pipeline.core.errors import GuardError
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.scratch_files import pieces, spread
from tests.embeddings.cases import make
from tests.embeddings.ranks import on_tier, plan_for, spawn

SIZES = {"huge": 900_000, "large": 500_000, "middle": 450_000, "small": 9_000, "tiny": 40}


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
@pytest.mark.parametrize("disks", [1, 2, 3])
def test_disks_get_alike_and_every_rank_finds_the_same(kind, disks):
    plan = on_tier(plan_for(kind, 4, local=2, rows=SIZES), "ssd")
    for host in (0, 2):
        placed = spread(pieces(plan, SIZES, host), disks)
        assert placed == spread(pieces(plan, list(SIZES)[::-1], host + 1), disks)
        assert {piece.rank for piece in placed} <= {host, host + 1} and {piece.copy for piece in placed} == {
            True,
            False,
        }
        filled = [sum(piece.size for piece, at in placed.items() if at == disk) for disk in range(disks)]
        largest = max(piece.size for piece in placed)
        assert max(filled) - min(filled) <= largest
    assert len(spread(pieces(plan, SIZES, 0), disks)) + len(spread(pieces(plan, SIZES, 2), disks)) == 2 * sum(
        len([shard for shard in plan.tables[name].shards if shard.rows]) for name in SIZES
    )


def taken(root):
    """Bytes of this process's nameless files by directory."""
    found = defaultdict(int)
    for link in Path("/proc/self/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        if target.startswith(str(root)) and target.endswith("(deleted)"):
            found[Path(target).parent.name] += link.stat().st_size
    return found


def reserve(root):
    plan = on_tier(plan_for("row_wise", 1), "ssd")
    plan = dataclasses.replace(plan, tables={**plan.tables, "a": dataclasses.replace(plan.tables["a"], tier="ddr")})
    disks = [root / "disk0", root / "disk1"]
    for disk in disks:
        disk.mkdir()
    ssd = SsdStore(plan, [str(disk) for disk in disks], 0)
    _, access = make(plan, ssd=ssd)
    before = taken(root)
    small = plan.tables["a"]
    assert full_values(access) == small.rows * (small.dim + 1)  # what lies in memory is copied in memory
    after = taken(root)
    copies = {name: after[name] - before[name] for name in ("disk0", "disk1")}
    assert sum(copies.values()) == 2 * 4096 and min(copies.values()) == 4096  # a page each: two small tables
    buffers = CopyBuffers()
    blocks = {block.table: block for block in copy_rows(access, None, buffers)}
    assert taken(root) == after and buffers.memory.numel() == small.rows * (small.dim + 1)
    for shard in access.local_shards():
        assert torch.equal(blocks[shard.table].weight, shard.weight)
        assert torch.equal(blocks[shard.table].state["adagrad_sum"], shard.state["adagrad_sum"])
    ssd.close()


def test_copies_lie_on_all_disks_and_take_their_space_at_once(tmp_path):
    spawn(reserve, 1, tmp_path)


def test_a_disk_without_room_for_the_copy_is_one_message(tmp_path):
    rows = {"t": 60_000}
    store = SsdStore(on_tier(plan_for("row_wise", 1, rows=rows, dim=64), "ssd"), [str(tmp_path)], 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            GuardError, match=f"disk of {tmp_path} is full: a checkpoint's copy of the rows .* 0.0145 GiB"
        ):
            store.scratch("t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        store.close()
