"""The course of a search: weights alone, then weights and choices in turns, at a falling temperature."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.records import DecisionRecord, SearchPoint, SearchRecord
from pipeline.search.choices import Choices
from pipeline.search.cost import Costs, Weights, tabulate
from pipeline.search.learning import Learner
from pipeline.search.rows import Parts, Rows, start_logit
from pipeline.search.space import Space
from pipeline.store import Artifact, Store
from pipeline.training.order import Order

log = logging.getLogger(__name__)
POINTS = 24  # of the record
TABLES = 4  # times that the costs are tabulated around the choices that are the most probable ones then
DECIDED = 0.5  # of the way from as likely as the others to certain

Progress = Callable[[int, int], None]


def search(
    space: Space, store: Store, dataset: Artifact, progress: Progress = lambda done, total: None
) -> SearchRecord:
    """Search the architecture in ``space`` on the train rows of ``dataset``. Equal inputs give equal decisions."""
    began, config = time.monotonic(), space.config
    order = Order(
        key=dataset.key, seed=config.seed, global_batch=config.train.batch, shuffle=config.train.shuffle,
        window_groups=config.train.shuffle_window_groups, lanes=config.train.lanes,
    )  # fmt: skip
    parts = Parts(store, dataset, order, share=config.search.held_share, epochs=config.search.epochs)
    course = _Course(space, parts)
    with parts.open() as (learnt, held):
        course.run(learnt, held, progress)
    return _record(space, course, dataset, time.monotonic() - began)


class _Course:
    """A search under way. ``points``: of the record, with the probabilities at each in ``over_time``."""

    def __init__(self, space: Space, parts: Parts) -> None:
        config = space.config
        self.space, self.parts, self.settings = space, parts, config.search
        self.choices = Choices(space.decisions, config.seed)
        self.learner = Learner(config, space.schema, self.choices, parts.steps, start_logit(parts.base_rate))
        for part, own in space.parts:
            part.attach(self.learner.net, own)
        self.first = round(self.settings.warmup * parts.steps)  # step in which choices begin to learn
        self.before = space.price(space.original)
        self.points: list[SearchPoint] = []
        self.over_time: list[dict[str, list[float]]] = []
        self._costs: Costs | None = None
        self._sums: list[tuple[float, float | None, float | None]] = []

    def run(self, learnt: Iterator[Rows], held: Iterator[Rows], progress: Progress) -> None:
        """All steps."""
        total = self.parts.steps
        for step in range(total):
            self._step(step, next(learnt), held)
            if (step + 1) * POINTS // total > step * POINTS // total:
                self._point(step + 1)
            progress(step + 1, total)

    def temperature(self, step: int) -> float:
        """It stays while the weights learn alone, then falls by a constant factor."""
        start, end = self.settings.temperature, self.settings.final_temperature
        return float(start * (end / start) ** self._done(step))

    def _done(self, step: int) -> float:
        return max(0, step - self.first) / max(1, self.parts.steps - 1 - self.first)

    def _step(self, step: int, rows: Rows, held: Iterator[Rows]) -> None:
        temperature = self.temperature(step)
        loss = self.learner.learn_weights(rows, step, temperature)
        if step < self.first:
            self._sums.append((loss, None, None))
            return
        steps = self.parts.steps - self.first
        if self._costs is None or (step - self.first) * TABLES // steps > (step - 1 - self.first) * TABLES // steps:
            self._costs = self._tabulated()
        self._sums.append((loss, *self.learner.learn_choices(next(held), self._costs, temperature)))

    def _tabulated(self) -> Costs:
        at = self.choices.best()
        weights = Weights(ms=self.settings.cost, bytes=self.settings.memory)
        return tabulate(self.space.decisions, at, self.space.price, weights, self.before)

    def _point(self, step: int) -> None:
        """Record what was measured since the last point."""
        together = zip(*self._sums, strict=True)
        columns: list[list[float]] = [[value for value in each if value is not None] for each in together]
        loss, held, cost = (sum(values) / len(values) if values else None for values in columns)
        assert loss is not None
        temperature = self.temperature(step - 1)
        self.points.append(SearchPoint(step=step, temperature=temperature, loss=loss, held_loss=held, cost=cost))
        self.over_time.append(self.choices.by_name())
        self._sums = []
        log.info("step %d of %d: log loss %.5f, held rows %s", step, self.parts.steps, loss, held and f"{held:.5f}")


def _record(space: Space, course: _Course, dataset: Artifact, seconds: float) -> SearchRecord:
    chosen, last, parts = course.choices.best(), course.choices.by_name(), course.parts
    after = space.planned(chosen)
    return SearchRecord(
        name=str(space.config.search.name), dataset=dataset.path, seed=space.config.seed, steps=parts.steps,
        rows=parts.learnt_rows, held_rows=parts.held_rows, seconds=round(seconds, 3),
        before=space.planned(space.original), after=after,
        decisions={
            each.name: DecisionRecord(
                part=part.name, choices=each.choices, chosen=chosen[each.name],
                probability=round(max(last[each.name]), 4),
                history=tuple(tuple(round(p, 4) for p in point[each.name]) for point in course.over_time),
            )
            for part, own in space.parts for each in own
        },
        points=tuple(course.points), undecided=tuple(name for name, row in last.items() if not decided(row)),
    )  # fmt: skip


def decided(probabilities: list[float]) -> bool:
    """Whether one choice is much more likely than it would be if all were alike."""
    alike = 1 / len(probabilities)
    return (max(probabilities) - alike) / (1 - alike) >= DECIDED


def warning(record: SearchRecord, settings: Any) -> str:
    """What to say of a search that has decided less than half of what it was to decide; "" of any other."""
    open_, every = len(record.undecided), len(record.decisions)
    if 2 * open_ <= every:
        return ""
    return (
        f"the search decided {every - open_} of {every} questions; the choices of the others stayed about as likely as "
        f"at first, so the model found is hardly better than one drawn at random. Try more steps "
        f"(search.epochs={2 * settings.epochs}), a faster rate of the choices (search.lr={2 * settings.lr:g}), or a "
        f"higher weight of the cost (search.cost={max(2 * settings.cost, 0.005):g} "
        f"search.memory={max(2 * settings.memory, 0.005):g})"
    )
