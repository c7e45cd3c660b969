"""Measures where a step's time goes: every fifth step is split into the phases that plans predict (``PHASES``).

A rank is in one phase at a time, and hooks mark the boundaries, so phases add up to the step without the wait for data.
On a CPU they read the host's clock; on CUDA they record events on the training stream. Work beside the step (the next
batch's exchange, NCCL's reductions) counts only as far as the step waits for it. ``compare_with_plan`` puts the figures
next to the plan's, as ``result.json`` has them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.single_rank_lookup import looked_up
from pipeline.embeddings.tables import sharded_collections
from pipeline.records.plan import PHASES, Plan
from pipeline.training.distributed import add_up, largest
from pipeline.training.memory import MemoryMeter

# Every fifth step is sampled, but not the first steps, which fill the pipeline, allocate and compile.
EVERY, FIRST = 5, 2
# The number of samples kept: those of the last 5,000 steps.
KEPT = 1000
# The name of the wait for data, which is not a phase of the step.
WAITING = "waiting"
T = TypeVar("T")
Mark = tuple[str, Any]


class PhaseClock:
    """Times sampled steps; outside of them ``enter`` does nothing.

    Args:
        device: Where the training runs.
        now: The host's clock in seconds, which times the steps of a CPU.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._cuda = device.type == "cuda"
        self._host_now = now
        self._marks: list[Mark] = []
        self._finished: list[list[Mark]] = []
        self._samples: deque[dict[str, float]] = deque(maxlen=KEPT)
        self._steps = 0
        self.sampling = False

    def begin(self) -> None:
        """Start a step; every fifth is sampled."""
        self.sampling = self._steps >= FIRST and (self._steps - FIRST) % EVERY == 0
        self._steps += 1
        self._marks = []
        self.enter("overhead")

    def enter(self, phase: str) -> None:
        """Start ``phase`` of the step."""
        if not self.sampling:
            return
        if not self._cuda:
            self._marks.append((phase, self._host_now()))
            return
        # The event is read in ``collect``, since waiting for the stream here would change the step that is timed.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def end(self) -> None:
        """End the step."""
        if self.sampling:
            self.enter(WAITING)
            self.sampling = False
            self._finished.append(self._marks)
        if not self._cuda:
            self.collect()

    def collect(self) -> None:
        """Turn the marks of finished steps into samples; on CUDA this waits until the stream has passed them."""
        for marks in self._finished:
            spent = dict.fromkeys(PHASES, 0.0)
            for (phase, start), (_, stop) in pairwise(marks):
                if phase == WAITING:
                    continue
                if self._cuda:
                    stop.synchronize()
                    spent[phase] += float(start.elapsed_time(stop))
                else:
                    spent[phase] += 1000.0 * (stop - start)
            self._samples.append(spent)
        self._finished = []

    def figures(self) -> dict[str, float]:
        """Return each phase's mean ms on this rank over the middle half of the samples; empty if no step was sampled.

        Samples are ranked by their sums: slow and quick ones do not count, and phases still add up to a step.
        """
        self.collect()
        ordered = sorted(self._samples, key=lambda sample: sum(sample.values()))
        quarter = len(ordered) // 4
        middle = ordered[quarter : len(ordered) - quarter]
        if not middle:
            return {}
        return {phase: statistics.fmean(sample[phase] for sample in middle) for phase in PHASES}

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Run the body in ``phase``, then continue the previous phase."""
        # The pipeline exchanges the next batch's ids in the middle of another phase, which then continues.
        before = ""
        if self.sampling:
            before = self._marks[-1][0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def between(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield ``batches``, counting the wait for them in no phase."""
        while True:
            # Use a default, because a StopIteration within a generator becomes a RuntimeError (PEP 479).
            with self.within(WAITING):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def watch(clock: PhaseClock, dmp: DistributedModelParallel, pooled: torch.nn.Module, optimizers: Any) -> None:
    """Add the hooks that call ``clock.enter`` where the model enters a phase; README.md here defines the phases.

    ``pooled`` is the module that first uses the collection's output.
    """

    def after_lookup(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        clock.enter("output_exchange")
        # In the backward pass, the lookup's node runs when its gradient has arrived, and applies it to the tables.
        if clock.sampling and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda *_: clock.enter("update"))
            output.grad_fn.register_hook(lambda *_: clock.enter("gradient_exchange"))

    def after_pooling(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        clock.enter("dense")
        if clock.sampling and output.requires_grad:
            output.register_hook(lambda _gradient: clock.enter("gradient_exchange"))

    for collection in sharded_collections(dmp).values():
        collection.register_forward_pre_hook(lambda *_: clock.enter("input_exchange"))
        collection.register_forward_hook(lambda *_: clock.enter("output_exchange"))
    for kernel in looked_up(dmp):
        kernel.register_forward_pre_hook(lambda *_: clock.enter("lookup"), prepend=True)
        kernel.register_forward_hook(after_lookup)
    pooled.register_forward_hook(after_pooling)
    for optimizer, phase in ((optimizers.dense, "dense"), (optimizers.replicas, "update")):
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_, phase=phase: clock.enter(phase))
            optimizer.register_step_post_hook(lambda *_: clock.enter("overhead"))


def watch_pipeline(clock: PhaseClock, pipeline: Any) -> None:
    """Count the pipeline's own parts of the next batch's input exchange, where it has such parts."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with clock.within("input_exchange"):
                return function(*args, **kwargs)

        return call

    for name in ("start_sparse_data_dist", "wait_sparse_data_dist"):
        if hasattr(pipeline, name):
            setattr(pipeline, name, counted(getattr(pipeline, name)))


def compare_with_plan(plan: Plan, clock: PhaseClock, memory: MemoryMeter, device: torch.device) -> dict[str, Any]:
    """Compare the figures of all ranks with the plan; collective. A plan without phases gives only measured figures.

    ``phases``: ms, the mean over the ranks; the time that a rank waits for another is in the exchanges. ``step``: ms of
    the slowest rank, without the wait for data. ``memory``: bytes of the fullest rank, in HBM on CUDA, else in DDR.
    """
    measured = clock.figures()
    spent = torch.tensor([measured.get(phase, 0.0) for phase in PHASES], dtype=torch.float64, device=device)
    most = torch.stack([spent.sum(), torch.tensor(float(memory.peak()), dtype=torch.float64, device=device)])
    step, peak = largest(most).tolist()
    means = (add_up(spent) / dist.get_world_size()).tolist()
    figures: dict[str, Any] = {"memory": _comparison("bytes", predicted_bytes(plan), int(peak))}
    if not measured:
        return figures
    figures["phases"] = {}
    for phase, ms in zip(PHASES, means, strict=True):
        predicted = None
        if plan.phases:
            predicted = sum(rank.get(phase, 0.0) for rank in plan.phases) / len(plan.phases)
        figures["phases"][phase] = _comparison("ms", predicted, ms)
    # A plan without phases predicts only the step of the embedding part, which was not measured.
    predicted_step = None
    if plan.phases:
        predicted_step = plan.predicted_step_ms
    figures["step"] = _comparison("ms", predicted_step, step)
    return figures


def predicted_bytes(plan: Plan) -> int | None:
    """Return the bytes of the fullest rank in device memory: tables and reservations; None where unknown."""
    return max(plan.resident_bytes() or [0]) or None


def _comparison(unit: str, predicted: float | None, measured: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    if predicted is not None:
        figures[f"predicted_{unit}"] = predicted
    figures[f"measured_{unit}"] = measured
    return figures
