"""Launchers that tests start as processes of their own; a test that fails leaves none behind."""

import os
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


def descendants_named(name: str, pid: int | None = None) -> list[psutil.Process]:
    """The processes called ``name`` among those that process ``pid`` (None: this one) started, and that these started.

    One that ends meanwhile is not among them.
    """
    found = []
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid or os.getpid()).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if each.name() == name:
                    found.append(each)
    return found


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
