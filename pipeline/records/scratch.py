"""What a shard on tier ssd takes on its disk and in memory: planning counts it, ``embeddings.ssd`` takes it."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

PAGE = 4096
# A record on disk also holds its row's number.
NUMBER_BYTES = 4
# The default of ``hardware.ssd_spare``, the share of a log's records that stay free, and its maximum.
LOG_SPARE, MOST_SPARE = 0.2, 0.5
# Kinds of rows that a log keeps apart by how long they stay on the disk. Each kind fills its own segment.
KINDS = 4
# The number of segments that are emptied together.
EMPTIED = 4
# Segments of a log in memory: those being filled and emptied.
IN_MEMORY = KINDS + EMPTIED
# Segments besides the spare share: those being filled, and those that one more call may fill.
_MORE = 2 * KINDS + 2
# Segments are short, because fewer live rows then remain in them sooner, but have room for some records of any length.
_SEGMENT, _LEAST_RECORDS = 64 << 10, 16
# A log has at most twice as many records as rows, plus a few. A place is the number of a record or, if negative, of a
# slot, so half of the integer's range numbers records.
_PLACES, _WIDE = 2.1, 2**31 - 1


class LogShape(NamedTuple):
    """A log's ``segments``, each of ``segment`` bytes with ``per_segment`` records."""

    segment: int
    per_segment: int
    segments: int

    @property
    def bytes(self) -> int:
        """Bytes of the scratch file."""
        return self.segment * self.segments

    @property
    def memory(self) -> int:
        """Bytes of host memory for the segments being filled and emptied."""
        return IN_MEMORY * self.segment


def log_shape(rows: int, row: int, spare: float = LOG_SPARE) -> LogShape:
    """Return the log of a shard of ``rows`` rows of ``row`` bytes, which holds them all with share ``spare`` free."""
    record = row + NUMBER_BYTES
    segment = max(_SEGMENT, -(-_LEAST_RECORDS * record // PAGE) * PAGE)
    per_segment = segment // record
    return LogShape(segment, per_segment, int(rows / (1 - spare) / per_segment) + _MORE)


def place_bytes(rows: int) -> int:
    """Return the host memory that a shard of ``rows`` rows on tier ssd takes for the place of each row."""
    # Use int64 if int32 is too small to number all records.
    return 8 if _PLACES * rows > _WIDE else 4


@cache
def write_amplification(spare: float) -> float:
    """Return the bytes that a log writes per byte of rows that leave memory, if all rows leave it equally often.

    A segment is emptied with a share u of its records alive, where (1 - u) / -ln u = 1 - spare (Desnoyers, "Analytic
    modeling of SSD write performance", SYSTOR'12). Keeping rows of different frequency apart costs less.
    """
    # The equation has no closed-form solution. 60 bisections exhaust float64's precision.
    low, high = 1e-9, 1 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        # The share of live records over all segments rises with that of the segments that are emptied.
        if (1 - middle) / -math.log(middle) < 1 - spare:
            low = middle
        else:
            high = middle
    return 1 / (1 - low)
