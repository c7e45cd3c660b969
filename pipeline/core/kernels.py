"""Compiled kernels for CPUs: C libraries of plugins, found by name and called through ctypes.

Who can use kernels asks for them by name, and does the same with PyTorch, NumPy or Polars where there are none: the
package was installed without a C compiler, a library is another release's, or no plugin brings it. ctypes lets go of
the interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.registry import load_hook

# Entry points of functions that open a library: without arguments; they return its kernels or None.
GROUP = "nightjar.native_libraries"

log = logging.getLogger(__name__)

K = TypeVar("K")

# What ``load_kernels`` returns, by name. Tests and benchmarks put others in.
LOADED: dict[str, Any] = {}


def load_kernels(name: str) -> Any | None:
    """Load the kernels ``name``, once in a process.

    Args:
        name: Of an entry point, such as ``steps``; ``plugins/cpu_kernels`` has those that Nightjar brings.

    Returns:
        An object whose methods are the kernels, or None where there are none.

    Raises:
        ConfigError: The plugin cannot be imported, or two plugins have the name.
    """
    if name not in LOADED:
        open_kernels = load_hook(GROUP, name)
        # None is remembered as well, so that entry points are searched once and not at every step.
        LOADED[name] = None if open_kernels is None else open_kernels()
    return LOADED[name]


def open_library(path: Path, version: int) -> ctypes.CDLL:
    """Open the C library at ``path``.

    Args:
        path: Of a file ``<name>.<any suffix>``. The library has a function ``<name>_version``.
        version: What that function must return.

    Raises:
        OSError: The file is no library, or of another version.
    """
    library = ctypes.CDLL(str(path))
    # ctypes checks no signatures, so a library of another release might misread its arguments.
    stated = getattr(library, f"{path.name.partition('.')[0]}_version")()
    if stated != version:
        raise OSError(f"{path} is of version {stated}, expected {version}")
    return library


def open_installed(folder: Path, name: str, open_kernels: Callable[[Path], K], instead: str) -> K | None:
    """Open the extension module ``name`` in ``folder`` by ``open_kernels``.

    Returns:
        None where there is none, or, with a warning that says what is used ``instead``, where it is another release's.
    """
    # File names carry Python's version, and a folder may hold builds for several versions.
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.is_file():
            try:
                return open_kernels(path)
            except (OSError, AttributeError) as error:
                log.warning("%s: %s; install the package again", instead, error)
    return None
