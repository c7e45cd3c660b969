"""C libraries of this package, called through ctypes: found where the package was installed with a C compiler."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

L = TypeVar("L")


def checked(path: Path, prefix: str, version: int) -> ctypes.CDLL:
    """The library at ``path``, whose function ``<prefix>_version`` must say ``version``; OSError where it does not."""
    library = ctypes.CDLL(str(path))
    stated = getattr(library, f"{prefix}_version")()
    if stated != version:
        raise OSError(f"{path} is of version {stated}, expected {version}")
    return library


def open_installed(beside: str, name: str, opened: Callable[[Path], L], instead: str) -> L | None:
    """``opened`` of the extension ``name`` in the folder of the file ``beside``.

    None where there is none, or, with a warning that says what is used ``instead``, where it is another release's.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(beside).with_name(f"{name}{suffix}")
        if path.is_file():
            try:
                return opened(path)
            except (OSError, AttributeError) as error:
                log.warning("%s: %s; install the package again", instead, error)
    return None
