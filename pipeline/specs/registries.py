"""The registries of stages, trackers and search parts, whose protocols take configurations.

Settings list these names as their choices, so a configuration imports this module, and nothing here may import
``pipeline.config``, not even for a type. ``pipeline.specs`` has the same registries with their types.
"""

from __future__ import annotations

from typing import Any

from pipeline.specs.registry import Registry

STAGES: Registry[Any] = Registry("stage", setting="stages", home="pipeline.stages", group="nightjar.stages")
TRACKERS: Registry[Any] = Registry("tracker", setting="track.to", group="nightjar.trackers")
SEARCH_PARTS: Registry[Any] = Registry("search part", setting="search.parts", group="nightjar.search_parts")


def default_stages() -> list[str]:
    """The default of ``stages``."""
    return [stage.name for stage in STAGES if stage.by_default]


def inline_stages() -> list[str]:
    """The default of ``launch.inline``."""
    return [stage.name for stage in STAGES if stage.inline]


def search_part_docs() -> str:
    """Documentation of the searchable parts."""
    return " ".join(f"{each.name}: {each.doc}" for each in SEARCH_PARTS)
