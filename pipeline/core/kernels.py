"""Compiled kernels for CPUs: C libraries of plugins, found by name and called through ctypes.

Callers ask for kernels by name. Where there are none, they do the same with PyTorch, NumPy or Polars: the package was
installed without a C compiler, a library is of another release, or no plugin brings it. ctypes releases the GIL during
a call.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.registry import find_plugins, load_hook

# Entry points of functions that open a library. They take no arguments, and return its kernels or None.
GROUP = "nightjar.native_libraries"

log = logging.getLogger(__name__)

K = TypeVar("K")

# Results of ``load_kernels``, by name. Tests and benchmarks replace them.
LOADED: dict[str, Any] = {}


def load_kernels(name: str) -> Any | None:
    """Load the kernels ``name``, once in a process.

    Args:
        name: The name of an entry point, such as ``steps``; ``plugins/cpu_kernels`` has those that Nightjar brings.

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


def missing_libraries(names: Sequence[str]) -> list[str]:
    """Return those of the libraries ``names`` that no installed package has a file of. Imports none of the packages.

    The file is below the package of the library's entry point, and named like it.
    """
    entries = {point.name: point for point in find_plugins(GROUP)}
    missing = []
    for name in names:
        if name not in entries or not _has_file(entries[name].module, name):
            missing.append(name)
    return missing


def _has_file(module: str, name: str) -> bool:
    # Only the top package is looked up by Python, since it would import the packages below.
    top, *below = module.split(".")[:-1]
    spec = find_spec(top)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place, *below)
        if any(next(folder.rglob(f"{name}{suffix}"), None) for suffix in EXTENSION_SUFFIXES):
            return True
    return False


def open_library(path: Path, version: int) -> ctypes.CDLL:
    """Open the C library at ``path``.

    Args:
        path: A file ``<name>.<any suffix>``. The library has a function ``<name>_version``.
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
        The kernels; None if there are none, or, with a warning that says what is used ``instead``, if they are of
        another release.
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
