"""``nightjar launch`` and ``nightjar schedule``: their arguments, and where manifests become text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.commands.command import Command, add_config_dir, complain, show, tell
from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.plugins.kubernetes.api_client import Api

LAUNCH = """\
Takes the overrides of nightjar run. Nothing is submitted, and no cluster is contacted.

  nightjar launch render experiment=demo launch=kubernetes launch.pods.image=<digest> store=s3://clicks/store
  nightjar launch render <overrides> --out manifests     one file per object
"""
SCHEDULE = """\
Takes the overrides of nightjar nightly; the CronJob runs that command every night.

  nightjar schedule render <overrides>     accounts, role, binding and CronJob as YAML, without a cluster
  nightjar schedule apply <overrides>      create them, or bring them up to date
  nightjar schedule status <overrides>     the last start, and how the nights ended
  nightjar schedule suspend <overrides>    start no more nights; resume starts them again
  nightjar schedule delete <overrides>     remove them
"""
OUT = "directory for one file per object (default: all on standard output)"


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = LAUNCH, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    text = "print a run's jobs and network policy as YAML, without a cluster"
    render = _command(commands, "render", _render_launch, text)
    render.add_argument("--out", help=OUT)
    add_config_dir(render)


def add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = SCHEDULE, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)
    render = _command(commands, "render", _render_schedule, "print the objects as YAML, without a cluster")
    render.add_argument("--out", help=OUT)
    _command(commands, "apply", _apply, "create the objects in the cluster, or bring them up to date")
    status = _command(commands, "status", _status, "show the last start, and how the nights ended")
    status.add_argument("--json", action="store_true", help="print the result as JSON")
    _command(commands, "suspend", lambda options: _suspend(options, True), "start no more nights")
    _command(commands, "resume", lambda options: _suspend(options, False), "start nights again after suspend")
    _command(commands, "delete", _delete, "remove the objects from the cluster")


def _command(commands: Any, name: str, function: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(function=function)
    return parser


def _render_launch(options: argparse.Namespace) -> int:
    from pipeline.config.compose import compose
    from pipeline.plugins.kubernetes.job_kinds import require_cluster, stage_objects
    from pipeline.plugins.kubernetes.network import run_policy
    from pipeline.records.runs import run_directory
    from pipeline.stages.steps import steps, with_possible_stages
    from pipeline.store.artifacts import Store

    config = with_possible_stages(compose(options.overrides, options.config_dir))
    require_cluster(config)
    store = Store(config.store)
    url = store.url_of(f"{run_directory(str(config.run))}/config.yaml")
    objects = stage_objects(config, steps(config, store, forced=False), url)
    return _emit([run_policy(config), *objects], options.out)


def _render_schedule(options: argparse.Namespace) -> int:
    return _emit(_schedule_objects(options)[1], options.out)


def _emit(objects: list[dict[str, Any]], out: str | None) -> int:
    from pipeline.plugins.kubernetes.job_kinds import as_yaml

    if out is None:
        show(as_yaml(objects).rstrip())
        return 0
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for item in objects:
            path = folder / f"{item['kind'].lower()}-{item['metadata']['name']}.yaml"
            path.write_text(as_yaml([item]))
            show(str(path))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}", hint="--out <a folder>") from None
    return 0


def _apply(options: argparse.Namespace) -> int:
    from pipeline.plugins.kubernetes.schedule import apply

    show("\n".join(apply(*_in_cluster(options))))
    return 0


def _status(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from pipeline.plugins.kubernetes.schedule import status

    api, objects = _in_cluster(options)
    state = status(api, objects[-1])
    tell(options.json, asdict(state), lambda _: "\n".join(state.lines()))
    return 0


def _suspend(options: argparse.Namespace, suspended: bool) -> int:
    from pipeline.plugins.kubernetes.schedule import suspend

    api, (*_, cron) = _in_cluster(options)
    suspend(api, cron, suspended)
    done = "suspended" if suspended else "resumed"
    show(f"cronjob {cron['metadata']['name']} {done}")
    return 0


def _delete(options: argparse.Namespace) -> int:
    from pipeline.plugins.kubernetes.schedule import delete

    show("\n".join(delete(*_in_cluster(options))))
    return 0


def _schedule_objects(options: argparse.Namespace) -> tuple[Config, list[dict[str, Any]]]:
    """Return what every night is composed of, except its day, and the schedule's objects, the CronJob last.

    Raises:
        ConfigError: No night of the CronJob would take these settings.
    """
    from pipeline.config.kubernetes import cron_times
    from pipeline.plugins.kubernetes.job_kinds import require_cluster
    from pipeline.plugins.kubernetes.schedule import schedule_config, schedule_objects
    from pipeline.schedule.night_config import gap_of

    config = schedule_config(options.overrides)
    require_cluster(config)
    if config.gate.force is not None:
        raise ConfigError(
            "gate.force is set, but in a schedule it would publish every model from now on",
            hint="leave it out; for one night: nightjar nightly date=<its day> gate.force='<why>'",
        )
    gap = gap_of(cron_times(config.schedule.cron), config.schedule.time_zone, date.today())
    if gap:
        complain(f"{gap}, because clocks are put forward: no night starts then; schedule.time_zone=Etc/UTC has all", 0)
    return config, schedule_objects(config, options.overrides)


def _in_cluster(options: argparse.Namespace) -> tuple[Api, list[dict[str, Any]]]:
    """Return the cluster, and the schedule's objects in it, the CronJob last."""
    from pipeline.plugins.kubernetes.api_client import connect

    config, objects = _schedule_objects(options)
    return connect(config.launch.context), objects


COMMANDS = (
    Command(
        name="launch",
        after="calibrate",
        help="render a run's jobs for a Kubernetes cluster",
        add_arguments=add_launch,
        composes=True,
    ),
    Command(
        name="schedule",
        help="run nights on a Kubernetes cluster with a CronJob",
        add_arguments=add_schedule,
        composes=True,
    ),
)
