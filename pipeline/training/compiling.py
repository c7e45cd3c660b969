"""``train.compile=auto``: whether torch.compile pays on this machine for this model and the steps that are left.

A compilation takes up to half a minute, and what it saves depends on CPU or GPU, model and batch. So a training that
is long enough times the dense part both ways, beside its steps: nothing that is trained depends on the trial. The times
lie in the store, so that the next training on such a machine has its answer before its first step.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.config.fields import AUTO
from pipeline.core.errors import NightjarError
from pipeline.core.machine import processor
from pipeline.models.layers.perceptron import batch_norms
from pipeline.store.artifacts import Store
from pipeline.store.manifest import artifact_key
from pipeline.training.accumulation import split_rows
from pipeline.training.callbacks import Callback
from pipeline.training.distributed import largest
from pipeline.training.model import DensePart
from pipeline.training.settings import ModelSettings
from pipeline.training.step import StepExecutor

# A trial needs this many seconds of steps left: it takes up to half a minute, which is lost if compiling does not pay.
SHORTEST = 600.0
# The time of a step is measured over steps 10 to 20 of the run.
FIRST, TIMED = 10, 10
# The passes are timed this many times each way, alternating.
ROUNDS = 8
# Compiling must save at least this many times its own time by the end of training.
MARGIN = 2.0
# A compiled dense part stays compiled if its passes take at most this share of their former time.
WORTH = 0.98
BACKEND = "inductor"
FAILED = "it cannot be compiled here, as the log of a rank says"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Milliseconds of the dense part's forward and backward pass both ways, and the seconds of compiling it."""

    eager_ms: float
    compiled_ms: float
    seconds: float

    def pays(self, steps: int) -> bool:
        """Whether compiling saves enough time within ``steps``."""
        return (self.eager_ms - self.compiled_ms) / 1000 * steps > MARGIN * self.seconds


class AutoCompile(Callback):
    """Decides once per training, and alike on all ranks, whether its dense part is compiled.

    ``compiled`` is the decision, which checkpoints keep; None: there is none yet, or ``train.compile`` is not auto.
    ``batch`` is the number of samples of a step on this rank. The times are kept in ``store``.
    """

    def __init__(self, executor: StepExecutor, settings: ModelSettings, store: Store, batch: int) -> None:
        self._executor, self._settings, self._store, self._batch = executor, settings, store, batch
        self._part = executor.dense_part
        # A rank whose layers look at the batches of all ranks would wait for a rank whose compilation failed.
        meeting = dist.get_world_size() > 1 and bool(batch_norms(self._part.ranking))
        train = settings.train
        # With embedding hosts, the ranks without samples have nothing to time.
        meeting = meeting or self._part.workers is not None
        self._open = train.compile == AUTO and not train.cuda_graphs and not meeting and executor.can_recompile
        self.compiled: bool | None = None
        self._total, self._first, self._began = 0, 0, 0.0

    def on_start(self, total: int) -> None:
        """Take the decision from the checkpoint, or from the times of an earlier training. Collective."""
        self._total, self._first = total, self._executor.steps
        left = total - self._first
        if not self._open or left <= 0:
            # A training that has ended compiles nothing.
            return
        if self.compiled is not None:
            self._decide(self.compiled, "as before this training was resumed")
        elif (known := self._known()) is not None:
            self._decide(known.pays(left), _timing_message(known, left))

    def on_step_end(self) -> None:
        """Time some of the first steps, then try compiling where enough steps are left. Collective."""
        taken = self._executor.steps - self._first
        if not self._open or taken not in (FIRST, FIRST + TIMED):
            return
        wait(self._executor.device)
        now = time.perf_counter()
        if taken == FIRST:
            self._began = now
            return
        left = self._total - self._executor.steps
        seconds = largest(torch.tensor([(now - self._began) / TIMED * left], dtype=torch.float64)).item()
        if seconds < SHORTEST:
            self._open = False
            log.debug("torch.compile is not tried: %.0f s of training are left", seconds)
            return
        # The slowest rank's times count, and one rank that cannot compile decides for all.
        timed, times = trial(self._part, self._batch), [1.0, 0.0, 0.0, 0.0]
        if timed is not None:
            times = [0.0, *asdict(timed).values()]
        failed, eager, compiled, seconds = largest(torch.tensor(times, dtype=torch.float64)).tolist()
        if failed:
            self._decide(False, FAILED)
            return
        timed = Timed(eager_ms=eager, compiled_ms=compiled, seconds=seconds)
        if dist.get_rank() == 0:
            try:
                self._store.write_json(self._path(), {**self._machine(), "times": asdict(timed)})
            except (NightjarError, OSError) as error:
                log.info("the times of torch.compile are not kept: %s", error)
        # Compiling has been paid for by now, so only the passes' own times are compared, unlike in ``Timed.pays``.
        self._decide(timed.compiled_ms <= WORTH * timed.eager_ms, _timing_message(timed, left))

    def _decide(self, compiled: bool, why: str) -> None:
        if compiled:
            # Compile now and not within a step, because it may fail.
            works = warm(self._part, self._batch) is not None
            if largest(torch.tensor([float(not works)])).item():
                compiled, why = False, FAILED
        use(self._part, compiled)
        self.compiled, self._open = compiled, False
        if dist.get_rank() == 0:
            log.info("train.compile=auto: the dense part is %scompiled; %s", "" if compiled else "not ", why)

    def _path(self) -> str:
        inputs = self._part.inputs
        assert inputs is not None
        made = {"batch": self._batch, "vectors": len(inputs.vectors), "dim": inputs.dim, "dense": len(inputs.dense)}
        # The key is left out where it is 1, so that times kept before ``train.accumulate`` existed are still found.
        if self._part.parts > 1:
            made["parts"] = self._part.parts
        model = {"model": asdict(self._settings.model), "dtype": str(self._part.dtype)}
        return f"compile/{artifact_key('compile', {**self._machine(), **made, **model}, {})}.json"

    def _machine(self) -> dict[str, Any]:
        return {
            "device": device_name(self._executor.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }

    def _known(self) -> Timed | None:
        # Read the times of an earlier training on rank 0 and share them.
        record = None
        if dist.get_rank() == 0:
            # Times that are missing or unusable are measured again.
            with suppress(NightjarError, OSError, KeyError, TypeError, ValueError, AttributeError):
                times: dict[str, Any] = self._store.read_json(self._path())["times"]
                record = asdict(Timed(**{name: float(value) for name, value in times.items()}))
        record = all_gather_records(record)[0]
        return Timed(**record) if record else None


def use(part: DensePart, compiled: bool) -> None:
    """Run the ranking model of ``part`` compiled from now on, or not."""
    ranking = part.ranking
    if not compiled:
        ranking._compiled_call_impl = None
    elif ranking._compiled_call_impl is None:
        ranking.compile(dynamic=False, backend=BACKEND)


def warm(part: DensePart, batch: int) -> float | None:
    """Compile ``part`` for ``batch`` samples and return the seconds it takes; None where it fails, which is logged."""
    use(part, True)
    try:
        began = time.perf_counter()
        with _undisturbed(part):
            _passes(part, batch)
        return time.perf_counter() - began
    except Exception as error:
        # Catch everything: compilers raise errors of their own.
        log.warning("torch.compile failed: %s: %s", type(error).__name__, " ".join(str(error).split("\n")[:2]))
        return None


def trial(part: DensePart, batch: int) -> Timed | None:
    """Time ``part`` both ways on ``batch`` samples of random numbers; None where it cannot be compiled.

    It stays compiled; ``use`` decides. Nothing that is trained changes, and no random number of the training is drawn.
    """
    seconds = warm(part, batch)
    if seconds is None:
        return None
    ways = {False: None, True: part.ranking._compiled_call_impl}
    times: dict[bool, list[float]] = {False: [], True: []}
    with _undisturbed(part):
        for compiled in [False, True] * (ROUNDS + 1):
            part.ranking._compiled_call_impl = ways[compiled]
            times[compiled].append(_passes(part, batch))
    eager_ms, compiled_ms = (1000 * statistics.median(times[way][1:]) for way in (False, True))
    return Timed(eager_ms=eager_ms, compiled_ms=compiled_ms, seconds=seconds)


@contextmanager
def _undisturbed(part: DensePart) -> Iterator[None]:
    # Passes inside change neither the random state nor the statistics that layers keep of batches.
    kept, devices = list(part.ranking.buffers()), set[torch.device]()
    for parameter in part.ranking.parameters():
        if not parameter.requires_grad:
            kept.append(parameter)
        if parameter.device.type == "cuda":
            devices.add(parameter.device)
    before = [each.detach().clone() for each in kept]
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        with torch.no_grad():
            for each, value in zip(kept, before, strict=True):
                each.copy_(value)


def _passes(part: DensePart, batch: int) -> float:
    # Return the seconds of a step's forward and backward passes. Gradients are not kept, and no parameter hook runs.
    inputs = part.inputs
    assert inputs is not None
    learning = [each for each in part.ranking.parameters() if each.requires_grad]
    device = learning[0].device
    dense = torch.randn(batch, len(inputs.dense), device=device)
    embeddings = torch.randn(batch, len(inputs.vectors), inputs.dim, device=device)
    wait(device)
    began = time.perf_counter()
    for rows in split_rows(batch, part.parts):
        taken = embeddings[rows].detach().requires_grad_()
        logits = part.rank(dense[rows], taken, torch.ones(len(taken), dtype=torch.bool, device=device))
        torch.autograd.grad(logits.float().sum(), [taken, *learning], allow_unused=True)
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing_message(timed: Timed, steps: int) -> str:
    return (
        f"a step's passes take {timed.compiled_ms:.2f} ms compiled and {timed.eager_ms:.2f} ms as they are, compiling "
        f"{timed.seconds:.0f} s, and {steps:,} steps are left"
    )


def device_name(device: torch.device) -> str:
    """Return the model of the GPU or the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
