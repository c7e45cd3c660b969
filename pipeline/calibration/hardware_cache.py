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
from pipeline.core.machine import cpu_times, gpus, is_busy, is_disturbed, kept_figures, known_figures, processor

log = logging.getLogger(__name__)
# Keys of the machines and settings that this process measured.
_taken_here = set[str]()
PACKAGES = ("torch", "torchrec")
# The terms of the cost model that figures were fitted to; another number where these change.
TERMS = 2
# Where a GPU cannot be measured: an H100's (conf/hardware/h100x8.yaml).
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
    """What is kept: the ``machine`` that was measured, the ``day`` (ISO), the ``seconds`` it took, and the figures.

    ``revision``: 0 for the first measurement, which plans do not name; of one by order a mark of its figures, the same
    wherever they are kept. ``loaded``: other programs were at work meanwhile, so a later process measures again, once,
    when they are not; that measurement has the next revision.
    """

    machine: dict[str, Any]
    day: str
    seconds: float
    figures: dict[str, float]
    revision: int = 0
    loaded: bool = False


def with_figures(config: Config) -> Config:
    """Fill in the figures that ``hardware.measured`` names, rounded to three digits.

    They are measured at most once for machine and settings, and not at all where none is named.
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
    """The figures of an earlier measurement on such a machine; None where there is none that can be read."""
    try:
        cached = CachedHardware(**json.loads(known_figures(_key(config)).read_text()))
    except (OSError, ValueError, TypeError, PackageNotFoundError):
        return None
    # Plans can use some figures, all of them numbers that the hardware may have.
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
    """Measure this machine anew for ``hardware=auto``; the plans that use its figures are made anew, too.

    Raises:
        ConfigError, LaunchError: The machine cannot be measured. What was kept stays.
    """
    from pipeline.calibration.quick import quick_figures

    began = cpu_times()
    figures, ended = _round(quick_figures(config)), cpu_times()
    # A number above 0 that stands for these figures.
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
    # This machine is measured again where other programs disturbed the figures, and are gone. Not by the process that
    # took them: a plan and its key, made before and after, must have the same answer.
    return cached.loaded and _key(config) not in _taken_here and not _was_busy()


@functools.cache
def _was_busy() -> bool:
    # As this process asked first: later, its own stages load the machine.
    return is_busy()


def _round(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def keep(
    config: Config, figures: dict[str, float], seconds: float, revision: int = 0, *, loaded: bool = False
) -> CachedHardware:
    """Keep ``figures`` for later plans; where the folder cannot be written, they serve this one only."""
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
    """What the figures depend on: processor or GPU, cores, ranks, threads, precision and versions."""
    cards = []
    if config.hardware.device == "cuda":
        # By name only: a host's cards of one kind are interchangeable.
        cards = sorted({card.name for card in gpus()})
    return {
        "processor": processor(),
        "gpus": cards,
        "device": config.hardware.device,
        "cpus": available_cpus(),
        "ranks": config.machine_ranks,
        "threads": config.train.threads_per_rank,
        "precision": config.train.precision,
        "terms": TERMS,
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
    # Whoever waits for an idle machine may wait for ever: the second measurement stays, and plans with it.
    loaded = former is None and is_disturbed(began, ended)
    cached = keep(config, figures, ended.clock - began.clock, revision, loaded=loaded)
    _taken_here.add(_key(config))
    beside = ""
    if loaded:
        beside = ", beside other programs: it is measured again when they are gone"
    log.info("calibrate  this machine's speed measured once for hardware=auto, in %.1f s%s", cached.seconds, beside)
    return cached
