"""``nightjar calibrate``: its arguments, where the file goes, and how a run picks it up."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.cli.commands.command import Command, add_config_dir, show
from pipeline.config import Config
from pipeline.config.hardware import HardwareConfig
from pipeline.core.errors import ConfigError
from pipeline.core.logs import add_level
from pipeline.core.machine import kept_figures, pinned_figures

EPILOG = """\
  nightjar calibrate                                  this machine; writes conf_here/hardware/measured_auto.yaml
  nightjar calibrate --pin                            this machine, from now on by hardware=auto
  nightjar calibrate --again                          what hardware=auto measured, anew, in a few seconds
  nightjar calibrate hardware=laptop2 -o my_conf      two ranks; writes my_conf/hardware/measured_laptop2.yaml
  nightjar run -cd my_conf hardware=measured_laptop2  uses the measured figures
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    out = "configuration directory, or <directory>/hardware/<name>.yaml (default: conf_here)"
    parser.add_argument("-o", "--out", default="conf_here", metavar="DIR|FILE", help=out)
    parser.add_argument("--ssd", metavar="DIR", help="a directory on the disk to measure (default: the store's)")
    pin = "write the file that hardware=auto stands for on this machine from now on, in place of what plans measure"
    again = "measure anew what hardware=auto uses, in a few seconds; later runs plan with it"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pin", action="store_true", help=pin)
    which.add_argument("--again", action="store_true", help=again)
    add_config_dir(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, progress on standard error")
    add_level(parser)
    parser.set_defaults(function=_calibrate)


def target_of(out: str, preset: str) -> Path:
    """Return where the measured file of ``preset`` goes; ConfigError for a file that Hydra would not find.

    Hydra finds ``<directory>/hardware/<name>.yaml`` as ``hardware=<name>``.
    """
    path = Path(out)
    if path.suffix not in (".yaml", ".yml"):
        name = preset if preset.startswith("measured_") else f"measured_{preset}"
        return path / "hardware" / f"{name}.yaml"
    if path.parent.name != "hardware":
        raise ConfigError(
            f"--out {out} is not in a folder named hardware, where hardware=<name> is looked for",
            hint=f"-o {path.parent / 'hardware' / path.stem}.yaml, or a directory: -o {path.parent / path.stem}",
        )
    if path.suffix == ".yml":
        raise ConfigError(
            f"--out {out} would not be found: configuration files end with .yaml",
            hint=f"-o {path.with_suffix('.yaml')}",
        )
    return path


def disk_of(config: Config, ssd: str | None) -> Path | None:
    """Return the folder whose disk is read: ``ssd``, else the store's if it is local; ConfigError: no folder."""
    if ssd is not None:
        if not Path(ssd).is_dir():
            raise ConfigError(f"--ssd {ssd} is not a directory", hint="--ssd <a directory on the disk to measure>")
        return Path(ssd)
    # A URL of any scheme but ``file`` is an object store, which is not on a disk of this machine.
    if re.match(r"^(?!file:)[a-z0-9]+:", config.store):
        return None
    # The store may not exist yet, so use the nearest folder above it, which is on the same disk.
    path = Path(config.store.removeprefix("file://")).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _calibrate(options: argparse.Namespace) -> int:
    from pipeline.calibration.fit import hardware_yaml
    from pipeline.calibration.machine_figures import calibrate
    from pipeline.config.compose import compose
    from pipeline.core.package_versions import require_triple

    config = compose(options.overrides, options.config_dir)
    require_triple()
    if options.again:
        return _measure_again(config, as_json=options.json)
    preset = config.hardware.name
    if options.pin:
        target, name, use = pinned_figures(), preset, "nightjar run"
    else:
        target = target_of(options.out, preset)
        name = target.stem
        use = f"nightjar run -cd {target.parent.parent} hardware={name}"
    _check_device(config.hardware)
    # Fail before the minute of measuring if the folder cannot be made.
    _write(target)
    calibration = calibrate(config, disk_of(config, options.ssd))
    hardware = replace(calibration.hardware, name=name)
    about = f"Measured on this machine by nightjar calibrate, from hardware={preset}."
    _write(target, hardware_yaml(hardware, calibration.measured, about))
    if options.json:
        show(json.dumps({**calibration.to_json(), "file": str(target), "use": use}))
        return 0
    show(_table(config.hardware, hardware, calibration.measured))
    show(f"predictions are within {calibration.error:.0%} of the measured training steps (median)")
    show(f"written to {target}; use it with\n  {use}")
    return 0


def _measure_again(config: Config, *, as_json: bool) -> int:
    """Measure what ``hardware=auto`` uses, and print it."""
    from pipeline.calibration.hardware_cache import find_kept, measure_again

    if not config.hardware.measured:
        raise ConfigError(
            f"hardware={config.hardware.name} names all its figures, so plans measure nothing",
            hint="hardware=auto without a pinned file, or nightjar calibrate without --again",
        )
    _check_device(config.hardware)
    cached = measure_again(config)
    if find_kept(config) != cached:
        raise ConfigError(
            f"the figures cannot be kept in {kept_figures('').parent}",
            hint="XDG_CACHE_HOME=<a folder you may write>",
        )
    if as_json:
        show(json.dumps(asdict(cached)))
        return 0
    # The cache may have figures that this hardware does not measure.
    measured = tuple(name for name in config.hardware.measured if name in cached.figures)
    figures: dict[str, Any] = {name: cached.figures[name] for name in measured}
    show(_table(config.hardware, replace(config.hardware, **figures), measured))
    show(f"measured in {cached.seconds:g} s; the next run with hardware=auto makes a new plan with these figures")
    return 0


def _write(path: Path, text: str = "") -> None:
    """Make the folder of ``path``, and the file if there is ``text``; ConfigError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="-o <a directory>") from None


def _check_device(hardware: HardwareConfig) -> None:
    if hardware.device != "cuda":
        return
    import torch

    devices = torch.cuda.device_count()
    if devices < hardware.ranks_per_host:
        raise ConfigError(
            f"hardware {hardware.name!r} has {hardware.ranks_per_host} cuda ranks a host, this machine shows "
            f"{devices} CUDA devices",
            hint="hardware=laptop, or hardware.ranks_per_host=<devices here>",
        )


def _table(before: HardwareConfig, after: HardwareConfig, measured: tuple[str, ...]) -> str:
    """Format the measured figures beside those of the preset."""

    def figure(value: float) -> str:
        # Show three or four significant digits; a measurement has no more.
        digits = 3
        if value >= 1000:
            digits = 0
        elif value >= 10:
            digits = 1
        return f"{value:>14,.{digits}f}"

    lines = [f"{'figure':<24}{'preset':>14}{'measured':>14}"]
    for name in measured:
        lines.append(f"{name:<24}{figure(getattr(before, name))}{figure(getattr(after, name))}")
    return "\n".join(lines)


COMMANDS = (
    Command(
        "calibrate", "measure this machine and write a hardware file for plans", _add_arguments, EPILOG, composes=True
    ),
)
