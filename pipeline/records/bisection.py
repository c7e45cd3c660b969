"""``bisect.json``: what spoilt a run that the gate held, found by training it again with something changed back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.records.gate import Interval
from pipeline.records.record import Record, absent

BISECT = "bisect.json"
# Kinds of suspects. Settings and features need a training; limits, labels and rows do not.
LIMITS, SETTINGS, FEATURES, LABELS, ROWS = "limits", "settings", "features", "labels", "rows"


@dataclass(frozen=True, kw_only=True)
class Suspect(Record):
    """What may have spoilt a run, and the ``sign`` that speaks for it, in words.

    ``kind``: limits | settings | features | labels | rows. ``names``: settings (limits: those of the gate) or features,
    by name; the day, and slices of its rows. ``explained``: the share of the lost NE that the sign alone explains;
    absent where only a training can tell, and for rows that are suspected because nothing else is.
    """

    kind: str
    names: tuple[str, ...]
    sign: str
    explained: float | None = absent()

    @property
    def title(self) -> str:
        """The suspect's kind and names, in a sentence."""
        return f"{self.kind} {', '.join(self.names)}"


@dataclass(frozen=True, kw_only=True)
class Replay(Record):
    """A training with the settings ``names`` changed back, or without the features ``names``.

    ``verdict``, ``reasons``: of the gate, beside the incumbent of the held run. ``ne``: of the model. ``change``: of NE
    from the held model, as a share, paired on the same test rows; absent where those differ. ``explained``: the share
    of the lost NE that came back. ``incumbent``: NE of the incumbent on the same rows, without these features, too.
    ``same_rows``: whether it was judged on the test rows of the held model; otherwise it proves nothing. ``message``:
    why there is no verdict.
    """

    run: str
    kind: str
    names: tuple[str, ...]
    seconds: float
    verdict: str | None = absent()
    reasons: tuple[str, ...] | None = absent()
    ne: float | None = absent()
    change: Interval | None = absent()
    explained: float | None = absent()
    incumbent: Interval | None = absent()
    same_rows: bool = absent(True)
    message: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class Culprit(Record):
    """What spoilt the run, as ``Suspect``, and in words. ``replay``: the run that shows it; absent where none was made.

    ``passes``: whether the gate passes without it.
    """

    kind: str
    names: tuple[str, ...]
    words: str
    replay: str | None = absent()
    passes: bool = absent(False)
    explained: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class BisectRecord(Record):
    """The search for what spoilt ``version``, which ``run`` made and the gate held beside ``incumbent`` of ``model``.

    ``ne``, ``incumbent_ne``: of both on the same rows. ``suspects``: in the order in which they are tried. ``limit``:
    how many replays were allowed. Without ``culprit``, none was found so far; ``stopped``: why some suspects before the
    culprit, or any, were not tried.
    """

    FILE: ClassVar[str] = BISECT
    KIND: ClassVar[str] = "bisection"
    REMEDY: ClassVar[str] = "nightjar bisect writes it again"

    run: str
    model: str
    incumbent: str
    version: str | None = absent()
    ne: float | None = None
    incumbent_ne: float | None = None
    limit: int = 0
    suspects: tuple[Suspect, ...] = ()
    replays: tuple[Replay, ...] = ()
    culprit: Culprit | None = None
    stopped: str | None = absent()
