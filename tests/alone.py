"""Tests that run in a process of their own, where nothing of earlier tests is in memory or still running."""

import importlib
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from functools import wraps

import tests.embeddings.ranks  # noqa: F401 (it says what the fork server imports)
from tests.hung import end_with_stacks, write_stacks_on_abort
from tests.waits import PATIENCE


def alone(check: Callable[..., None]) -> Callable[..., None]:
    """Run the test ``check`` in a process of its own, which gets copies of its fixtures: paths and other plain values.

    What Python's, Arrow's and Polars' allocators keep or give back there, and what libraries are set to, does not
    depend on the tests before.
    """

    @wraps(check)
    def run(**fixtures: object) -> None:
        process = multiprocessing.get_context("forkserver").Process(
            target=_call, args=(check.__module__, check.__qualname__, fixtures)
        )
        process.start()
        process.join(PATIENCE)
        if process.is_alive():
            assert process.pid is not None
            print(end_with_stacks(process.pid), file=sys.stderr)
            process.join()
        assert process.exitcode == 0, "see the error above"

    return run


def _call(module: str, name: str, fixtures: dict[str, object]) -> None:
    write_stacks_on_abort()
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**fixtures)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise SystemExit(1) from None
