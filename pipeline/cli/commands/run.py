"""``nightjar run``, the commands of single stages, sweeps, the whole run that a night asks for, and its processes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.cli.commands.command import Command, add_config_dir, columns, complain
from pipeline.core import logs
from pipeline.core.errors import SIGNALLED, ConfigError, NightjarError, exit_code_of
from pipeline.core.logs import TERMINAL, add_level, show
from pipeline.core.registry import load_hooks
from pipeline.records.result import Result
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.specs.stage import StageIO
    from pipeline.store.artifacts import Store

CodeOf = Callable[[BaseException], int]
log = logging.getLogger(__name__)
# With -m, this prefix names a plugin's sweeper, which replaces the grid.
SWEEPER = "hydra/sweeper="
# Rows per second that a run processes from log to verdict on two cores, for estimates.
ROWS_PER_SECOND = 25_000


def commands() -> list[Command]:
    """Return ``run``, and a command for each stage."""
    helps: dict[str | None, str] = {None: "all stages, or those of stages=[..]"}
    for stage in STAGES:
        helps[stage.name] = f"only this stage: {stage.help}"
    made = []
    for name, text in helps.items():
        # ``own_help``: Hydra's users expect Hydra's help, which lists groups and their options.
        add_arguments = partial(_add_run_arguments, stage=name)
        made.append(Command(name or "run", text, add_arguments, composes=True, own_help=True))
    return made


def _add_run_arguments(parser: argparse.ArgumentParser, stage: str | None) -> None:
    # These are Hydra's flags, as Hydra's users know them.
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


def _run(options: argparse.Namespace) -> int:
    if options.shell_completion:
        from pipeline.config.compose.completion import answer

        sys.stdout.write(answer(options.overrides, options.commands, options.composing))
        return 0
    overrides = list(options.overrides)
    # An override followed --help, and argparse took it for the help's group.
    if options.help and "=" in options.help:
        overrides, options.help = [options.help, *overrides], ""
    if options.stage:
        overrides.append(f"stages=[{options.stage}]")
    if (options.package or options.resolve) and options.help is None and not options.cfg:
        flag = f"--package {options.package}" if options.package else "--resolve"
        raise ConfigError(f"{flag} has no effect without --cfg", hint=f"--cfg job {flag}")
    if options.help is not None or options.cfg or options.info:
        from pipeline.config.compose import inspection

        return inspection.show(overrides, options)
    if not options.multirun:
        from pipeline.config.compose import compose

        return run_and_complain(compose(overrides, options.config_dir))[0]
    for name, sweeper in load_hooks("nightjar.sweepers").items():
        if (chosen := f"{SWEEPER}{name}") in overrides:
            return int(sweeper([text for text in overrides if text != chosen], options.config_dir))
    return _sweep(overrides, options.config_dir)


def _sweep(overrides: list[str], config_dir: str | None) -> int:
    """Run the jobs of a grid one after another and print a table of the results."""
    from pipeline.config.compose import compose, sweep
    from pipeline.report.summary import compare

    jobs = sweep(overrides)
    # A job that does not compose ends the sweep before the first run.
    configs = [compose(job, config_dir) for job in jobs]
    first_failure, results, notes = 0, [], []
    # Leave overrides that all jobs share out of the table, which compares jobs.
    common = set(jobs[0]).intersection(*jobs)
    for job, config in zip(jobs, configs, strict=True):
        code, result = run_and_complain(config)
        results.append(result or Result(run=str(config.run), status=f"exit {code}"))
        notes.append(" ".join(override for override in job if override not in common))
        first_failure = first_failure or code
        # A signal that ended the run also ends the sweep.
        if code > SIGNALLED:
            break
    show(f"\nsweep:\n{compare(results, notes)}")
    return first_failure


def one_run(overrides: Sequence[str], config_dir: str | None, code_of: CodeOf) -> int:
    """Run what ``overrides`` say, as a trial of a study; return the exit code, by ``code_of`` that of an error.

    Raises:
        ConfigError: They do not compose.
    """
    from pipeline.config.compose import compose

    config = compose(overrides, config_dir)
    try:
        return _lock_and_run(config, code_of)[0]
    except NightjarError as error:
        return complain(str(error), code_of(error))


def run_and_complain(config: Config) -> tuple[int, Result | None]:
    """Run ``config`` and write the page of its store.

    Returns:
        The exit code (message printed) and the result, None if the run did not end.
    """
    from pipeline.schedule.store_overview import write_store_page
    from pipeline.store.artifacts import Store

    try:
        code, result = _lock_and_run(config, exit_code_of)
    except NightjarError as error:
        return complain(str(error), exit_code_of(error)), None
    # Skip this for another host's part of a run, and after a signal, which asks to end at once.
    if config.launch.host_index == 0 and code <= SIGNALLED:
        write_store_page(Store(config.store))
    return code, result


def run_code(config: Config) -> int:
    """Run ``config``; return the exit code. NightjarError if the run cannot be held: a night records that."""
    return _lock_and_run(config, exit_code_of)[0]


def _lock_and_run(config: Config, code_of: CodeOf) -> tuple[int, Result | None]:
    """Return the exit code, by ``code_of``, and the result; NightjarError, with nothing written, for a run in use."""
    from pipeline.core.package_versions import require_triple
    from pipeline.launch.locks import launcher_of, only_launcher
    from pipeline.store.artifacts import Store

    if launcher_of(config) is None and set(config.stages) != {"ingest"}:
        require_triple()
    logs.speak(config.launch.logs, str(config.run))
    store = Store(config.store)
    store.answers()
    if config.launch.host_index > 0:
        return _follow(config, store), None
    with only_launcher(config, store):
        return _run_locked(config, store, code_of)


def _follow(config: Config, store: Store) -> int:
    """Run this host's part of a stage whose launcher is host 0 (``launch=hosts``); return the exit code."""
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


def _run_locked(config: Config, store: Store, code_of: CodeOf) -> tuple[int, Result | None]:
    """Run ``config``, which no other launcher runs; as ``_lock_and_run``."""
    from pipeline.launch.chain import StageChain, StageError
    from pipeline.launch.run_records import record_failure
    from pipeline.launch.signals import Interrupted
    from pipeline.launch.tracker import record_result
    from pipeline.report.html import write_report
    from pipeline.report.progress import Reporter
    from pipeline.report.tracking import followed
    from pipeline.stages.execution import run_stage
    from pipeline.stages.steps import discard, prepare, with_possible_stages

    run = str(config.run)
    width = 0 if logs.is_json() else columns()
    log.info("run %s: %s (store %s)", run, ", ".join(config.stages), config.store)
    try:
        config = with_possible_stages(config)
        steps = prepare(config, store)
    except NightjarError as error:
        record_failure(store, run, error)
        return complain(str(error), code_of(error)), None
    try:
        io = stage_io(config, store, width)
        chain = StageChain(
            config,
            store,
            steps,
            # The chain's configuration changes if it continues on other hosts.
            lambda step: run_stage(step, chain.config, store, io),
            TERMINAL.pass_on,
            lambda on_other_hosts: prepare(on_other_hosts, store),
            lambda step: discard(store, step),
            width,
        )
        with followed(config, store):
            result = chain.run()
    except (NightjarError, StageError) as error:
        record_result(config, store, steps)
        # The page must not hide why the run failed.
        with contextlib.suppress(NightjarError, OSError):
            write_report(store, run)
        return failed(error, code_of), None
    except Interrupted as stop:
        return complain(f"{stop}; the same command continues where it stopped", exit_code_of(stop)), None
    record_result(config, store, steps)
    last = result.stages[config.stages[-1]]
    if last.status == "skipped" and (text := STAGES.get(config.stages[-1]).shown(store, str(last.artifact))):
        show(text)
    write_report(store, run)
    Reporter(store, run, columns=width).summary(result)
    return 0, result


def failed(error: Any, code_of: CodeOf = exit_code_of) -> int:
    """Print why the chain stopped; return the exit code, by ``code_of``."""
    message = str(error)
    # Only a stage that died in its own processes has a log.
    if log := getattr(error, "log", ""):
        message += f"\n  log: {log}"
    return complain(message, code_of(error))


def stage_io(config: Config, store: Store, width: int) -> StageIO:
    """Make what a stage reports to, on a terminal of ``width`` columns (0: none)."""
    from pipeline.report.progress import Reporter
    from pipeline.specs.stage import StageIO

    reporter = Reporter(store, str(config.run), columns=width)
    io = StageIO(interval=reporter.interval, close=reporter.close)
    for listen in load_hooks("nightjar.stage_io").values():
        io = listen(config, store, io)
    return io


def _add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=STAGES.names(), help="the stage")
    parser.add_argument("config", help="URL of the run's config.yaml")
    parser.add_argument("--columns", type=int, default=0, help="width of the launcher's terminal, 0: none")
    parser.add_argument("--launcher", type=int, default=0, help="process whose end ends this one, 0: none")
    parser.add_argument("--to-launcher", action="store_true", help="the launcher passes standard output on")
    add_level(parser)
    parser.set_defaults(function=_work)


def _work(options: argparse.Namespace) -> int:
    from pipeline.specs.stage import StageIO
    from pipeline.stages.execution import work

    def make_io(config: Config, store: Store, rank: int) -> StageIO:
        logs.start_rank(
            options.log_level,
            config.launch.logs,
            rank,
            stage=options.stage,
            run=str(config.run),
            in_pod=not options.to_launcher,
            live=options.columns > 0,
        )
        return StageIO() if rank else stage_io(config, store, options.columns)

    return work(options.stage, options.config, options.launcher, make_io)


def _add_fork_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("modules", nargs="*", help="what ranks have imported when they start")
    parser.add_argument("--ranks", choices=("worker", "scorer"), default="worker", help="the command that they run")
    add_level(parser)
    parser.set_defaults(function=_fork)


def _fork(options: argparse.Namespace) -> int:
    from pipeline.launch.forkserver import serve

    if options.ranks == "scorer":

        def score(arguments: list[str]) -> int:
            # Import this only in the forked rank: these modules start threads, and a process with threads must not
            # fork.
            from pipeline.serving.scoring_processes import be_scorer

            return be_scorer(*arguments)

        return serve(options.modules, score)
    parser = argparse.ArgumentParser(prog="nightjar worker", allow_abbrev=False)
    _add_worker_arguments(parser)
    modules = [*options.modules, "pipeline.config.compose", "pipeline.report", "pipeline.stages.execution"]
    return serve(modules, lambda arguments: _work(parser.parse_args(arguments)))


INTERNAL = (
    Command("worker", "internal: one stage on one rank", _add_worker_arguments, internal=True),
    Command("fork-server", "internal: forks the ranks of a run's stages", _add_fork_server_arguments, internal=True),
)
