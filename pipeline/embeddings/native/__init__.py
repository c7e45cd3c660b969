"""The compiled steps of table optimizers, where they are installed: ``rowsteps.c``, called through ctypes.

A call sums the gradients of a batch by row and applies an optimizer's formula to these rows, a table after another,
without the copies that torch's operations make. A wheel and the image carry the library; installing from a checkout
builds it where there is a C compiler. Everywhere else ``pipeline.embeddings.fused_optimizer`` does the same with
torch; the results agree to rounding.

ctypes lets go of the interpreter's lock during a call, so several threads can share one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from pipeline.core.compiled import checked, open_installed
from pipeline.specs.optimizers import CompiledStep

# Of the functions below, as rowsteps.c has it.
_VERSION = 2
_ALL_INSTRUCTION_SETS = 2
_STATES, _SETTINGS = 2, 6
# In the order of formulas.h.
_FORMULAS = ("lazy_adam", "partial_rowwise_adam", "ftrl")


class Table(ctypes.Structure):
    """A table and what a batch looked up in it: ``Table`` of rowsteps.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("states", ctypes.c_void_p * _STATES),
        ("widths", ctypes.c_int64 * _STATES),
        ("steps", ctypes.c_int64 * _STATES),
        ("width", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("features", ctypes.c_int64),
        ("mean", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    _fields_ = (("formula", ctypes.c_int32), ("lazy", ctypes.c_int32), ("settings", ctypes.c_float * _SETTINGS))


class _Share(ctypes.Structure):
    _fields_ = (("next", ctypes.c_int64), ("environment", ctypes.c_char * 64))


class RowStepsLibrary:
    """The functions of the library at ``path``. ``level``: 0 uses no more than every CPU has, 1 AVX2 too, 2 all."""

    def __init__(self, path: Path, level: int = _ALL_INSTRUCTION_SETS) -> None:
        self._library, self._level = checked(path, "rowsteps", _VERSION), level
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

    def learn(self, tables: Sequence[Table], step: CompiledStep, *, lazy: bool, threads: int) -> None:
        """Take ``step`` in the rows that were looked up; ``threads`` share the tables, which share no memory."""
        array = (Table * len(tables))(*tables)
        figures = _Step(_FORMULAS.index(step.formula), int(lazy), (ctypes.c_float * _SETTINGS)(*step.settings))
        share = _Share()
        self._library.rowsteps_share(ctypes.byref(share))

        def work() -> int:
            count = ctypes.c_int64(len(tables))
            return int(
                self._library.rowsteps_learn(array, count, ctypes.byref(figures), ctypes.byref(share), self._level)
            )

        # The calling thread works, too.
        helpers = min(threads, len(tables)) - 1
        futures = []
        if helpers > 0:
            if self._pool is None or self._pool_size < helpers:
                self._pool, self._pool_size = ThreadPoolExecutor(helpers, thread_name_prefix="nightjar-rows"), helpers
            futures = [self._pool.submit(work) for _ in range(helpers)]
        if any([work(), *(future.result() for future in futures)]):
            raise MemoryError("no memory to train the rows of a batch")


@cache
def library() -> RowStepsLibrary | None:
    """The library that was installed with this package; None where there is none, or it is another release's."""
    return open_installed(__file__, "rowsteps", RowStepsLibrary, "rows are trained without the compiled steps")
