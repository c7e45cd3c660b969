"""hardware.ddr_gib while training runs: ranks of a host together, a warning in time, then the same end on all."""

import json

import pytest
import torch
import torch.distributed as dist

from pipeline.config import HardwareConfig
from pipeline.core.errors import GuardError
from pipeline.embeddings.ssd import pss_bytes
from pipeline.training.callbacks import IntervalRecord
from pipeline.training.distributed import connect
from pipeline.training.memory import MemoryBudget
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.logged import listen

GIB = 2**30


def hardware(hosts, ranks):
    return HardwareConfig(name="t", hosts=hosts, ranks_per_host=ranks, ddr_gib=2.0)


def figures_of(budget, step):
    """What the budget adds to the record of the interval that ends with ``step``."""
    interval = IntervalRecord(step=step, steps=1, seconds=1.0)
    budget.on_interval(interval)
    return interval.figures


def summary_of(budget):
    figures = {}
    budget.on_end(figures)
    return figures


def watch(folder, hosts, ranks, taken):
    """What a rank is told while it takes ``taken`` [intervals][rank] GiB."""
    said, own = listen(), [row[dist.get_rank()] for row in taken]
    plan = on_tier(plan_for("row_wise", hosts * ranks), "ssd")
    budget = MemoryBudget(hardware(hosts, ranks), "auto", plan, lambda: int(own[len(records)] * GIB))
    records, error = [], None
    try:
        for step in range(len(taken)):
            records.append(figures_of(budget, step))
    except GuardError as caught:
        error = str(caught)
    found = {"said": said, "records": records, "error": error, "summary": summary_of(budget)}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def told(tmp_path, hosts, ranks, taken):
    spawn(watch, hosts * ranks, tmp_path, hosts, ranks, taken)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(hosts * ranks)]


def test_ranks_of_a_host_share_its_memory(tmp_path):
    first, second = told(tmp_path, 1, 2, [[1.0, 2.5], [1.5, 2.25], [3.0, 0.75], [1.5, 2.625]])
    assert first["records"] == second["records"] == [{"host_memory_bytes": int(x * GIB)} for x in (3.5, 3.75, 3.75)]
    line = "memory: training takes 3.75 of 4 GiB of memory (2 GiB for each of 2 ranks) after step 1, and stops where"
    assert len(first["said"]) == 1 and first["said"][0].startswith(line) and second["said"] == []
    assert first["error"] == second["error"]
    assert "training takes 4.12 of 4 GiB of memory (2 GiB for each of 2 ranks) on a host after step 3" in first["error"]
    assert "hint: train.prefetch_batches=1" in first["error"] and "hardware.ddr_gib=2.3 where" in first["error"]
    assert first["summary"] == {"budget": {"limit_bytes": 4 * GIB, "peak_bytes": int(4.125 * GIB)}}


def free_and_watch(folder):
    """Take 400 MiB in pieces, free them, and have the budget look: they are kept for later, and then given back."""
    current = hardware(1, 1)
    connect(current)
    before = pss_bytes()
    kept = [torch.ones(1 << 18) for _ in range(400)]
    del kept
    idle = pss_bytes() - before
    current.ddr_gib = (before + (200 << 20)) / GIB
    budget = MemoryBudget(current, "auto", on_tier(plan_for("row_wise", 1), "ssd"))
    (folder / "found.json").write_text(json.dumps([idle, figures_of(budget, 1)["host_memory_bytes"], budget.limit]))


def test_memory_that_was_freed_ends_no_run(tmp_path):
    spawn(free_and_watch, 1, tmp_path)
    idle, taken, limit = json.loads((tmp_path / "found.json").read_text())
    assert idle > 300 << 20 and taken < limit


def test_hosts_do_not(tmp_path):
    first, second = told(tmp_path, 2, 1, [[1.0, 1.75], [1.25, 1.0]])
    assert first["records"] == second["records"] == [{"host_memory_bytes": int(x * GIB)} for x in (1.75, 1.25)]
    assert first["error"] is None and first["said"] == second["said"] == []


@pytest.mark.parametrize(
    ("held", "tier", "active"),
    [("auto", "ssd", True), ("auto", "ddr", False), ("never", "ssd", False), ("always", "ddr", True)],
)
def test_it_is_watched_where_it_is_asked_for(held, tier, active):
    budget = MemoryBudget(hardware(1, 1), held, on_tier(plan_for("row_wise", 1), tier))
    assert budget.active == active
    assert active or (figures_of(budget, 3), summary_of(budget)) == ({}, {})
