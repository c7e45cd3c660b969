"""Dry runs: every rank of a world in one process; what does not fit together is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from pipeline.config import Config
from pipeline.planning import PlanInputs, make_plan
from pipeline.plugins.capacity import dryrun
from pipeline.plugins.capacity.dryrun import dry_run, fake_rank, uncovered
from pipeline.plugins.capacity.scale_page import dry_run_text
from pipeline.records import Extent, Plan
from tests.planning.plan_cases import configure, cpu, dataset

ROWS = {"user": 300_000, "item": 20_000, "shop/x": 5_000, "device": 160}


@pytest.fixture(autouse=True)
def _no_group() -> None:
    """A training in this process left its group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def small(**plan: object) -> tuple[Config, PlanInputs]:
    config = configure(cpu(2, 2), dim=16, batch=512)
    config = replace(config, checkpoint=replace(config.checkpoint, chunk_mib=0.25), plan=replace(config.plan, **plan))
    schema, profile = dataset(ROWS)
    return config, PlanInputs.of(config, replace(schema, rows={"train": 1_000}), profile)


@pytest.mark.parametrize("types", [["row_wise"], ["table_wise", "data_parallel"], ["table_row_wise"]], ids="-".join)
def test_every_row_is_sharded_named_and_dealt_once(types: list[str]) -> None:
    found = dry_run(*small(sharding_types=types), 16)
    assert found.problems == () and (found.ranks, found.hosts, found.tables) == (16, 8, 4)
    assert found.files >= 4 and found.plan_bytes > 0 and found.first.rank == 0
    assert found.largest.metadata >= found.first.metadata > 0
    assert "every row is planned, sharded, named and dealt exactly once" in dry_run_text(found)
    assert not dist.is_initialized()


def test_ranks_that_name_files_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    named = dryrun.extent_of
    monkeypatch.setattr(dryrun, "extent_of", lambda rank, number, *rest: named(rank % 8, number, *rest))
    problems = dry_run(*small(sharding_types=["row_wise"]), 16).problems
    assert len(problems) == 1 and problems[0].endswith("files of a checkpoint have the name of another one")


def test_shards_that_are_missing_or_differ_from_the_plan_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = dryrun._kernel_shards
    monkeypatch.setattr(
        dryrun, "_kernel_shards", lambda kernel: [s for s in sharded(kernel) if dist.get_rank() != 3 or s[0] != "item"]
    )
    problems = dry_run(*small(sharding_types=["row_wise"]), 4).problems
    assert (
        problems[0].startswith("rank 3 has shards") and "table 'item': rows 15000 to 19999 are in no file" in problems
    )


def test_rows_that_two_ranks_take_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "rank_rows", lambda deal, batch, rank, world: [(0, 128)])
    problems = dry_run(*small(), 4).problems
    assert "batch 0: 512 rows are taken, expected 512, once each" in problems


def test_extents_that_do_not_tile_a_table_are_named() -> None:
    def extent(first: int, last: int, column: int = 0, columns: int = 8) -> Extent:
        return Extent(
            file="f",
            table="t",
            first=first,
            last=last,
            rows=last - first + 1,
            column=column,
            columns=columns,
            coding="",
        )

    assert uncovered([extent(5, 9), extent(0, 4)], 10, 8) == ""
    assert uncovered([extent(0, 9, 8), extent(0, 4), extent(5, 9)], 10, 16) == ""
    assert uncovered([extent(0, 4)], 10, 8) == "rows 5 to 9 are in no file"
    assert uncovered([extent(0, 4), extent(4, 9)], 10, 8) == "rows 4 to 4 are in no file or in two"
    assert uncovered([extent(0, 9)], 10, 16) == "columns 8 to 15 are in no file"
    assert uncovered([], 10, 16) == "columns 0 to 15 are in no file"


@pytest.mark.measures
def test_what_a_rank_hears_of_a_checkpoint_is_the_manifest_alone() -> None:
    """Rank 0 hears every rank's report; the others hear of the files once, however many ranks there are."""
    few, many = (dry_run(*small(sharding_types=["row_wise"]), ranks) for ranks in (4, 16))
    for found in (few, many):
        assert found.first.exchanged > 0 and found.first.files > 0
    assert many.mean_metadata < 2 * few.mean_metadata


def test_a_fake_rank_ends_with_its_block() -> None:
    with pytest.raises(ZeroDivisionError), fake_rank(5, 512, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 512)
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_predicted_memory_of_all_ranks_is_summed_in_one_pass() -> None:
    _, inputs = small(sharding_types=["row_wise"])
    plan: Plan = make_plan(inputs)
    sizes = plan.resident_bytes()
    assert sizes is not None and len(sizes) == 4 and min(sizes) > 0
    rows = sum(t.rows * t.row_bytes(t.dim) for t in plan.tables.values())
    reserved = sum(size for kept in plan.reserved for name, size in kept.items() if name not in ("margin", "process"))
    assert sum(sizes) == rows + reserved
    assert replace(plan, reserved=[]).resident_bytes() is None
