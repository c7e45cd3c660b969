"""Launchers that tests start as processes of their own; a test that fails leaves none behind."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
_STARTED: list[subprocess.Popen] = []


def launched(command: list[str], **more: Any) -> subprocess.Popen:
    """Start ``command``, whose output is that of both streams; it ends with the test."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    _STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def no_launcher_goes_on() -> Iterator[None]:
    """End what a test started and did not wait for: a training of thousands of epochs would slow all tests behind."""
    yield
    for process in _STARTED:
        with suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    _STARTED.clear()
