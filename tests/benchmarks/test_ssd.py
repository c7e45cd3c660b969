"""``make bench-ssd``: what its memory limit leaves for hot rows, and that it ends, its limit held."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ssd import AHEAD, DriftingIds, Tables, cache_rows, cold_rows, fio_reads
from pipeline.embeddings.ssd.aio import DEPTH
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


def test_without_fio_there_is_no_bound_and_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    reads, why = fio_reads(tmp_path)
    assert reads is None and why.startswith("fio is not installed")


def test_fio_reads_as_the_tier_does_and_leaves_nothing(tmp_path, monkeypatch):
    fio = tmp_path / "bin" / "fio"
    fio.parent.mkdir()
    fio.write_text(f"""#!/bin/sh
touch {tmp_path}/bound.0.0
echo "$@" > {tmp_path}/asked
echo 'note: {{ "jobs": [ {{ "read": {{ "iops": 1234.5 }} }} ] }}' | cut -c7-
""")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fio.parent}:{os.environ['PATH']}")
    assert fio_reads(tmp_path) == (1234.5, "")
    asked = (tmp_path / "asked").read_text().split()
    assert {f"--iodepth={DEPTH}", "--bs=4k", "--rw=randread", "--direct=1"} <= set(asked)
    assert not list(tmp_path.glob("bound*"))
    fio.write_text("#!/bin/sh\necho no room >&2; exit 1\n")
    assert fio_reads(tmp_path) == (None, "fio failed: no room")


def test_ids_that_drift_bring_rows_that_were_cold(tmp_path):
    ids, rng = DriftingIds(10_000, 1.2, batch=100, drift=2.0, shift=0.0), np.random.default_rng(0)
    first = ids.draw(rng, 50_000)  # 500 batches
    assert ids.shift == 1_000 and np.bincount(first, minlength=10_000).argmax() == 9_000
    two = DriftingIds(10_000, 1.2, batch=100, drift=2.0, shift=7.0, tables=2)
    two.draw(rng, 200)
    assert two.shift == 9.0


@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 4])
def test_the_bench_ends_on_two_and_on_four_cores_past_the_first_cleaning_of_the_log(tmp_path, cores):
    have = sorted(os.sched_getaffinity(0))
    if len(have) < cores:
        pytest.skip(f"needs {cores} cores")
    small = ["--gib", "1", "--times", "1", "--steps", "2", "--warm", "0.1", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ssd", *small],
        capture_output=True,
        text=True,
        timeout=900,
        preexec_fn=lambda: os.sched_setaffinity(0, have[:cores]),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["bench"] == "ssd" and record["ratio"] > 0 and record["steady_ratio"] > 0
    assert record["process_bytes"] > 100e6 and record["turns"] >= 2 and record["write_amplification"] > 1
    assert (record["fio_iops"] is None) == bool(record["without_fio"])
    if record["limited"]:
        assert record["1x_zipf1.05_peak_bytes"] <= GIB
