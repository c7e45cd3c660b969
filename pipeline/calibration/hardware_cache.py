"""Figures of this machine for ``hardware=auto``: kept from an earlier plan, or measured now and kept."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline.config import Config
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import NightjarError
from pipeline.core.kernels import missing_libraries
from pipeline.core.machine import cpu_times, gpus, is_busy, is_disturbed, kept_figures, known_figures, processor

log = logging.getLogger(__name__)
# Keys of the machines and settings that this process measured.
_taken_here = set[str]()
PACKAGES = ("torch", "torchrec")
# The compiled kernels of a step on a CPU.
KERNELS = ("linear", "steps")
# The terms of the cost model that figures are fitted to, and how; another number when these change.
TERMS = 3
# An H100's figures (conf/hardware/h100x8.yaml), used where a GPU cannot be measured.
GPU_FIGURES = {
    "hbm_gb_per_s": 2500.0,
    "hbm_to_ddr_gb_per_s": 52.8,
    "intra_host_gb_per_s": 370.0,
    "intra_host_latency_us": 20.0,
    "dense_gflop_per_s": 475_000.0,
    "dense_gb_per_s": 1000.0,
    "lookup_ns": 0.02,
    "update_ns": 0.1,
    "table_overhead_us": 3.0,
    "step_overhead_ms": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class CachedHardware:
    """A measurement: its ``machine``, the ``day`` (ISO), the ``seconds`` that it took, and the figures.

    ``revision``: 0 for the first measurement, which plans do not name. ``measure_again`` derives it from the figures,
    so that it is the same wherever they are kept. ``loaded``: other programs disturbed the measurement, so a later
    process measures once more when they are gone; that measurement has the next revision.
    """

    machine: dict[str, Any]
    day: str
    seconds: float
    figures: dict[str, float]
    revision: int = 0
    loaded: bool = False


def with_figures(config: Config) -> Config:
    """Fill in the figures that ``hardware.measured`` names, rounded to three digits.

    They are measured at most once per machine and settings, and not at all if it names none.
    """
    names = config.hardware.measured
    if not names:
        return config
    cached = find_kept(config)
    if cached is None:
        cached = _measure(config, 0)
    elif _is_due(config, cached):
        cached = _measure(config, cached.revision + 1, cached)
    figures: dict[str, Any] = {name: cached.figures[name] for name in names if name in cached.figures}
    return replace(config, hardware=replace(config.hardware, **figures))


def find_kept(config: Config) -> CachedHardware | None:
    """Return the figures of an earlier measurement on such a machine; None if there are none that can be read."""
    try:
        cached = CachedHardware(**json.loads(known_figures(_key(config)).read_text()))
    except (OSError, ValueError, TypeError, PackageNotFoundError):
        return None
    # A plan needs at least one figure, and every figure must be finite and not negative, every rate positive.
    if not (isinstance(cached.figures, dict) and cached.figures and isinstance(cached.seconds, (int, float))):
        return None
    if not (isinstance(cached.day, str) and isinstance(cached.revision, int)):
        return None
    for name, value in cached.figures.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            return None
        if value == 0 and name.endswith("_per_s"):
            return None
    return cached


def measure_again(config: Config) -> CachedHardware:
    """Measure this machine again for ``hardware=auto``, so that plans that use its figures are made again, too.

    Raises:
        ConfigError, LaunchError: The machine cannot be measured. What was kept stays.
    """
    from pipeline.calibration.quick import quick_figures

    began = cpu_times()
    figures, ended = _round(quick_figures(config)), cpu_times()
    # Derive the revision from the figures. It is above 0, which stands for the first measurement.
    text = json.dumps(figures, sort_keys=True)
    revision = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
    return keep(config, figures, ended.clock - began.clock, revision, loaded=is_disturbed(began, ended))


def calibration_revision(config: Config) -> int:
    """Return the revision of the figures that a plan made now would use; 0 where it uses none that are kept."""
    if not config.hardware.measured:
        return 0
    cached = find_kept(config)
    if cached is None:
        return 0
    # A plan made now would measure again first, so its figures will have the next revision.
    return cached.revision + _is_due(config, cached)


def _is_due(config: Config, cached: CachedHardware) -> bool:
    # Measure again if other programs disturbed the figures and are gone now. The process that took the figures does
    # not: a plan and its key, computed before and after, must use the same revision.
    return cached.loaded and _key(config) not in _taken_here and not _was_busy()


@functools.cache
def _was_busy() -> bool:
    # Cached at the first call, because this process's own stages load the machine later.
    return is_busy()


def _round(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def keep(
    config: Config, figures: dict[str, float], seconds: float, revision: int = 0, *, loaded: bool = False
) -> CachedHardware:
    """Keep ``figures`` for later plans; if the folder cannot be written, only this plan uses them."""
    cached = CachedHardware(
        machine=identity(config),
        day=time.strftime("%Y-%m-%d"),
        seconds=round(seconds, 1),
        figures=_round(figures),
        revision=revision,
        loaded=loaded,
    )
    try:
        path = kept_figures(_key(config))
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(asdict(cached), indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        log.info("calibrate  the figures of this machine are not kept: %s", error)
    return cached


def identity(config: Config) -> dict[str, Any]:
    """Return what the figures depend on: processor or GPU, cores, ranks, threads, precision, kernels and versions."""
    cards, without = list[str](), dict[str, list[str]]()
    if config.hardware.device == "cuda":
        # Names suffice, because a host's cards of one kind are interchangeable.
        cards = sorted({card.name for card in gpus()})
    elif missing := missing_libraries(KERNELS):
        # Left out where all of them are installed, so that figures kept before are still found.
        without["without"] = missing
    return {
        "processor": processor(),
        "gpus": cards,
        "device": config.hardware.device,
        "cpus": available_cpus(),
        "ranks": config.machine_ranks,
        "threads": config.train.threads_per_rank,
        "precision": config.train.precision,
        "terms": TERMS,
        **without,
        **{name: version(name) for name in PACKAGES},
    }


def _key(config: Config) -> str:
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()[:16]


def _measure(config: Config, revision: int, former: CachedHardware | None = None) -> CachedHardware:
    from pipeline.calibration.quick import quick_figures

    began = cpu_times()
    try:
        figures = quick_figures(config)
    except (NightjarError, RuntimeError, OSError) as error:
        if former is not None:
            log.warning("calibrate  this machine cannot be measured again, so plans use what is kept: %s", error)
            return former
        log.warning("calibrate  this machine's speed cannot be measured, so plans assume usual figures: %s", error)
        usual = GPU_FIGURES if config.hardware.device == "cuda" else {}
        return CachedHardware(machine=identity(config), day="", seconds=0.0, figures=usual)
    ended = cpu_times()
    # A second measurement is final even if it was disturbed, because a busy machine may never become idle.
    loaded = former is None and is_disturbed(began, ended)
    cached = keep(config, figures, ended.clock - began.clock, revision, loaded=loaded)
    _taken_here.add(_key(config))
    beside = ""
    if loaded:
        beside = ", beside other programs: it is measured again when they are gone"
    log.info("calibrate  this machine's speed measured once for hardware=auto, in %.1f s%s", cached.seconds, beside)
    return cached
