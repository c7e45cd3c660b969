"""Disks and kernels that refuse what tier ssd asks of them: errors name path, bytes and override, refusals are said."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from pipeline.core.errors import GuardError, PlanError
from pipeline.embeddings.ssd.aio import ENGINES, DiskQueue
from pipeline.embeddings.ssd.diagnostics import examine
from pipeline.embeddings.ssd.log import MOST_ROWS, RowLog, place_type
from pipeline.embeddings.ssd.scratch_files import ScratchFile
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.records import ShardPlan
from pipeline.records.scratch import MOST_SPARE, log_shape
from tests.embeddings.ranks import DIM, ROWS
from tests.embeddings.test_ssd import queue_of

DIMENSION = 62  # 256 bytes a record, 256 of them a segment


def log_of(folder, rows=5_000):
    return RowLog(folder, rows, DIMENSION + 1, "the rows of table 't'")


def fill(log, count, first=0):
    rows = np.arange(first, first + count)
    return log.add(rows, np.ones((count, DIMENSION + 1), np.float32), np.zeros(count, np.int8))


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
    with pytest.raises(GuardError, match=rf"rows of table 't' in {tmp_path} cannot be written: 65,536 bytes at") as met:
        fill(log, 256)
    met.match(said)
    assert met.value.hint.startswith(hint) and met.value.exit_code == 5


def test_a_log_that_cannot_be_read_says_so_too(tmp_path):
    log = log_of(tmp_path)
    log.drop(fill(log, 256)[:1])
    stand_in(log, "/proc/self/mem")
    with pytest.raises(GuardError, match=r"cannot be read: 65,536 bytes at byte 0 \(Input/output error\)"):
        log.empty()
    log = log_of(tmp_path)
    log.drop(fill(log, 256)[:1])
    os.ftruncate(log.file.fd, 4096)
    with pytest.raises(GuardError, match="was cut from .* to 4096 bytes"):
        log.empty()


@pytest.mark.parametrize("first", [2**31 - 128, MOST_ROWS - 256])
def test_row_numbers_survive_up_to_the_largest_that_a_shard_may_have(tmp_path, first):
    log = log_of(tmp_path)
    fill(log, 256, first)
    log.drop(np.array([3]))
    assert np.array_equal(log.empty()[0][0], np.arange(first, first + 256))


def test_more_rows_than_a_record_can_number_are_refused_before_a_file_is_made(tmp_path):
    plan = ShardPlan(rank=0, row=0, rows=MOST_ROWS + 1, column=0, columns=1)
    with pytest.raises(PlanError, match="'t' has 4,294,967,297 rows on one rank, .* at most 4,294,967,296") as caught:
        SsdShard(tmp_path, "t", plan, 0, 2)
    assert "+plan.tables.t.sharding=row_wise" in caught.value.hint


def test_places_are_as_wide_as_the_longest_log_needs():
    """With most room to spare, and 5,461 records a segment, the most there are."""
    narrow = max(rows for rows in range(1_000_000_000, 1_050_000_000, 1_000) if place_type(rows) is np.int32)
    shape = log_shape(narrow, 8, MOST_SPARE)
    assert shape.per_segment == 5_461 and shape.segments * shape.per_segment < np.iinfo(np.int32).max
    assert place_type(narrow + 1_000) is np.int64 and place_type(2**31) is np.int64


REFUSED = f"""
import json, sys
from pathlib import Path
import numpy as np, torch
from tests.embeddings.refusing import refuse
from tests.embeddings.ranks import on_tier, plan_for
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.tables import TableSpec
refuse("io_uring_setup", "io_setup", "setpriority", "direct")
store = SsdStore(on_tier(plan_for("row_wise", 1), "ssd"), [sys.argv[1]], 0)
kernel, table = torch.zeros({ROWS["long"]}, {DIM}), TableSpec("long", {ROWS["long"]}, {DIM})
store.shard("long").live_in([kernel])
store.begin(table, 1)
store.prefetch({{"long": np.arange(9)}})
part, places = store.hold("long", np.arange(9), 9)
assert torch.equal(kernel[part.slots[places]], initial_rows(1, table, 0, 9))
print(*(what for what, advice in store.shortcomings()), sep="\\n")
store.close()
from pipeline.cli.commands.doctor import tables_on_ssd
from pipeline.embeddings.ssd.diagnostics import examine
for each in tables_on_ssd(json.dumps(examine(Path(sys.argv[1])))):
    print(f"{{each.level:<5}} {{each.name:<15}} {{each.found}} -> {{each.advice}}")
"""


def test_rows_arrive_where_the_kernel_refuses_everything_and_each_refusal_is_one_line_of_doctor_too(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "rows on SSD are read by threads; io_uring is refused (Operation not permitted); Linux AIO is refused "
        "(Operation not permitted): at several times the processor time"
    )
    assert [line.split(" refuse")[0] for line in lines[1:3]] == ["setpriority is", str(tmp_path)]
    assert "O_DIRECT" in lines[2]
    assert len(lines) == 6
    for line, told in zip(lines[:3], lines[3:], strict=True):
        assert told.startswith(f"warn  {'ssd':<15} {line} -> ")


def test_what_this_machine_does_not_refuse_is_not_said_to_be_refused(tmp_path):
    reading, refused = examine(tmp_path)
    queue = DiskQueue()
    queue.close()
    assert reading.startswith(f"rows on SSD are read by {queue.engine}")
    allowed = {"O_DIRECT": opens_directly(tmp_path / "file"), "setpriority": sets_priority()}
    said = " ".join(line for line, advice in refused)
    assert {feature: feature not in said for feature in allowed} == allowed
    assert ("read by threads" in said) == (queue.engine == "threads")


def opens_directly(path):
    """Whether the file system takes O_DIRECT."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def sets_priority():
    """Whether the kernel lets this process keep its own priority."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    except OSError:
        return False
    return True


ENGINE = """
import json, sys
from tests.embeddings.refusing import refuse
refuse("io_uring_setup")
import numpy as np
from pathlib import Path
from pipeline.embeddings.ssd.aio import DiskQueue
from pipeline.embeddings.ssd.scratch_files import ScratchFile
from pipeline.embeddings.ssd.diagnostics import examine
file = ScratchFile(Path(sys.argv[1]), 8192, "a test")
file.write(memoryview(np.repeat(np.arange(2, dtype=np.float32), 1024)).cast("B"), 0)
queue, offsets = DiskQueue(), np.array([4096, 0])
read = [(int(which[i]), float(memory[where[i]])) for which, where, memory in
        queue.read(np.full(2, file.fd), offsets, np.full(2, 4096)) for i in range(len(which))]
from pipeline.cli.commands.doctor import lookup
told = [f"{each.level:<5} {each.name:<15} {each.found}" for each in lookup(sys.argv[1]) if each.name == "ssd"]
print(json.dumps([queue.engine, queue.refused, sorted(read), told, examine(Path(sys.argv[1]))]))
"""


@pytest.mark.slow  # above, everything is refused, and doctor's process is left out
def test_a_container_that_refuses_io_uring_gets_linux_aio_and_doctor_says_so(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENGINE, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    engine, refused, read, told, (reading, shortcomings) = json.loads(done.stdout.splitlines()[-1])
    assert engine == "Linux AIO" and refused == {"io_uring": "Operation not permitted"} and shortcomings == []
    assert read == [[0, 1.0], [1, 0.0]]
    assert reading == "rows on SSD are read by Linux AIO; io_uring is refused (Operation not permitted)"
    assert told == [f"ok    {'ssd':<15} {reading}, past the page cache, at the store"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_which_error_a_read_met(tmp_path, engine):
    queue, file = queue_of(engine), ScratchFile(tmp_path, 8192, "a test")
    offsets = np.array([0, 1 << 20])
    with pytest.raises(OSError, match="Input/output error"):  # it ends before that
        list(queue.read(np.full(2, file.fd), offsets, np.full(2, 4096)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(queue_of(engine).read(np.array([10_000]), np.array([0]), np.array([4096])))
