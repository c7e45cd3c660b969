"""Keep the output of TorchRec's planner and of the solver off the user's screen."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Python warnings and log records in the block; what matters is a result or an error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def quiet_native() -> Iterator[None]:
    """Suppress what native code prints in the block: no option of HiGHS stops all of its lines."""
    flush = ctypes.CDLL(None).fflush  # native output waits in a buffer of the C library's
    sys.stdout.flush()
    flush(None)
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)
