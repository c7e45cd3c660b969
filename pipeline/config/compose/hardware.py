"""``hardware=auto``: what a configuration leaves to the machine that it is composed on, as numbers."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline.config import Config
from pipeline.config.fields import default_of
from pipeline.config.hardware import HardwareConfig
from pipeline.core.errors import ConfigError
from pipeline.core.machine import gpus, pinned_figures, usable_memory
from pipeline.core.units import GIB

AUTO = "auto"
# The hardware whose figures are the defaults of the settings.
ELSEWHERE = "laptop"
# The number of memory sizes between two powers of two. Machines of one kind differ slightly, and keys depend on the
# size.
_STEPS = 16


def with_machine(config: Config) -> Config:
    """Return ``config`` with this machine's device, ranks and memory where its hardware leaves them open.

    Speeds left open get their defaults and are listed in ``hardware.measured``: plans measure them, and no key depends
    on them. On a cluster, where pods are other machines, it is the laptop's. A pinned file (``machine.pinned_figures``)
    has it all, the name too; ConfigError if it does not fit.
    """
    hardware = config.hardware
    if not _left_open(hardware):
        return config
    figures: dict[str, Any] = {field.name: default_of(field) for field in fields(HardwareConfig)}
    if config.launch.name != "local":
        return _completed(config, {**figures, "name": ELSEWHERE})
    if pinned := _pinned():
        return _completed(config, pinned)
    cards = gpus() if hardware.device != "cpu" else ()
    left_open = _left_open(hardware)
    if "device" in left_open:
        hardware = replace(hardware, device="cuda" if cards else "cpu")
    if "ranks_per_host" in left_open:
        hardware = replace(hardware, ranks_per_host=len(cards) or 1)
    # Set the memory after the number of ranks, which share it.
    config = replace(config, hardware=hardware)
    hbm = min((card.memory for card in cards), default=0) / GIB
    figures["hbm_gib"] = _rounded(hbm)
    # No ranks, as with hardware.hosts=0, are refused later.
    figures["ddr_gib"] = _rounded(usable_memory() / max(config.machine_ranks, 1) / GIB)
    figures["name"] = hardware.name
    figures["measured"] = [name for name in _left_open(hardware) if name not in ("hbm_gib", "ddr_gib")]
    return _completed(config, figures)


def _completed(config: Config, figures: Mapping[str, Any]) -> Config:
    # Fill in the hardware's name, the list of measured settings, and all open settings from ``figures``.
    names = ("name", "measured", *_left_open(config.hardware))
    return replace(config, hardware=replace(config.hardware, **{name: figures[name] for name in names}))


def _left_open(hardware: HardwareConfig) -> list[str]:
    # List the settings that are left open: device auto, 0 ranks, or ``.nan``.
    names = []
    for name, value in vars(hardware).items():
        if isinstance(value, float):
            is_open = math.isnan(value)
        else:
            is_open = (name, value) in (("device", AUTO), ("ranks_per_host", 0))
        if is_open:
            names.append(name)
    return names


def _pinned() -> dict[str, Any]:
    # Return the settings of the pinned file, or {} if there is none.
    path = pinned_figures()
    try:
        if not path.is_file():
            return {}
    except PermissionError:
        # The home belongs to another user, so this user has no such file.
        return {}
    try:
        figures = _read_pinned(path.read_text("utf-8"))
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        # ValueError is also raised for bytes that are not text.
        raise ConfigError(
            f"{path}, which hardware=auto stands for, does not fit: {str(error).splitlines()[0]}",
            hint="remove it, and nightjar calibrate --pin writes it anew; or hardware=laptop",
        ) from None
    return copy.deepcopy(dict(figures))


# Cached, because a command may compose many configurations, and OmegaConf takes 20 ms for the file.
@functools.lru_cache(maxsize=4)
def _read_pinned(text: str) -> Mapping[str, Any]:
    pinned: Any = OmegaConf.to_object(OmegaConf.merge(HardwareConfig, OmegaConf.load(io.StringIO(text))))
    if left := _left_open(pinned):
        raise ValueError(f"{left[0]} is left open, but this file is what auto stands for")
    return vars(pinned)


def _rounded(gib: float) -> float:
    # Round down to one of ``_STEPS`` sizes between two powers of two: a plan must not count on memory that does not
    # exist.
    if gib <= 0:
        return 0.0
    step = 2.0 ** math.floor(math.log2(gib)) / _STEPS
    return math.floor(gib / step) * step
