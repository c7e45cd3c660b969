"""``nightjar run``, the commands of single stages, sweeps, and the whole run that a night asks for."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import logs
from pipeline.commands.command import Command, add_config_dir, columns, complain
from pipeline.errors import NightjarError, exit_code_of
from pipeline.logs import TERMINAL, add_level, show
from pipeline.records.result import Result
from pipeline.specs import STAGES
from pipeline.specs.registry import load_hooks

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.records.runs import Step
    from pipeline.report.progress import Reporter
    from pipeline.specs.stage import StageIO
    from pipeline.store.artifacts import Store


CodeOf = Callable[[BaseException], int]
log = logging.getLogger(__name__)
SWEEPER = "hydra/sweeper="  # with -m, the name of a plugin's: what it does in place of a grid


def commands() -> list[Command]:
    """``run``, and a command for each stage."""
    run = Command(
        name="run",
        help="all stages, or those of stages=[..]",
        add_arguments=_flags(None),
        composes=True,
        own_help=True,
    )
    single = [
        Command(
            name=stage.name,
            help=f"only this stage: {stage.help}",
            add_arguments=_flags(stage.name),
            composes=True,
            own_help=True,
        )
        for stage in STAGES
    ]
    return [run, *single]


def _flags(stage: str | None) -> Callable[[argparse.ArgumentParser], None]:
    """Hydra's flags, as Hydra's users know them."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--help", "-h", nargs="?", const="", metavar="GROUP", help="list groups, or the keys of one, or of all")
        add("--cfg", "-c", choices=["job", "hydra", "all"], help="show the configuration instead of running")
        add("--package", "-p", help="with --cfg: the part to show")
        add("--resolve", action="store_true", help="with --cfg: resolve interpolations")
        add("--info", "-i", nargs="?", const="all", help="show where the configuration comes from")
        add("--multirun", "-m", action="store_true", help="one run for each combination of a=1,2 values")
        add("--shell-completion", "-sc", action="store_true", help="install=bash, uninstall=bash")
        add_config_dir(parser)
        add_level(parser)
        parser.set_defaults(function=_run, stage=stage)

    return add_arguments


def _run(options: argparse.Namespace) -> int:
    if options.shell_completion:
        from pipeline.compose.completion import answer

        sys.stdout.write(answer(options.overrides, options.commands, options.composing))
        return 0
    overrides = list(options.overrides)
    if options.help and "=" in options.help:  # an override behind --help
        overrides, options.help = [options.help, *overrides], ""
    if options.stage:
        overrides.append(f"stages=[{options.stage}]")
    if options.help is not None or options.cfg or options.info:
        from pipeline.compose import inspection

        return inspection.show(overrides, options)
    from pipeline.compose import compose, sweep

    if options.multirun:
        for name, sweeper in load_hooks("nightjar.sweepers").items():
            if (chosen := f"{SWEEPER}{name}") in overrides:
                return int(sweeper([text for text in overrides if text != chosen], options.config_dir))
        jobs = sweep(overrides)
        return _sweep(jobs, [compose(job, options.config_dir) for job in jobs])
    return _one_run(compose(overrides, options.config_dir))[0]


def _sweep(jobs: list[list[str]], configs: list[Config]) -> int:
    """Run the jobs one after another and print a table of the results."""
    from pipeline.report.summary import compare

    worst, results, notes = 0, [], []
    common = set(jobs[0]).intersection(*jobs)
    for job, config in zip(jobs, configs, strict=True):
        code, result = _one_run(config)
        results.append(result or Result(run=str(config.run), status=f"exit {code}"))
        notes.append(" ".join(override for override in job if override not in common))
        worst = worst or code
        if code > 128:
            break
    show(f"\nsweep:\n{compare(results, notes)}")
    return worst


def _one_run(config: Config, code_of: CodeOf = exit_code_of) -> tuple[int, Result | None]:
    """Run ``config``; the exit code (message printed) and the result, None where the run did not end."""
    try:
        return _alone(config, code_of)
    except NightjarError as error:
        return complain(str(error), code_of(error)), None


def one_run(overrides: Sequence[str], config_dir: str | None, code_of: CodeOf = exit_code_of) -> int:
    """Run what ``overrides`` say, as ``nightjar run`` does; the exit code, by ``code_of`` that of an error.

    ConfigError where they do not compose.
    """
    from pipeline.compose import compose

    return _one_run(compose(overrides, config_dir), code_of)[0]


def run_code(config: Config) -> int:
    """Run ``config``; the exit code. NightjarError where the run cannot be held: a night records that."""
    return _alone(config)[0]


def _alone(config: Config, code_of: CodeOf = exit_code_of) -> tuple[int, Result | None]:
    """As ``_one_run``; NightjarError, with nothing written, where the run cannot be held for this launcher."""
    from pipeline.launch.schedulers import launcher_of, only_launcher
    from pipeline.store.artifacts import Store
    from pipeline.versions import require_triple

    if launcher_of(config) is None and set(config.stages) != {"ingest"}:
        require_triple()
    logs.speak(config.launch.logs, str(config.run))
    store = Store(config.store)
    store.answers()
    if config.launch.host_index > 0:
        return _follow(config, store), None
    with only_launcher(config, store):
        return _held_run(config, store, code_of)


def _follow(config: Config, store: Store) -> int:
    """This host's part of a stage whose launcher is host 0 (``launch=hosts``); the exit code."""
    from pipeline.launch.local import follow
    from pipeline.launch.signals import Interrupted
    from pipeline.stages.steps import steps

    (stage,) = config.stages
    step = next(step for step in steps(config, store, stage) if step.name == stage)
    log.info("run %s: host %d of %s", config.run, config.launch.host_index, stage)
    try:
        follow(config, store, step, TERMINAL.pass_on)
    except Interrupted as stop:
        return complain(str(stop), exit_code_of(stop))
    return 0


def _held_run(config: Config, store: Store, code_of: CodeOf) -> tuple[int, Result | None]:
    """Run ``config``, which no other launcher runs; as ``_one_run``."""
    from pipeline.launch.chain import Console, StageChain, StageError
    from pipeline.launch.run_records import record_failure
    from pipeline.launch.signals import Interrupted
    from pipeline.report.html import write_report
    from pipeline.report.tracking import followed
    from pipeline.stages.execution import run_stage
    from pipeline.stages.steps import discard, prepare, with_possible_stages

    console = Console(write=TERMINAL.pass_on, columns=0 if logs.is_json() else columns())
    log.info("run %s: %s (store %s)", config.run, ", ".join(config.stages), config.store)
    try:
        config = with_possible_stages(config)
        steps = prepare(config, store)
    except NightjarError as error:
        record_failure(store, str(config.run), error)
        return complain(str(error), code_of(error)), None
    try:
        io = stage_io(config, store, console.columns)
        chain = StageChain(
            config,
            store,
            steps,
            lambda step: run_stage(step, chain.config, store, io),
            console,
            lambda smaller: prepare(smaller, store),
            lambda step: discard(store, step),
        )
        with followed(config, store):
            result = chain.run()
    except (NightjarError, StageError) as error:
        _track(config, store, steps)
        with contextlib.suppress(NightjarError, OSError):  # the page must not hide why the run failed
            write_report(store, str(config.run))
        return failed(error, code_of), None
    except Interrupted as stop:
        return complain(f"{stop}; the same command continues where it stopped", exit_code_of(stop)), None
    _track(config, store, steps)
    last = result.stages[config.stages[-1]]
    if last.status == "skipped" and (text := STAGES.get(config.stages[-1]).shown(store, str(last.artifact))):
        show(text)
    write_report(store, str(config.run))
    _reporter(config, store, console.columns).summary(result)
    return 0, result


def _track(config: Config, store: Store, steps: Sequence[Step]) -> None:
    """Tell TorchX's trackers what ``result.json`` says."""
    from pipeline.launch.tracker import record
    from pipeline.records.record import read
    from pipeline.records.runs import run_directory

    with contextlib.suppress(NightjarError, OSError):
        record(config, store, steps, read(Result, store, f"{run_directory(str(config.run))}/result.json"))


def failed(error: Any, code_of: CodeOf = exit_code_of) -> int:
    """Print why the chain stopped; the exit code, by ``code_of``."""
    log = getattr(error, "log", "")  # of a stage that died in processes of its own
    return complain(str(error) + (f"\n  log: {log}" if log else ""), code_of(error))


def stage_io(config: Config, store: Store, width: int) -> StageIO:
    """Who hears of a stage, on a terminal of ``width`` columns (0: none)."""
    from pipeline.specs.stage import StageIO

    reporter = _reporter(config, store, width)
    io = StageIO(interval=reporter.interval, close=reporter.close)
    for listen in load_hooks("nightjar.stage_io").values():
        io = listen(config, store, io)
    return io


def _reporter(config: Config, store: Store, width: int) -> Reporter:
    from pipeline.report.progress import Reporter

    return Reporter(store, str(config.run), columns=width)
