"""Which of the last versions that served was the best, by their gate records.

Each record holds the paired change of NE from the version before it, on rows that both scored. The sums of these
changes compare versions of different days fairly; the NE of each version on its own day would compare the days.
"""

from __future__ import annotations

import math

from pipeline.errors import ArtifactError, UnreachableError
from pipeline.publishing.promotion import read_current
from pipeline.publishing.versions import version_path
from pipeline.records import GATE, HOLD, GateRecord, read
from pipeline.store import Store


def better_by_record(store: Store, model: str, incumbent: str, count: int) -> list[str]:
    """Of the last ``count`` versions up to ``incumbent``, those that scored better than it, best first.

    Versions that were rolled back are left out. The line ends at a version that was forced through the gate, because
    that loss was accepted.
    """
    served = set(read_current(store, model).line)
    levels = dict[str, float]()
    version, level, seen = incumbent, 0.0, 0
    while seen < count:
        if version in served or version == incumbent:
            levels[version] = level
            seen += 1
        record = _record(store, model, version)
        before = record.incumbent_version if record is not None else None
        if record is None or record.change is None or before is None or record.forced or record.verdict == HOLD:
            break
        level -= math.log1p(record.change.ne.point)
        version = before
    return sorted((name for name in levels if levels[name] < 0), key=lambda name: levels[name])


def _record(store: Store, model: str, version: str) -> GateRecord | None:
    """The gate's record of a version; None if it is missing or damaged."""
    try:
        return read(GateRecord, store, f"{version_path(model, version)}/{GATE}")
    except UnreachableError:
        raise
    except ArtifactError:
        return None
