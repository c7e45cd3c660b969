"""The course of a search: weights alone, then weights and choices in turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from pipeline.core import units
from pipeline.core.errors import PlanError
from pipeline.core.machine import usable_memory
from pipeline.embeddings.table_optimizers import table_rules
from pipeline.plugins.search.architecture import Choices, Costs, LossWeights, tabulate
from pipeline.plugins.search.architecture_space import ArchitectureSpace
from pipeline.plugins.search.learning import Learner, SearchState, SearchStore
from pipeline.plugins.search.rows import SearchBatch, SplitBatches, start_logit
from pipeline.records.search import DecisionRecord, SearchPoint, SearchRecord
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.memory import status_bytes
from pipeline.training.sampler import Order, shuffle_key

log = logging.getLogger(__name__)
POINTS = 24  # points in the record
COMPARED, DECIDING = 16, 32  # batches of held rows for comparing choices: during the search, at its end
OPEN, FINAL = 1e-3, 1e-4  # log loss that makes a choice e times as likely as another: during the search, at its end
TABLES = 2  # how often costs are tabulated around the choices that are the most probable then
KEEPING = 0.05  # largest share of a search's time for keeping its state
DECIDED = 0.5  # share of the way from as likely as the others to certain
VALUE = 4  # bytes of a float32
COPIES = 2  # copies of rows and optimizer state: the second exists while the search's state is written or read

Progress = Callable[[int, int], None]


def search(
    space: ArchitectureSpace,
    store: Store,
    dataset: Artifact,
    progress: Progress = lambda done, total: None,
    kept: SearchStore | None = None,
) -> SearchRecord:
    """Search the architecture in ``space`` on the train rows of ``dataset``. Equal inputs give equal decisions.

    ``kept``: keeps the state at intervals; a search that was stopped goes on from there, bit for bit.
    PlanError if the super-net does not fit into memory.
    """
    config = space.config
    require_memory(space)
    order = Order(
        key=shuffle_key(dataset),
        seed=config.seed,
        global_batch=config.train.batch,
        shuffle=config.train.shuffle,
        window_groups=config.train.shuffle_window_groups,
        lanes=config.train.dealt_lanes,
    )
    parts = SplitBatches(store, dataset, order, share=config.search.held_share, epochs=config.search.epochs)
    course = _Course(space, parts, kept)
    with parts.open(course.done, course.held_used) as (learnt, held):
        course.run(learnt, held, progress)
    return _record(space, course, dataset)


def table_bytes(space: ArchitectureSpace, dim: int) -> int:
    """Return bytes that the tables take at width ``dim``: rows, their optimizers' state, and the copy that is kept."""
    rules = table_rules(space.config.model, space.config.train)
    # All tables are one tensor. Each column of optimizer state is another one, with room for every row even where the
    # optimizers of only some tables use that column.
    columns = {}
    for table in space.schema.tables:
        for column in rules.of(table.name).columns:
            columns[column.name] = column
    values = dim
    for column in columns.values():
        values += dim if column.per_value else 1
    return COPIES * VALUE * values * sum(table.rows for table in space.schema.tables)


def require_memory(space: ArchitectureSpace, room: int | None = None) -> None:
    """Raise PlanError if the tables of the super-net do not fit into ``room`` bytes of memory.

    By default this is the memory that the process may still use on this machine.
    """
    # The dense part and a batch are not counted, since they are small beside tables that come near the limit.
    dim = space.config.model.embedding_dim
    rows = sum(table.rows for table in space.schema.tables)
    if room is None:
        room = usable_memory() - status_bytes("VmRSS")
    needed = table_bytes(space, dim)
    if needed <= room:
        return
    narrower = ""
    for width in range(dim - dim % 4, 3, -4):
        if table_bytes(space, width) <= room:
            narrower = f"model.embedding_dim={width}, or "
            break
    raise PlanError(
        f"the search needs {units.size(needed)} for {units.count(rows)} rows at their full width of {dim}, with the "
        f"optimizer's state and a copy of both to go on from, but this machine has {units.size(max(room, 0))} left",
        hint=f"{narrower}data.sparse_defaults.min_count=<higher>, which makes fewer rows",
    )


class _Course:
    """A search after ``done`` steps; ``kept`` has the state of one that was stopped.

    ``points``: points of the record, with the probabilities at each in ``over_time``.
    """

    def __init__(self, space: ArchitectureSpace, parts: SplitBatches, kept: SearchStore | None) -> None:
        config = space.config
        self._began = time.monotonic()
        self._keeping = 0.0  # seconds spent writing the state
        self.space, self.parts, self.kept, self.settings = space, parts, kept, config.search
        self.choices = Choices(space.decisions, config.seed)
        self.learner = Learner(config, space.schema, self.choices, parts.steps, start_logit(parts.base_rate))
        for part, decisions in space.parts:
            part.attach(self.learner.net, decisions)
        # The step in which choices begin to learn.
        self.first = round(self.settings.warmup * parts.steps)
        self.before = space.price(space.original)
        self.points: list[SearchPoint] = []
        self.over_time: list[dict[str, list[float]]] = []
        self._costs: Costs | None = None
        self._sums: list[tuple[float, float | None, float | None]] = []
        self.done, self._earlier = 0, 0.0
        self.held_used = 0  # batches
        state = kept.read() if kept is not None else None
        # With another order of rows, such as that of a new dataset, ``done`` would stand for other rows.
        if state is not None and state.values.get("shuffle_key") == parts.order.key:
            self._restore(state)

    @property
    def seconds(self) -> float:
        """Seconds that the search has taken so far, including those before it was stopped."""
        return self._earlier + time.monotonic() - self._began

    def run(self, learnt: Iterator[SearchBatch], held: Iterator[SearchBatch], progress: Progress) -> None:
        """Take all remaining steps."""
        total = self.parts.steps
        held = self._counted(held)
        for step in range(self.done, total):
            self._step(step, next(learnt), held)
            self.done = step + 1
            # The last measurement decides, so it comes when all learning is over.
            if self.done == total:
                self._around(total, held)
            # Spread the points evenly. With fewer steps than POINTS, every step is a point.
            if self.done * POINTS // total > step * POINTS // total:
                self._point(self.done)
                self._keep()
            progress(self.done, total)

    def temperature(self, step: int) -> float:
        """Return the temperature: constant while only the weights learn, then changing by a constant factor."""
        start, end = self.settings.temperature, self.settings.final_temperature
        done = max(0, step - self.first) / max(1, self.parts.steps - 1 - self.first)
        return float(start * (end / start) ** done)

    def _counted(self, held: Iterator[SearchBatch]) -> Iterator[SearchBatch]:
        # A search that goes on after a stop skips the held batches that were used. The step does not give their number:
        # a step of the weights alone uses none, a measurement uses many.
        for rows in held:
            self.held_used += 1
            yield rows

    def _step(self, step: int, rows: SearchBatch, held: Iterator[SearchBatch]) -> None:
        temperature = self.temperature(step)
        if step < self.first:
            loss = self.learner.learn_weights(rows, step, temperature, whole=True)
            self._sums.append((loss, None, None))
            return
        steps, since = self.parts.steps - self.first, step - self.first
        # True for the first step of each of TABLES equal stretches; at since == 0 the right side is negative.
        if since * TABLES // steps > (since - 1) * TABLES // steps:
            self._around(step, held)
        loss = self.learner.learn_weights(rows, step, temperature)
        assert self._costs is not None
        self._sums.append((loss, *self.learner.learn_choices(next(held), self._costs, temperature)))

    def _around(self, step: int, held: Iterator[SearchBatch]) -> None:
        """Tabulate the costs around the most probable choices, and measure the choices that can be measured.

        Measured choices are then as likely as their log loss and their cost say.
        """
        weights = LossWeights(ms=self.settings.cost, bytes=self.settings.memory)
        self._costs = tabulate(self.space.decisions, self.choices.best(), self.space.price, weights, self.before)
        # Nothing has learnt before the first step.
        if step == 0:
            return
        if step == self.first:
            # From here on narrower widths are drawn, which keep the first columns of a table.
            self.learner.sort_columns()
        count, scale = COMPARED, OPEN
        if step == self.parts.steps:
            count, scale = DECIDING, FINAL
        batches = list(islice(held, count)) if self.learner.net.measured else []
        added = self.learner.compare(batches, self.choices.likeliest())
        for decision, costs in zip(self.space.decisions, self._costs.table, strict=True):
            losses = added.get(decision.name)
            if losses is not None:
                self.choices.measured(decision.name, losses + costs[: len(losses)], scale)

    def _point(self, step: int) -> None:
        """Record what was measured since the last point."""
        losses: list[float] = []
        held_losses: list[float] = []
        costs: list[float] = []
        for step_loss, held_loss, step_cost in self._sums:
            losses.append(step_loss)
            # Steps of the weights alone have neither.
            if held_loss is not None:
                held_losses.append(held_loss)
                costs.append(step_cost or 0.0)
        loss = sum(losses) / len(losses)
        held = sum(held_losses) / len(held_losses) if held_losses else None
        cost = sum(costs) / len(costs) if costs else None
        temperature = self.temperature(step - 1)
        self.points.append(SearchPoint(step=step, temperature=temperature, loss=loss, held_loss=held, cost=cost))
        self.over_time.append(self.choices.by_name())
        self._sums = []
        log.info("step %d of %d: log loss %.5f, held rows %s", step, self.parts.steps, loss, held and f"{held:.5f}")

    def _keep(self) -> None:
        """Keep the state in the store, unless that would take too much of the search's time."""
        if self.kept is None or self.done == self.parts.steps or self._keeping > KEEPING * self.seconds:
            return
        began, learner = time.monotonic(), self.learner.state()
        # The sums since the last point are not kept, because the state is kept only at points.
        assert not self._sums
        tensors = dict(learner.tensors)
        if self._costs is not None:
            tensors["costs"] = self._costs.table
        values = {
            "done": self.done,
            "held": self.held_used,
            "seconds": self.seconds,
            "start": self._costs and self._costs.start,
            "points": [asdict(point) for point in self.points],
            "over_time": self.over_time,
            "learner": learner.values,
            "shuffle_key": self.parts.order.key,
        }
        self.kept.write(SearchState(tensors=tensors, values=values))
        self._keeping += time.monotonic() - began

    def _restore(self, state: SearchState) -> None:
        """Continue from ``state``."""
        values = state.values
        self.learner.restore(SearchState(tensors=state.tensors, values=values["learner"]))
        if values["start"] is not None:
            self._costs = Costs(start=values["start"], table=state.tensors["costs"])
        self.points = [SearchPoint(**point) for point in values["points"]]
        self.done, self.held_used, self.over_time = values["done"], values["held"], values["over_time"]
        self._earlier = values["seconds"]
        log.info("the search goes on from step %d of %d", self.done, self.parts.steps)


def _record(space: ArchitectureSpace, course: _Course, dataset: Artifact) -> SearchRecord:
    chosen, last, parts = course.choices.best(), course.choices.by_name(), course.parts
    decisions, undecided = {}, []
    for part, part_decisions in space.parts:
        for decision in part_decisions:
            name = decision.name
            if not decided(last[name]):
                undecided.append(name)
            history = []
            for point in course.over_time:
                history.append(tuple(round(probability, 4) for probability in point[name]))
            decisions[name] = DecisionRecord(
                part=part.name,
                choices=decision.choices,
                chosen=chosen[name],
                probability=round(max(last[name]), 4),
                history=tuple(history),
            )
    return SearchRecord(
        name=str(space.config.search.name),
        dataset=dataset.path,
        seed=space.config.seed,
        steps=parts.steps,
        rows=parts.learnt_rows,
        held_rows=parts.held_rows,
        seconds=round(course.seconds, 3),
        before=space.planned(space.original),
        after=space.planned(chosen),
        decisions=decisions,
        points=tuple(course.points),
        undecided=tuple(undecided),
    )


def decided(probabilities: list[float]) -> bool:
    """Return whether one choice is much more likely than it would be among equal ones."""
    alike = 1 / len(probabilities)
    return (max(probabilities) - alike) / (1 - alike) >= DECIDED


def warning(record: SearchRecord, settings: Any) -> str:
    """Return a warning about a search that decided less than half of its decisions; "" for any other."""
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
