"""Steps of table optimizers on a CPU: ``native/rowsteps.c``, called through ctypes.

A call sums the gradients of a batch by row and applies an optimizer's formula to these rows, a table after another,
without the copies that torch's operations make. ``pipeline.embeddings.table_training`` does the same with torch; the
results agree to rounding. Several threads can share a call, as ctypes lets go of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.kernels import open_installed, open_library
from pipeline.specs.optimizers import CompiledStep

if TYPE_CHECKING:
    # ``nightjar doctor`` opens the library where torch may be missing.
    from torch import Tensor

# The version of the functions below, the same as in rowsteps.c.
_VERSION = 2
_ALL_INSTRUCTION_SETS = 2
_STATES, _SETTINGS = 2, 6
# The order is that of formulas.h.
_FORMULAS = ("lazy_adam", "partial_rowwise_adam", "ftrl")


class _Table(ctypes.Structure):
    # ``Table`` of rowsteps.c: a table and what a batch looked up in it.
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


class RowKernels:
    """The functions of the library at ``path``. ``level``: 0 uses no more than every CPU has, 1 AVX2 too, 2 all."""

    def __init__(self, path: Path, level: int = _ALL_INSTRUCTION_SETS) -> None:
        self._library, self._level = open_library(path, _VERSION), level
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

    def tables(
        self, weights: Sequence[Tensor], states: Sequence[Sequence[Tensor]], features: Sequence[int], *, mean: bool
    ) -> RowTables:
        """Return tables whose rows are trained in place.

        Args:
            weights: float32 [rows, dim] of each table, contiguous.
            states: One or two float32 tensors per table, [rows] or [rows, dim], in the order of the formula.
            features: How many features each table has.
            mean: Bags are averaged, not summed up.
        """
        return RowTables(self, weights, states, features, mean)

    def run(self, tables: Sequence[_Table], step: CompiledStep, *, lazy: bool, threads: int) -> None:
        """Take ``step`` in the rows that were looked up; ``threads`` share the tables, which share no memory."""
        array = (_Table * len(tables))(*tables)
        figures = _Step(_FORMULAS.index(step.formula), int(lazy), (ctypes.c_float * _SETTINGS)(*step.settings))
        # The threads of this call share this state: the next table to take.
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
        failed = work()
        # Wait for all threads even if one failed, because they use the tables' memory.
        for future in futures:
            failed |= future.result()
        if failed:
            raise MemoryError("no memory to train the rows of a batch")


class RowTables:
    """Embedding tables of ``RowKernels.tables``."""

    def __init__(
        self,
        kernels: RowKernels,
        weights: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        features: Sequence[int],
        mean: bool,
    ) -> None:
        self._kernels = kernels
        # These tensors keep the memory alive that the library writes to.
        self._weights, self._states = weights, states
        self._tables: list[_Table] = []
        for rows, columns, count in zip(weights, states, features, strict=True):
            table = _Table(weights=rows.data_ptr(), width=rows.shape[1], features=count, mean=mean)
            for i, column in enumerate(columns):
                table.states[i] = column.data_ptr()
                table.steps[i] = column.stride(0)
                table.widths[i] = 1 if column.dim() == 1 else column.shape[1]
            self._tables.append(table)

    def learn(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        gradient: Tensor,
        step: CompiledStep,
        *,
        lazy: bool,
        threads: int,
    ) -> None:
        """Train the rows of a lookup of b samples.

        Args:
            ids: int64 [n], contiguous as all are here.
            offsets: int64 [features * b + 1].
            weights: The ids' weights, float32 [n], or None.
            gradient: The gradient of the pooled embeddings, float32 [b, sum of dims].
            step: The formula and its figures.
            lazy: Leave rows alone whose gradient is 0.
            threads: How many share the tables.
        """
        batch = len(gradient)
        column = feature = 0
        # Copy the tables, since several threads may run this method.
        tables = [_Table.from_buffer_copy(table) for table in self._tables]
        for table, rows in zip(tables, self._weights, strict=True):
            table.ids = ids.data_ptr()
            table.offsets = offsets[feature * batch :].data_ptr()
            if weights is not None:
                table.shares = weights.data_ptr()
            table.gradient = gradient[:, column:].data_ptr()
            table.stride = gradient.stride(0)
            # A table without rows has nothing to train.
            table.batch = batch if len(rows) else 0
            column += table.features * table.width
            feature += table.features
        self._kernels.run(tables, step, lazy=lazy, threads=threads)


def load() -> RowKernels | None:
    """Return the installed kernels; None if there are none, or they belong to another release."""
    folder = Path(__file__).parent / "native"
    return open_installed(folder, "rowsteps", RowKernels, "rows are trained without the compiled steps")
