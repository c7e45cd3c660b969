"""The command line: ``nightjar <command>``. Commands and exit codes, no logic; heavy imports inside the commands."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence

from pipeline.commands import (
    calibrate,
    ckpt,
    clusters,
    doctor,
    explain,
    nights,
    plans,
    published,
    result,
    run,
    stores,
    worker,
)
from pipeline.commands.command import Command
from pipeline.commands.console import complain
from pipeline.cpus import share_cpus
from pipeline.errors import EXIT_CODES, ConfigError, NightjarError, exit_code_of
from pipeline.triple import missing_triple

_CODES = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
EPILOG = f"""\
{textwrap.fill(f"exit codes: {_CODES}", 100)}

  nightjar nightly date=yesterday       a day's logs to a published model, or to the reasons why not
  nightjar run experiment=demo          the demo from raw logs to figures
  nightjar run --help                   every group and key
  nightjar explain train.lr             what a setting is, and which artifacts depend on it
  nightjar run --cfg job                the configuration that would run
  nightjar what-if hardware=h100x8,h100x16x8
                                        which cluster the tables fit, and what a step costs there
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and prints one clear message for an expected failure."""
    if arguments is None:  # the process is ours: before any stage loads torch or Polars
        share_cpus()
    known = commands()
    parser = _parser(known)
    options, rest = parser.parse_known_args(_flagged(sys.argv[1:] if arguments is None else arguments, known))
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.commands = [command.name for command in known if not command.internal]
        options.composing = [command.name for command in known if command.composes]
        options.overrides = _positional(rest, options)
        return int(options.function(options))
    except NightjarError as error:
        return complain(str(error), exit_code_of(error))
    except KeyboardInterrupt as error:
        return complain("stopped by SIGINT", exit_code_of(error))
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code_of(error)
    except Exception as error:
        from pipeline.store.retrying import explained

        passing = explained(error) or missing_triple(error)
        return _unexpected(error) if passing is None else complain(str(passing), exit_code_of(passing))


def commands() -> list[Command]:
    """All commands, in the order of ``nightjar --help``."""
    families = (
        plans, ckpt, published, stores, calibrate, clusters, nights, explain, doctor, result, worker
    )  # fmt: skip
    return [*run.commands(), *(command for family in families for command in family.COMMANDS)]


def _parser(known: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nightjar",
        description="Nightly retraining of click models: raw logs to an evaluated model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nightjar {_version()}")
    parsers = parser.add_subparsers(dest="command", metavar="command")
    for command in known:
        command.add_arguments(parsers.add_parser(command.name, help=command.help, add_help=not command.own_help))
    return parser


def _positional(rest: Sequence[str], options: argparse.Namespace) -> list[str]:
    """What argparse left over: overrides for commands that compose, an error elsewhere."""
    flags = [text for text in rest if text.startswith("-")]
    overrides = [text for text in rest if not text.startswith("-")]
    unknown = flags or ([] if options.command in options.composing else overrides)
    if unknown:
        command = " ".join(filter(None, ("nightjar", options.command, getattr(options, "action", None))))
        raise ConfigError(f"{command} does not know {unknown[0]}", hint=f"{command} --help")
    return overrides


def _flagged(arguments: Sequence[str], known: Sequence[Command]) -> list[str]:
    """``arguments`` with ``store=URL`` as ``--store=URL`` for the commands that take it so: both may be typed."""
    if arguments and arguments[0] in {command.name for command in known if command.takes_store}:
        return [f"--{text}" if text.startswith("store=") else text for text in arguments]
    return list(arguments)


<<<<<<< HEAD
def _run(options: argparse.Namespace) -> int:
    if options.shell_completion:
        from pipeline.compose.completion import answer

        sys.stdout.write(answer(options.overrides, COMMANDS, COMPOSING))
        return 0
    overrides = list(options.overrides)
    if options.stage:
        overrides.append(f"stages=[{options.stage}]")
    if options.help or options.cfg or options.info:
        from pipeline.compose.inspection import show

        return show(overrides, options)
    from pipeline.compose import compose, sweep

    if options.multirun:
        jobs = sweep(overrides)
        return _sweep(jobs, [compose(job, options.config_dir) for job in jobs])
    return _one_run(compose(overrides, options.config_dir))[0]


def _one_run(config: Config) -> tuple[int, Result | None]:
    """Run ``config``; the exit code (message printed) and the result, None where the run did not end."""
    try:
        return _alone(config)
    except NightjarError as error:
        return _complain(str(error), exit_code_of(error)), None


def _alone(config: Config) -> tuple[int, Result | None]:
    """As ``_one_run``; NightjarError, with nothing written, where the run cannot be held for this launcher."""
    from pipeline.launch.schedulers import only_launcher
    from pipeline.store import Store

    if config.launch.name == "local" and set(config.stages) != {"ingest"}:
        require_triple()
    store = Store(config.store)
    store.answers()
    with only_launcher(config, store, _say):
        return _held_run(config, store)


def _code(config: Config) -> int:
    """Run ``config``; the exit code alone. NightjarError where the run cannot be held: the night records that."""
    return _alone(config)[0]


def _held_run(config: Config, store: Any) -> tuple[int, Result | None]:
    """Run ``config``, which no other launcher runs; as ``_one_run``."""
    from pipeline.launch import Chain, Interrupted, StageError
    from pipeline.launch.chain import Console
    from pipeline.launch.result import record_failure
    from pipeline.report import write_report
    from pipeline.stages.forced import discard
    from pipeline.stages.run import run_stage
    from pipeline.stages.steps import prepare, with_possible_stages

    console = Console(say=_say, write=_write, columns=_columns())
    _say(f"run {config.run}: {', '.join(config.stages)} (store {config.store})")
    try:
        config = with_possible_stages(config)
        steps = prepare(config, store)
    except NightjarError as error:
        record_failure(store, str(config.run), error)
        return _complain(str(error), exit_code_of(error)), None
    try:
        io = _stage_io(config, store, console.columns)
        chain = Chain(
            config, store, steps, lambda step: run_stage(step, chain.config, store, io), console,
            lambda smaller: prepare(smaller, store), lambda step: discard(store, step),
        )  # fmt: skip
        result = chain.run()
    except (NightjarError, StageError) as error:
        with contextlib.suppress(NightjarError, OSError):  # the page must not hide why the run failed
            write_report(store, str(config.run))
        return _failed(error), None
    except Interrupted as stop:
        return _complain(f"{stop}; the same command goes on where it stopped", exit_code_of(stop)), None
    last = result.stages[config.stages[-1]]
    if last.status == "skipped" and (text := STAGES.get(config.stages[-1]).shown(store, str(last.artifact))):
        _say(text)
    write_report(store, str(config.run))
    _reporter(config, store, console.columns).summary(result)
    return 0, result


def _failed(error: Any) -> int:
    """Print why the chain stopped; the exit code."""
    log = getattr(error, "log", "")  # of a stage that died in processes of its own
    return _complain(str(error) + (f"\n  log: {log}" if log else ""), exit_code_of(error))


def _sweep(jobs: list[list[str]], configs: list[Config]) -> int:
    """Run every job, one after another, and print a table of what came out."""
    from pipeline.report import compare

    worst, results, notes = 0, [], []
    common = set(jobs[0]).intersection(*jobs)
    for job, config in zip(jobs, configs, strict=True):
        code, result = _one_run(config)
        results.append(result or Result(run=str(config.run), status=f"exit {code}"))
        notes.append(" ".join(override for override in job if override not in common))
        worst = worst or code
        if code > 128:
            break
    _say(f"\nsweep:\n{compare(results, notes)}")
    return worst


def _worker(options: argparse.Namespace) -> int:
    from pipeline.stages.worker import work

    return work(
        options.stage,
        options.config,
        options.launcher,
        lambda config, store: _stage_io(config, store, options.columns),
    )


def _stage_io(config: Config, store: Any, columns: int) -> Any:
    from pipeline.specs.stage import StageIO

    reporter = _reporter(config, store, columns)
    return StageIO(say=_say, interval=reporter.interval, close=reporter.close)


def _reporter(config: Config, store: Any, columns: int) -> Any:
    from pipeline.report import Reporter

    return Reporter(store, str(config.run), write=_write_text, columns=columns)


def _calibrate(options: argparse.Namespace) -> int:
    from pipeline.calibration.command import run
    from pipeline.compose import compose

    note = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else _say
    return run(compose(options.overrides, options.config_dir), options, _say, note)


def _doctor(options: argparse.Namespace) -> int:
    from pipeline.commands.doctor import examine

    findings = examine(options.store)
    if options.json:
        _say(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        _say("\n".join(finding.line() for finding in findings))
    return 2 if any(finding.level == "fail" for finding in findings) else 0


def _result(options: argparse.Namespace) -> int:
    from pipeline.errors import ArtifactError
    from pipeline.records.step import run_directory
    from pipeline.store import Store

    store = Store(options.store)
    path = f"{run_directory(options.run)}/result.json"
    if not store.exists(path):
        known = [run for run in store.names("runs") if store.exists(f"{run_directory(run)}/result.json")]
        text = f"known runs: {', '.join(known)}" if known else "there are no runs in this store"
        raise ArtifactError(f"no run {options.run!r} in store {options.store}; {text}", hint="store=<URL of its store>")
    if options.json:
        _say(json.dumps(store.read_json(path), indent=1))
    else:
        from pipeline.report import Reporter

        reporter = Reporter(store, options.run, write=_write_text, columns=_columns())
        reporter.summary(read(Result, store, path))
    return 0


def _columns() -> int:
    """Width of the terminal standard output is on, 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _write(data: bytes) -> None:
    if data:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def _complain(text: str, code: int) -> int:
    sys.stdout.flush()
    print(f"nightjar: {text}", file=sys.stderr, flush=True)
    return code


=======
>>>>>>> main
def _unexpected(error: Exception) -> int:
    traceback.print_exc()
    text = f"unexpected {type(error).__name__}: {error}. This is a fault of Nightjar; please report it."
    return complain(text, exit_code_of(error))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nightjar")
    except PackageNotFoundError:
        return "(from a checkout)"


if __name__ == "__main__":
    sys.exit(main())
