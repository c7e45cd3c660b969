"""Profiles steps (``train.profile``, ``debug.*``), and measures the rate that their matrix products reach alone."""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.model import ModelConfig
from pipeline.config.train import DebugConfig
from pipeline.core.errors import GuardError
from pipeline.models.build import build_model
from pipeline.specs.model import ModelInputs
from pipeline.store.artifacts import Store
from pipeline.training.accumulation import split_rows
from pipeline.training.callbacks import Callback, IntervalRecord
from pipeline.training.linear import product

log = logging.getLogger(__name__)
# The steps before the profile, and the steps in it where ``debug.profile_steps`` is 0.
WARM_UP_STEPS, STEPS = 3, 10
# Keywords for each kind of operation: the first kind with a keyword in the operation's name counts.
KINDS = (
    ("table updates", ("fbgemm::split_embedding_backward", "embedding_backward", "_JoinedBackward", "_LookUpBackward")),
    ("bounds checks", ("bounds_check",)),
    ("lookups", ("fbgemm::", "embedding_bag", "nightjar::lookups", "_LookUp")),
    ("interaction", ("Interaction",)),
    ("exchange", ("gloo:", "nccl:", "c10d::")),
    # The compiled kernels also compute bias, ReLU and their gradients.
    (
        "matrix products",
        ("::mm", "::addmm", "::bmm", "::baddbmm", "_linear_pointwise", "_CompiledLinear", "_Head", "gemm", "cutlass"),
    ),
    ("dense optimizer", ("Optimizer.", "adam", "adagrad", "_foreach_")),
    ("copies", ("copy", "::cat", "gather", "index_select", "::fill_", "::zero_", "clone", "Memcpy", "Memset")),
    ("reductions", ("::sum", "::mean", "::any", "::all")),
    (
        "activations and other element-wise work",
        ("_Linear", "threshold", "clamp", "relu", "sigmoid", "::add", "::mul", "::sub"),
    ),
)
OTHER = "other operations"
# The time of Python, of waiting, and of threads other than the training thread.
OUTSIDE = "outside of operations"


@dataclass(frozen=True)
class StepProfile:
    """Ms per step by kind of work on the training thread (on CUDA: on the device), for ``steps`` steps of a rank."""

    steps: int
    step_ms: float
    threads: int
    kinds: dict[str, float]
    ceiling_ms: float

    def table(self) -> str:
        """Format a line for each kind, the largest first."""
        lines = [f"a step of {self.step_ms:.2f} ms on {self.threads} threads, mean of {self.steps}:"]
        for kind, ms in sorted(self.kinds.items(), key=lambda item: -item[1]):
            lines.append(f"  {ms:8.2f} ms {ms / self.step_ms:6.1%}  {kind}")
        alone = self.ceiling_ms
        lines.append(f"  {alone:8.2f} ms {alone / self.step_ms:6.1%}  the matrix products alone: the ceiling")
        return "\n".join(lines)


class Profiler(Callback):
    """Profiles ``steps`` of a run, fewer where it ends before. ``name``: the path of its files in the store, with * for
    ``trace`` or ``profile``.

    With ``speed``, a table by kinds of work is written beside the trace; None: only the trace is written.
    """

    def __init__(self, store: Store, name: str, steps: int, speed: Speed | None) -> None:
        self._store, self._name, self._steps, self._speed = store, name, steps, speed
        self._taken = 0
        self._cuda = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._began = self._seconds = 0.0

    def __enter__(self) -> Profiler:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        profiled = self._taken - WARM_UP_STEPS
        if profiled < self._steps:
            # The training was too short, so profile the steps that it had.
            self._seconds, self._steps = time.perf_counter() - self._began, max(profiled, 0)
        if not self._steps and error[0] is None:
            took = f"this session took {self._taken}, expected more than {WARM_UP_STEPS}"
            log.warning("no steps were profiled: %s; train.global_batch may be smaller", took)
        # Exit last, because the exit may write the profile, which needs the figures above.
        self._profile.__exit__(*error)

    def on_step_end(self) -> None:
        """Count the step and close the warm-up or the profile after its last one."""
        self._taken += 1
        if self._taken == WARM_UP_STEPS:
            self._profile.step()
            self._began = time.perf_counter()
            return
        if self._taken == WARM_UP_STEPS + self._steps:
            self._seconds = time.perf_counter() - self._began
        self._profile.step()

    def _write(self, profiler: profile) -> None:
        if not self._steps:
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            self._store.write_bytes(f"{self._name.replace('*', 'trace')}.json", file.read_bytes())
        if self._speed is None:
            return
        spent = {kind: 0.0 for kind, _ in KINDS} | {OTHER: 0.0}
        for event in profiler.key_averages():
            # The event of the step itself covers Python between operations.
            if event.key.startswith("ProfilerStep"):
                continue
            micros = event.self_device_time_total if self._cuda else event.self_cpu_time_total
            spent[kind_of(event.key)] += micros / 1000 / self._steps
        step_ms = 1000 * self._seconds / self._steps
        spent[OUTSIDE] = max(0.0, step_ms - sum(spent.values()))
        # Keep the kinds that show up as 0.01 ms or more in the table.
        shown = {kind: ms for kind, ms in spent.items() if ms >= 0.005}
        ceiling_ms = 1000 * self._speed.least_seconds
        profiled = StepProfile(self._steps, step_ms, torch.get_num_threads(), shown, ceiling_ms)
        self._store.write_bytes(f"{self._name.replace('*', 'profile')}.txt", f"{profiled.table()}\n".encode())
        log.info("%s", profiled.table())


def kind_of(operation: str) -> str:
    """Return the kind of work that an operation of a trace does."""
    for kind, words in KINDS:
        if any(word in operation for word in words):
            return kind
    return OTHER


class SpeedMeter(Callback):
    """Compares the time of steps with ``speed``, the time of their matrix products alone."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add the rate of the products and its ceiling."""
        interval.figures |= self._speed.figures(interval.seconds / interval.steps)


@contextmanager
def debugging(config: DebugConfig, profiler: Profiler | None) -> Iterator[None]:
    """Profile the steps taken inside; with ``anomaly``, detect gradients that are not finite.

    Raises:
        GuardError: A gradient is not finite; the error names its operation.
    """
    try:
        with torch.autograd.set_detect_anomaly(config.anomaly), profiler or nullcontext():
            yield
    except RuntimeError as error:
        if config.anomaly and "returned nan values" in str(error):
            raise GuardError(
                f"debug.anomaly: {error}",
                hint="the log has the forward call that made it; debug.anomaly=false to continue",
            ) from error
        raise


# Each product runs for this many seconds and at least this many times; the best run counts, so other work does not.
SECONDS, FEWEST = 0.03, 3


@dataclass(frozen=True)
class Product:
    """[batch, rows, inner] @ [batch, inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flop(self) -> int:
        """Return the number of multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def step_products(config: ModelConfig, inputs: ModelInputs, samples: int) -> Counter[Product]:
    """Count each product in a forward and backward pass over ``samples`` samples, without computing anything."""
    # On the meta device only shapes flow through the model: no kernel runs, and nothing takes memory.
    module = build_model(config, inputs).to("meta")
    dense = torch.zeros(samples, len(inputs.dense), device="meta")
    embeddings = torch.zeros(samples, len(inputs.vectors), inputs.dim, device="meta", requires_grad=True)
    with _Recorder() as recorder:
        module(dense, embeddings).sum().backward()
    return recorder.products


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(func.overloadpacket.__name__)
        if at is not None:
            a, b = args[at], args[at + 1]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.products[Product(batch, a.shape[-2], a.shape[-1], b.shape[-1])] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Speed:
    """``flop`` of the products of a step on one rank, and the least seconds that they take one after the other."""

    flop: int
    least_seconds: float

    @classmethod
    def measure(
        cls,
        config: ModelConfig,
        inputs: ModelInputs,
        samples: int,
        dtype: torch.dtype | None,
        device: torch.device,
        parts: int = 1,
    ) -> Speed:
        """Time the products in ``dtype`` (None: float32), each by its fastest kernel; takes about a second.

        ``parts``: the number of parts that the samples are processed in (``train.accumulate``).
        """
        products = Counter[Product]()
        for rows in split_rows(samples, parts):
            products += step_products(config, inputs, rows.stop - rows.start)
        flop, seconds = 0, 0.0
        for each, count in products.items():
            flop += count * each.flop
            seconds += count * _best_seconds(each, dtype or torch.float32, device)
        return cls(flop, max(seconds, 1e-9))

    def figures(self, step_seconds: float) -> dict[str, float]:
        """Return ``gflop_per_s`` of steps of ``step_seconds``, and ``ceiling_share`` of the products' own rate."""
        return {"gflop_per_s": self.flop / step_seconds / 1e9, "ceiling_share": self.least_seconds / step_seconds}


@torch.no_grad()
def _best_seconds(each: Product, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(each.batch, each.rows, each.inner, device=device).to(dtype)
    b = torch.randn(each.batch, each.inner, each.columns, device=device).to(dtype)
    ways: list[Callable[[], Tensor]] = [lambda: torch.bmm(a, b)]
    if each.batch == 1:
        x, w = a[0], b[0]
        ways = [lambda: x.mm(w)]
        # MKL and oneDNN are each fastest on different CPUs, so the faster one sets the ceiling.
        if device.type == "cpu":
            ways.append(lambda: product(x, w.t(), None))
    best = float("inf")
    for way in ways:
        _timed(way, device)
        began, runs = time.perf_counter(), 0
        while runs < FEWEST or time.perf_counter() - began < SECONDS:
            best, runs = min(best, _timed(way, device)), runs + 1
    return best


def _timed(way: Callable[[], Tensor], device: torch.device) -> float:
    began = time.perf_counter()
    result = way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del result
    return time.perf_counter() - began
