"""``nightjar tune``: its arguments, and where a study becomes text; the study behind ``hydra/sweeper=nightjar``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli.commands.command import Command, add_config_dir, complain, progress, show, tell
from pipeline.cli.commands.run import one_run
from pipeline.core.errors import ConfigError, exit_code_of, is_full
from pipeline.core.logs import add_level


def run_study(overrides: Sequence[str], config_dir: str | None, *, as_json: bool = False) -> int:
    """Run the study that ``overrides`` describe to its end and print it; the exit code."""
    from pipeline.launch.signals import Interrupted
    from pipeline.plugins.tuning.study import BEST, PAGE, tune
    from pipeline.plugins.tuning.study_page import study_text
    from pipeline.records.study import study_directory

    try:
        store, shown = tune(overrides, config_dir, progress(as_json, "tuning"))
    except Interrupted as stop:
        return complain(str(stop), exit_code_of(stop))
    tell(as_json, shown, study_text)
    if not as_json:
        folder = store.url_of(study_directory(shown.study.study))
        show(f"\nlook at {folder}/{PAGE}; {folder}/{BEST} is the best trial as an experiment")
    return 0


TUNE = """\
Takes the overrides of nightjar run, some of them with a range or a list of values. The same command continues a study
that was stopped or killed.

  nightjar tune experiment=adult data.split.validation_share=0.1 study=lr \\
      'train.lr=tag(log, interval(1e-4,1e-1))' 'model=choice(dcnv2,dhen)' tune.trials=24 tune.parallel=2
  nightjar tune ls
  nightjar tune show lr
  nightjar tune show lr --yaml > my/experiment/best.yaml    then: nightjar run experiment=best
"""


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [key=value ..] [study=NAME] | ls | show NAME  [--json] [--yaml] [--config-dir DIR]"
    parser.epilog, parser.formatter_class = TUNE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print the study as JSON")
    parser.add_argument("--yaml", action="store_true", help="with show: print the best trial as an experiment file")
    add_config_dir(parser)
    add_level(parser)
    parser.set_defaults(function=_tune)


def add_trial(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tuner", type=int, required=True, help="process whose end ends this one")
    add_config_dir(parser)
    add_level(parser)
    parser.set_defaults(function=_trial)


def _tune(options: argparse.Namespace) -> int:
    # Use no sub-commands of argparse, which would take the first override for a sub-command's name.
    action = options.overrides[:1]
    if action == ["ls"]:
        return _ls(options)
    if action == ["show"]:
        return _show(options)
    if options.yaml:
        raise ConfigError("--yaml belongs to nightjar tune show", hint="nightjar tune show <study> --yaml")
    return run_study(options.overrides, options.config_dir, as_json=options.json)


def _trial(options: argparse.Namespace) -> int:
    from pipeline.plugins.tuning.trial_process import trial_code
    from pipeline.stages.execution import end_with_parents

    end_with_parents(options.tuner)
    try:
        return one_run(options.overrides, options.config_dir, trial_code)
    except OSError as error:  # raised outside the store's own writes
        if not is_full(error):
            raise
        return complain(f"no space left on the disk: {error}", trial_code(error))


def _ls(options: argparse.Namespace) -> int:
    from pipeline.plugins.tuning.study_page import studies_listing
    from pipeline.plugins.tuning.study_store import studies, study_line
    from pipeline.store.artifacts import Store

    names, url = _named(options)
    if names:
        raise ConfigError(f"nightjar tune ls takes no name, got {names[0]}", hint=f"nightjar tune show {names[0]}")
    store = Store(url)
    tell(options.json, [study_line(store, name) for name in studies(store)], studies_listing)
    return 0


def _show(options: argparse.Namespace) -> int:
    from pipeline.plugins.tuning.study import best_file
    from pipeline.plugins.tuning.study_page import study_text
    from pipeline.plugins.tuning.study_store import shown
    from pipeline.store.artifacts import Store

    names, url = _named(options)
    if len(names) != 1:
        raise ConfigError(
            f"nightjar tune show takes one study, got {', '.join(names) or 'none'}", hint="nightjar tune ls lists them"
        )
    study = shown(Store(url), names[0])
    if not options.yaml:
        tell(options.json, study, study_text)
    elif study.best_trial is None:
        raise ConfigError(f"no trial of study {names[0]!r} is done", hint=f"nightjar tune show {names[0]}")
    else:
        show(best_file(study.study, study.best_trial, options.config_dir).rstrip())
    return 0


def _named(options: argparse.Namespace) -> tuple[list[str], str]:
    """Return the names after the action, and the URL of the store."""
    names, url = [], "./store"
    for text in options.overrides[1:]:
        # The last one counts, as in Hydra. No configuration is composed, which would take longer than the answer.
        if text.startswith("store="):
            url = text.removeprefix("store=")
        else:
            names.append(text)
    return names, url


COMMANDS = (
    Command(
        name="tune",
        after="search",
        help="search settings: many runs, the best of them, why",
        add_arguments=add_tune,
        composes=True,
    ),
    Command(name="trial", help="internal: a trial of a study", add_arguments=add_trial, composes=True, internal=True),
)
