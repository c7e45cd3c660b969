"""Logs of very many columns: peak memory of an ingestion in a process of its own, with four threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ingest import _write_numbers

COLUMNS, ROWS, THREADS = 1024, 16_384, 4
BOUND = 600 << 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_thousand_numbers_a_row_take_less_than_600_mib(tmp_path: Path, kind: str) -> None:
    log = tmp_path / f"wide.{kind}"
    _write_numbers(str(log), ROWS, COLUMNS)
    command = [sys.executable, "-m", "benchmarks.ingest", "--one", "nightjar", "--log", str(log)]
    command += ["--columns", str(COLUMNS), "--threads", str(THREADS)]
    threads = {"POLARS_MAX_THREADS": str(THREADS), "OMP_NUM_THREADS": str(THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | threads)
    one = json.loads(done.stdout.splitlines()[-1])
    assert one["rows"] == ROWS
    assert one["peak"] < BOUND
