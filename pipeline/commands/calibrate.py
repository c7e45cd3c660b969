"""``nightjar calibrate``: its arguments, where the file goes, and how a run picks it up."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.commands.command import Command, add_config_dir, show
from pipeline.config import Config
from pipeline.config.hardware import HardwareConfig
from pipeline.errors import ConfigError
from pipeline.logs import add_level
from pipeline.machine import kept_figures, pinned_figures

EPILOG = """\
  nightjar calibrate                                  this machine; writes conf_here/hardware/measured_auto.yaml
  nightjar calibrate --pin                            this machine, from now on by hardware=auto
  nightjar calibrate --again                          what hardware=auto measured, anew, in a few seconds
  nightjar calibrate hardware=laptop2 -o my_conf      two ranks; writes my_conf/hardware/measured_laptop2.yaml
  nightjar run -cd my_conf hardware=measured_laptop2  uses the measured figures
"""


@dataclass(frozen=True)
class HardwareFile:
    """The file that is written, and the configuration directory Hydra finds it in."""

    path: Path
    directory: Path

    @property
    def name(self) -> str:
        """What ``hardware=`` calls it."""
        return self.path.stem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``nightjar calibrate``."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
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


def target_of(out: str, preset: str) -> HardwareFile:
    """Where the measured file of ``preset`` goes; ConfigError for a file that Hydra would not find."""
    path = Path(out)
    if path.suffix not in (".yaml", ".yml"):
        name = preset if preset.startswith("measured_") else f"measured_{preset}"
        return HardwareFile(path / "hardware" / f"{name}.yaml", path)
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
    return HardwareFile(path, path.parent.parent)


def disk_of(config: Config, ssd: str | None) -> Path | None:
    """The folder whose disk is read: ``ssd``, else the store's where it is local, else None. ConfigError: no folder."""
    if ssd is not None:
        if not Path(ssd).is_dir():
            raise ConfigError(f"--ssd {ssd} is not a directory", hint="--ssd <a directory on the disk to measure>")
        return Path(ssd)
    if re.match(r"^(?!file:)[a-z0-9]+:", config.store):
        return None
    path = Path(config.store.removeprefix("file://")).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _calibrate(options: argparse.Namespace) -> int:
    """Measure, write the file, and print the figures."""
    from pipeline.calibration.fit import hardware_yaml
    from pipeline.calibration.machine_figures import calibrate
    from pipeline.compose import compose
    from pipeline.versions import require_triple

    config = compose(options.overrides, options.config_dir)
    require_triple()
    if options.again:
        return _measure_again(config, as_json=options.json)
    target = target_of(options.out, config.hardware.name) if not options.pin else HardwareFile(pinned_figures(), Path())
    _check_device(config.hardware)
    _written(target.path)  # a folder that cannot be is better known before the minute of measuring
    calibration = calibrate(config, disk_of(config, options.ssd))
    hardware = replace(calibration.hardware, name=config.hardware.name if options.pin else target.name)
    about = f"Measured on this machine by nightjar calibrate, from hardware={config.hardware.name}."
    _written(target.path, hardware_yaml(hardware, calibration.measured, about))
    use = f"nightjar run -cd {target.directory} hardware={target.name}" if not options.pin else "nightjar run"
    if options.json:
        show(json.dumps({**calibration.to_json(), "file": str(target.path), "use": use}))
        return 0
    show(render(config.hardware, hardware, calibration.measured))
    show(f"predictions are within {calibration.error:.0%} of the measured training steps (median)")
    show(f"written to {target.path}; use it with\n  {use}")
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
    kept = measure_again(config)
    if find_kept(config) != kept:
        raise ConfigError(
            f"the figures cannot be kept in {kept_figures('').parent}",
            hint="XDG_CACHE_HOME=<a folder you may write>",
        )
    if as_json:
        show(json.dumps(asdict(kept)))
        return 0
    used = tuple(name for name in config.hardware.measured if name in kept.figures)
    figures: dict[str, Any] = {name: kept.figures[name] for name in used}
    show(render(config.hardware, replace(config.hardware, **figures), used))
    show(f"measured in {kept.seconds:g} s; the next run with hardware=auto makes a new plan with these figures")
    return 0


def _written(path: Path, text: str = "") -> None:
    """Make the folder of ``path``, and the file where there is ``text``; ConfigError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if text:
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="-o <a directory>") from None


def _check_device(hardware: HardwareConfig) -> None:
    if hardware.device == "cuda":
        import torch

        if torch.cuda.device_count() < hardware.ranks_per_host:
            raise ConfigError(
                f"hardware {hardware.name!r} has {hardware.ranks_per_host} cuda ranks a host, this machine shows "
                f"{torch.cuda.device_count()} CUDA devices",
                hint="hardware=laptop, or hardware.ranks_per_host=<devices here>",
            )


def render(before: HardwareConfig, after: HardwareConfig, measured: tuple[str, ...]) -> str:
    """A table of the measured figures beside those of the preset."""
    lines = [f"{'figure':<24}{'preset':>14}{'measured':>14}"]
    lines += [f"{name:<24}{_figure(getattr(before, name))}{_figure(getattr(after, name))}" for name in measured]
    return "\n".join(lines)


def _figure(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 10 else 3
    return f"{value:>14,.{digits}f}"


COMMANDS = (
    Command(
        name="calibrate",
        help="measure this machine and write a hardware file for plans",
        add_arguments=add_arguments,
        composes=True,
    ),
)
