"""A trial's side of a study: at a look at the validation rows it waits for the study's answer, and ends if told so.

The look is in ``metrics.jsonl`` by then, where the tuner reads it; the answer is the trial's own record. A trial whose
tuner does not answer goes on. Nothing here imports Optuna.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.config import Config
from pipeline.errors import TrialEndedError
from pipeline.records.record import read
from pipeline.records.study import TRYING, TrialRecord, trial_path
from pipeline.specs.stage import StageIO
from pipeline.store import Store

LOCAL_SECONDS, REMOTE_SECONDS = 0.05, 1.0  # between two looks at a file of the study
log = logging.getLogger(__name__)


def poll_seconds(store: Store) -> float:
    """Seconds between two looks at a file of ``store``."""
    return LOCAL_SECONDS if store.is_local else REMOTE_SECONDS


def on_trial(config: Config, store: Store, io: StageIO) -> StageIO:
    """``io`` of a run, which asks its study at every look if the run is a trial."""
    if config.tune.trial is None:
        return io
    return replace(io, interval=Asking(config, store, io).interval)


class Asking:
    """Asks the study of a trial. ``io``: where the records of training go first."""

    def __init__(self, config: Config, store: Store, io: StageIO) -> None:
        assert config.tune.trial is not None
        self.study, self.number = config.tune.study or config.data.name, config.tune.trial
        self.seconds, self.store, self.io = config.tune.answer_seconds, store, io
        self._asks_at = 0

    def interval(self, record: dict[str, Any]) -> None:
        """Pass ``record`` on; after a look, wait for the answer. TrialEndedError where the study ends the trial."""
        self.io.interval(record)
        looked = "validation_ne" in record and record["step"] < record["steps_total"]
        if looked and record["samples"] >= self._asks_at:
            self.io.close()  # writes what an object store has not got yet
            self._wait(record)

    def _wait(self, record: Mapping[str, Any]) -> None:
        last = time.monotonic() + self.seconds
        while (answer := self._answer(record)) is None:
            if time.monotonic() >= last:
                log.warning("study %s has not answered after step %s: training goes on", self.study, record["step"])
                return
            time.sleep(poll_seconds(self.store))
        self._asks_at = answer.asks_at
        if answer.state != TRYING:
            raise TrialEndedError(
                f"study {self.study!r} ended trial {self.number} after step {record['step']:,} of "
                f"{record['steps_total']:,}: validation NE {record['validation_ne']:.5f}, other trials are better",
                hint="tune.pruner=none lets every trial train in full",
            )

    def _answer(self, record: Mapping[str, Any]) -> TrialRecord | None:
        """The trial's record once it says what follows from this look."""
        known = read(TrialRecord, self.store, trial_path(self.study, self.number))
        return known if known.state != TRYING or known.asks_at > record["samples"] else None
