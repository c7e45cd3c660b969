"""A study from its overrides to its report: what ``nightjar tune`` does."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.config import Config
from pipeline.config.compose import NOT_IN_RUN_NAME, compose
from pipeline.config.compose.experiment import experiment_file
from pipeline.config.compose.overrides import parse
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import ConfigError, NightjarError
from pipeline.launch.signals import handled
from pipeline.plugins.tuning import study_store
from pipeline.plugins.tuning.proposals import optuna
from pipeline.plugins.tuning.space import edges, held, split
from pipeline.plugins.tuning.study_page import study_page
from pipeline.plugins.tuning.study_store import best_of
from pipeline.plugins.tuning.tuner import Tuner
from pipeline.records.study import BROKEN, TRYING, Dimension, StudyRecord, StudyShown, TrialRecord, study_directory
from pipeline.store.artifacts import Store

PAGE, BEST = "report.html", "best.yaml"
OWN = ("run", "tune", "launch", "store", "stages", "track")  # groups whose settings may change while a study lasts
OF_NIGHTS = ("nightly", "schedule")  # trials do not read these groups, and the webhook may be a secret
Progress = Callable[[int, int], None]
log = logging.getLogger(__name__)


def tune(
    overrides: Sequence[str], config_dir: str | None = None, progress: Progress = lambda done, total: None
) -> tuple[Store, StudyShown]:
    """Begin or continue the study that ``overrides`` describe. ``progress`` gets the ended trials and all trials.
    Returns its store and its results.

    Raises ConfigError for a setting or a range that is wrong, or if the study of this name is another one;
    LaunchError if another tuner has it; the error of the trials if none of them succeeded.
    """
    optuna()
    given_overrides = []
    for text in overrides:
        # study=NAME is short for tune.study=NAME.
        given_overrides.append(f"tune.{text}" if text.startswith("study=") else text)
    shared, space = split(given_overrides)
    config = _checked(shared, space, config_dir)
    store = Store(config.store)
    store.answers()
    study = str(config.tune.study)
    with handled(), study_store.study_lock(store, study, config.launch.lease_seconds):
        record = _begun(config, store, shared, space)
        earlier = _earlier(config, store, study)
        log.info("study %s: %s (store %s)", study, ", ".join(space), config.store)

        def settled(trials: list[TrialRecord]) -> None:
            # A study that goes on with a lower tune.trials may already have more trials.
            progress(sum(each.state != TRYING for each in trials), max(len(trials), config.tune.trials))
            page = study_page(study_store.shown(store, study))
            store.write_bytes(f"{study_directory(study)}/{PAGE}", page.encode())

        firsts, given = _firsts(config, space, earlier)
        common = [*record.overrides, *split_recorded(shared)[1]]
        trials = Tuner(config, store, common, space, config_dir, firsts, given, earlier, settled).run()
        shown = study_store.shown(store, study)
        _write_best(store, shown, config_dir)
    failed = [each for each in trials if each.state == BROKEN]
    if failed and len(failed) == len(trials):
        # Raise an error of the same class as the first trial's, so that the command ends with the same exit code.
        kind: type[NightjarError] = NightjarError
        for each in NightjarError.__subclasses__():
            if each.exit_code == failed[0].exit_code:
                kind = each
                break
        raise kind(
            f"all {len(trials)} trials failed, the first with: {failed[0].error}",
            hint=f"nightjar result {failed[0].run}",
        )
    return store, shown


def _write_best(store: Store, shown: StudyShown, config_dir: str | None) -> None:
    """Write ``best.yaml`` if a trial is done and an experiment can say what it ran with."""
    if shown.best_trial is None:
        return
    try:
        text = best_file(shown.study, shown.best_trial, config_dir)
    except ConfigError as error:
        # A study of hours should not end with an error because of this file.
        log.warning("%s is not written: %s", BEST, error.message)
        return
    store.write_bytes(f"{study_directory(shown.study.study)}/{BEST}", text.encode())


def best_file(study: StudyRecord, trial: TrialRecord, config_dir: str | None = None) -> str:
    """Return an experiment that reproduces the run of ``trial`` with the same figures."""
    about = (
        f"Trial {trial.number} of study {study.study}: validation NE {trial.ne:.5f}.",
        "  nightjar run experiment=<name of this file>     from my/experiment/<name>.yaml",
        *(f"  {override}" for override in trial.overrides),
    )
    return experiment_file([*study.overrides, *trial.overrides], config_dir, about)


def _checked(shared: Sequence[str], space: dict[str, Dimension], config_dir: str | None) -> Config:
    """Return the configuration that all trials share, after composing every choice and both ends of every range."""
    config = compose(shared, config_dir)
    study = config.tune.study or config.data.name
    config = dataclasses.replace(config, tune=dataclasses.replace(config.tune, study=study))
    if not config.data.split.validates:
        raise ConfigError(
            "a study compares trials by their validation rows, but the dataset has none",
            hint="data.split.validation_share=0.1",
        )
    if "train" not in config.stages:
        raise ConfigError(
            f"stages=[{','.join(config.stages)}] has no train, which trials need", hint="leave stages out"
        )
    if "publish" in config.stages:
        raise ConfigError(
            "trials are not published, but stages names publish", hint="leave stages out, and publish the best one"
        )
    if config.launch.name == "hosts":
        raise ConfigError(
            "launch=hosts runs one stage, but a study starts whole runs", hint="launch=local or launch=kubernetes"
        )
    if config.tune.trial is not None:
        raise ConfigError(f"tune.trial={config.tune.trial} is set, which only a study does", hint="leave it out")
    if config.force:
        raise ConfigError("force=true would begin the trials of a study again", hint="study=<another name>")
    # Compose with the ends of the space, so that a value that no run accepts is found now, not hours later by the one
    # trial that draws it.
    for ends in edges(space):
        compose([*shared, *ends], config_dir)
    return config


def _begun(config: Config, store: Store, shared: Sequence[str], space: dict[str, Dimension]) -> StudyRecord:
    """Return the record of the study, and write it if it begins; ConfigError if the stored one has other settings."""
    study = str(config.tune.study)
    recorded, _ = split_recorded(shared)
    alone = config.tune.parallel == 1 or config.train.threads_per_rank is not None
    if not alone and config.launch.name == "local" and config.hardware.device == "cpu":
        # Several trials share the CPUs of this machine, and the user has not said how. The study records the number of
        # threads, so that a later call with another tune.parallel keeps it: sums of floats depend on it.
        threads = max(1, available_cpus() // (config.tune.parallel * config.machine_ranks))
        recorded.append(f"train.threads_per_rank={threads}")
    record = StudyRecord(
        study=study,
        overrides=tuple(recorded),
        space=space,
        settings=_settings(config, space),
        created=time.time(),
        warm_start=config.tune.warm_start,
    )
    known = study_store.find_study(store, study)
    if known is None:
        study_store.write_study(store, record)
        return record
    hint = f"study=<another name> tune.warm_start={study}"
    for key in {**known.space, **space}:
        if known.space.get(key) != space.get(key):
            raise ConfigError(f"study {study!r} searches {key} over another space than these overrides", hint=hint)
    # A new release has new settings, at their defaults, so compare only those that both records have.
    for key in known.settings.keys() & record.settings.keys():
        former, now = known.settings[key], record.settings[key]
        if former != now:
            raise ConfigError(
                f"study {study!r} has {key}={_written(former)}, but these overrides have {key}={_written(now)}",
                hint=f"{key}={_written(former)}, or {hint}",
            )
    return known


def _settings(config: Config, space: dict[str, Dimension]) -> dict[str, Any]:
    """Return settings that decide what trials compute, by dotted name, except those of ``space`` and the machine."""
    tree = dataclasses.asdict(config)
    for group in (*NOT_IN_RUN_NAME, "hardware"):
        tree.pop(group, None)
    settings = {}
    for key, value in _flat(tree):
        # The dots keep train.lr from covering train.lr_schedule. If a whole group such as model is searched, all of its
        # settings are left out.
        if not any(f"{key}.".startswith(f"{searched}.") for searched in space):
            settings[key] = value
    return settings


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def split_recorded(shared: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides that a study records and gives to every trial, and those that may differ from call to call.

    Overrides for nights are in neither.
    """
    recorded, of_call = list[str](), list[str]()
    for text in shared:
        group = parse([text])[0].key_or_group.split(".")[0]
        if group in OWN:
            of_call.append(text)
        elif group not in OF_NIGHTS:
            recorded.append(text)
    return recorded, of_call


def _earlier(config: Config, store: Store, study: str) -> list[TrialRecord]:
    """Return the trials of ``tune.warm_start``."""
    name = config.tune.warm_start
    if name is None:
        return []
    if name == study:
        raise ConfigError(f"tune.warm_start={name} is this study itself", hint="study=<another name>")
    # Read it only for its error, which lists the existing studies.
    study_store.read_study(store, name)
    return [each for each in study_store.trials_of(store, name) if each.state not in (TRYING, BROKEN)]


def _firsts(
    config: Config, space: dict[str, Dimension], earlier: list[TrialRecord]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the first trials: the settings as given without a study, and the best ones of the earlier study.

    Also return whether the former are among them; they then come first.
    """
    present = {key: _present(config, key) for key in space}
    wanted = [present]
    best = best_of(earlier)
    if best is not None:
        wanted.append({key: best.parameters.get(key) for key in space})
    firsts: list[dict[str, Any]] = []
    given = False
    for values in wanted:
        # ``held`` returns None for a value outside the space: no sampler could learn from such a trial.
        parameters = {key: held(dimension, values[key]) for key, dimension in space.items()}
        if None in parameters.values() or parameters in firsts:
            continue
        firsts.append(parameters)
        given = given or values is present
    return firsts, given


def _present(config: Config, key: str) -> Any:
    """Return the value of setting ``key`` as overrides write it; for a group, its name."""
    node: Any = config
    # An override may add its key with +, and names a group inside another one with a slash.
    for part in key.lstrip("+").replace("/", ".").split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    # A group is chosen by its name, as in model=dcnv2.
    if dataclasses.is_dataclass(node):
        return getattr(node, "name", None)
    return _written(node)


def _written(value: Any) -> Any:
    """Return ``value`` as an override writes it; numbers stay as they are."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        inner = ",".join(str(_written(each)) for each in value)
        return f"[{inner}]"
    return value
