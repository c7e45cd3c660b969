"""``hardware=auto``: what a configuration leaves to the machine that it is composed on, as numbers."""

from __future__ import annotations

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
from pipeline.core.machine import Gpu, gpus, pinned_figures, usable_memory
from pipeline.core.units import GIB

AUTO, ELSEWHERE = "auto", "laptop"  # the defaults of the settings are the laptop's
# Sizes of memory between two powers of two: machines of one kind differ by a little, and keys depend on it.
_STEPS = 16


def with_machine(config: Config) -> Config:
    """``config`` with the device, the ranks and the memory of this machine where its hardware leaves them open.

    Speeds left open get their defaults and are listed in ``hardware.measured``: plans measure them, and no key depends
    on them. On a cluster, where pods are other machines, it is the laptop's. A pinned file (``machine.pinned_figures``)
    has it all, the name too; ConfigError where it does not fit.
    """
    hardware = config.hardware
    if not _left_open(hardware):
        return config
    if config.launch.name != "local":
        return replace(config, hardware=_completed(hardware, {**_defaults(), "name": ELSEWHERE}))
    if pinned := _pinned():
        return replace(config, hardware=_completed(hardware, pinned))
    cards = gpus() if hardware.device != "cpu" else ()
    ranks: dict[str, Any] = {"device": "cuda" if cards else "cpu", "ranks_per_host": len(cards) or 1}
    hardware = replace(hardware, **{name: ranks[name] for name in ranks if name in _left_open(hardware)})
    sizes = _memory(replace(config, hardware=hardware), cards)
    measured = [name for name in _left_open(hardware) if name not in sizes]
    figures = {**_defaults(), **sizes, "name": hardware.name, "measured": measured}
    return replace(config, hardware=_completed(hardware, figures))


def _completed(hardware: HardwareConfig, figures: Mapping[str, Any]) -> HardwareConfig:
    # ``hardware`` with its name, the list of what is measured, and what it leaves open from ``figures``.
    return replace(hardware, **{name: figures[name] for name in ("name", "measured", *_left_open(hardware))})


def _defaults() -> dict[str, Any]:
    return {field.name: default_of(field) for field in fields(HardwareConfig)}


def _left_open(hardware: HardwareConfig) -> list[str]:
    # The settings that say auto, no ranks or ``.nan``.
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
    # The settings of the pinned file; {} where there is none.
    path = pinned_figures()
    try:
        if not path.is_file():
            return {}
    except PermissionError:  # another's home: this user has no such file
        return {}
    try:
        pinned: Any = OmegaConf.to_object(OmegaConf.merge(HardwareConfig, OmegaConf.load(path)))
        if left := _left_open(pinned):
            raise ValueError(f"{left[0]} is left open, but this file is what auto stands for")
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:  # ValueError: bytes that are no text too
        raise ConfigError(
            f"{path}, which hardware=auto stands for, does not fit: {str(error).splitlines()[0]}",
            hint="remove it, and nightjar calibrate --pin writes it anew; or hardware=laptop",
        ) from None
    return dict(vars(pinned))


def _memory(config: Config, cards: tuple[Gpu, ...]) -> dict[str, float]:
    # GiB of a rank, of those that share this machine.
    hbm = min((card.memory for card in cards), default=0) / GIB
    return {"hbm_gib": _rounded(hbm), "ddr_gib": _rounded(usable_memory() / config.machine_ranks / GIB)}


def _rounded(gib: float) -> float:
    # Down, to one of ``_STEPS`` sizes between two powers of two.
    if gib <= 0:
        return 0.0
    step = 2.0 ** math.floor(math.log2(gib)) / _STEPS
    return math.floor(gib / step) * step
