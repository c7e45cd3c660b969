"""Disks and kernels that refuse what tier ssd asks of them: errors name path, bytes and override, refusals are said."""

import os
import subprocess
import sys

import numpy as np
import pytest

from pipeline.embeddings.ssd.log import MOST_ROWS, RowLog, place_type
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.embeddings.ssd.support import examine
from pipeline.errors import GuardError, PlanError
from pipeline.records import ShardPlan
from tests.embeddings.ranks import DIM, ROWS

DIMENSION = 62  # 256 bytes a record, 1,024 of them a segment


def log_of(folder, rows=5_000):
    return RowLog(folder, rows, DIMENSION + 1, "the rows of table 't'")


def fill(log, count, first=0):
    rows = np.arange(first, first + count)
    return log.add(rows, np.ones((count, DIMENSION + 1), np.float32))


def stand_in(log, path):
    """From now on the log's file is ``path``."""
    other = os.open(path, os.O_RDWR)
    os.dup2(other, log.file.fd)
    os.close(other)


@pytest.mark.parametrize(
    ("device", "said", "hint"),
    [
        ("/dev/full", r"No space left on device, .* GiB are free", "free space there, or hardware.ssd_paths="),
        ("/proc/self/mem", "Input/output error", "hardware.ssd_paths=[/another/disk]; the same command continues"),
    ],
)
def test_a_log_that_cannot_be_written_says_path_bytes_and_override(tmp_path, device, said, hint):
    log = log_of(tmp_path)
    stand_in(log, device)
    with pytest.raises(
        GuardError, match=rf"rows of table 't' in {tmp_path} cannot be written: 262,144 bytes at"
    ) as met:
        fill(log, 1_024)
    met.match(said)
    assert met.value.hint.startswith(hint) and met.value.exit_code == 5


def test_a_log_that_cannot_be_read_says_so_too(tmp_path):
    log = log_of(tmp_path)
    fill(log, 1_024)
    stand_in(log, "/proc/self/mem")
    with pytest.raises(GuardError, match=r"cannot be read: 262,144 bytes at byte 0 \(Input/output error\)"):
        log.empty()
    log = log_of(tmp_path)
    fill(log, 1_024)
    os.ftruncate(log.file.fd, 4096)
    with pytest.raises(GuardError, match="was cut from .* to 4096 bytes"):
        log.empty()


@pytest.mark.parametrize("first", [2**31 - 512, MOST_ROWS - 1_024])
def test_row_numbers_survive_up_to_the_largest_that_a_shard_may_have(tmp_path, first):
    log = log_of(tmp_path)
    fill(log, 1_024, first)
    assert np.array_equal(log.empty()[0], np.arange(first, first + 1_024))


def test_more_rows_than_a_record_can_number_are_refused_before_a_file_is_made(tmp_path):
    plan = ShardPlan(rank=0, row=0, rows=MOST_ROWS + 1, column=0, columns=1)
    with pytest.raises(PlanError, match="'t' has 4,294,967,297 rows on one rank, .* at most 4,294,967,296") as caught:
        SsdShard(tmp_path, "t", plan, 0, 2)
    assert "+plan.tables.t.sharding=row_wise" in caught.value.hint


def test_places_are_as_wide_as_the_longest_log_needs():
    """Every record has a place below rows * 1.1 and four segments; 21,845 rows is the longest segment there is."""
    narrow = max(rows for rows in range(1_780_000_000, 1_800_000_000, 1_000) if place_type(rows) is np.int32)
    assert narrow * 1.1 + 4 * 21_845 < np.iinfo(np.int32).max
    assert place_type(narrow + 1_000) is np.int64 and place_type(2**31) is np.int64


REFUSED = f"""
import sys
import numpy as np, torch
from tests.embeddings.refusing import refuse
from tests.embeddings.ranks import on_tier, plan_for
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.tables import TableSpec
refuse("io_setup", "setpriority", "direct")
store = SsdStore(on_tier(plan_for("row_wise", 1), "ssd"), [sys.argv[1]], 0)
kernel, table = torch.zeros({ROWS["long"]}, {DIM}), TableSpec("long", {ROWS["long"]}, {DIM})
store.shard("long").live_in([kernel])
store.begin(table, 1)
store.prefetch({{"long": np.arange(9)}})
part, places = store.hold("long", np.arange(9), 9)
assert torch.equal(kernel[part.slots[places]], initial_rows(1, table, 0, 9))
print(*(what for what, advice in store.shortcomings()), sep="\\n")
store.close()
from pipeline.commands.doctor import lookup
print(*(finding.line() for finding in lookup(sys.argv[1]) if finding.name == "ssd"), sep="\\n")
"""


def test_rows_arrive_where_the_kernel_refuses_everything_and_each_refusal_is_one_line_of_doctor_too(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" refuse")[0] for line in lines[:3]] == ["io_setup is", "setpriority is", str(tmp_path)]
    assert "Operation not permitted" in lines[0] and "many times slower" in lines[0] and "O_DIRECT" in lines[2]
    assert len(lines) == 6
    for line, told in zip(lines[:3], lines[3:], strict=True):
        assert told.startswith(f"warn  {'ssd':<15} {line} -> ")


def test_where_nothing_is_refused_nothing_is_said(tmp_path):
    assert examine(tmp_path) == []
