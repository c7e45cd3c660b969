"""``make bench-ssd``: what its memory limit leaves for hot rows, and that it ends, its limit held."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.ssd_memory import AHEAD, Tables, cache_rows, cold_rows
from pipeline.planning.candidates import BATCHES_MOVING, NUMBER_BYTES, ROW_BYTES

GIB = 2**30
TABLES = Tables(count=26, rows=400_000, dim=64, batch=4096)


@pytest.mark.parametrize("process", [int(0.3 * GIB), int(0.7 * GIB), GIB])
@pytest.mark.parametrize("exponent", [1.05, 1.2])
def test_everything_a_child_needs_fits_the_limit_whatever_its_process_takes(process, exponent):
    limit = int(1.4 * GIB)
    kept = cache_rows(TABLES, limit, process, exponent, 0.9)
    moving = (AHEAD + BATCHES_MOVING) * cold_rows(TABLES, exponent, kept) * (4 * 65 + NUMBER_BYTES)
    taken = process + TABLES.count * (kept * TABLES.row_bytes + moving + ROW_BYTES * TABLES.rows)
    assert kept > 1_000 and 0.85 * limit < taken < limit


def test_no_row_is_kept_where_the_process_alone_fills_the_limit_and_never_more_than_there_are():
    assert cache_rows(TABLES, GIB, GIB, 1.2, 0.9) == 0
    small = replace(TABLES, rows=500)
    assert cache_rows(small, 2 * GIB, GIB, 1.2, 0.9) == 500 and cold_rows(small, 1.2, 500) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 4])
def test_the_bench_ends_on_two_and_on_four_cores_past_the_first_cleaning_of_the_log(tmp_path, cores):
    have = sorted(os.sched_getaffinity(0))
    if len(have) < cores:
        pytest.skip(f"needs {cores} cores")
    small = ["--gib", "1", "--times", "1", "--steps", "2", "--warm", "0.1", "--minutes", "0", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ssd", *small], capture_output=True, text=True, timeout=900,
        preexec_fn=lambda: os.sched_setaffinity(0, have[:cores]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["bench"] == "ssd" and record["ratio"] > 0 and record["steady_ratio"] > 0
    assert record["process_bytes"] > 100e6
    if record["limited"]:
        assert record["1x_zipf1.05_peak_bytes"] <= GIB
