"""Versions of a model: written, described, promoted, rolled back, opened to score rows.

Names are imported when they are first used: listing versions needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.publishing.served import Description, ServedModel
    from pipeline.publishing.versions import Current, incumbent, promote, read_current, roll_back, version_path

_HOMES = {
    "Current": "versions",
    "Description": "served",
    "ServedModel": "served",
    "incumbent": "versions",
    "promote": "versions",
    "read_current": "versions",
    "roll_back": "versions",
    "version_path": "versions",
}

__all__ = [
    "Current",
    "Description",
    "ServedModel",
    "incumbent",
    "promote",
    "read_current",
    "roll_back",
    "version_path",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
