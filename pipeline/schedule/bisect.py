"""``nightjar bisect``: what spoilt a run that the gate held, found by training it again with something changed back.

The held model is its own control. A replay starts from the same checkpoint, is judged on the same test rows beside the
same version, and never publishes. Datasets and plans are found by what they are made of: a replay that changes neither
only trains and judges.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pipeline.config import Config
from pipeline.config.ingest import DriftLimits
from pipeline.config.nightly import TrackConfig
from pipeline.config.renamed import config_changes
from pipeline.config.train import TrainConfig
from pipeline.core.errors import SIGNALLED, ArtifactError, ConfigError, DataError, NightjarError
from pipeline.core.units import percent
from pipeline.launch.locks import folder_lock
from pipeline.launch.signals import Interrupted
from pipeline.publishing.promotion import read_current
from pipeline.publishing.versions import find_version, version_path
from pipeline.records.bisection import FEATURES, LABELS, LIMITS, ROWS, SETTINGS, BisectRecord, Culprit, Replay, Suspect
from pipeline.records.gate import GATE, HOLD, PASS, GateRecord
from pipeline.records.night import NIGHT, Base, NightRecord
from pipeline.records.record import read
from pipeline.records.result import ErrorPart, IngestPart, Result
from pipeline.records.runs import run_directory
from pipeline.schedule.night_config import base_of
from pipeline.schedule.night_summary import is_expected, read_settings, write_summary
from pipeline.schedule.suspects import DEAD, HALF, LABEL_CHECKS, Signs, describe_setting, find_suspects, lost_ne
from pipeline.stages.artifact_keys import keys_of
from pipeline.stages.compare import ne_change
from pipeline.stages.execution import load
from pipeline.stages.release_gate import would_pass
from pipeline.stages.steps import steps
from pipeline.store.artifacts import Store
from pipeline.store.removal import remove

QUALITY = "quality.json"
# Settings that are no suspects, besides those that differ every night: they permit something, say who publishes, or
# name the log, whose former place has other rows. Each ends with a dot, as do the paths compared with it.
_NO_SUSPECTS = (
    *("checkpoint.allow.", "publish.model.", "publish.judge_beside.", "data.name.", "data.aside."),
    *("data.path.", "data.format.", "data.options.", "data.snapshot.", "data.messages."),
)
# A feature with the values of other rows costs twice what is lost without it. So leaving it out removes half of the
# rise of the incumbent's NE; half of that is enough to name the feature.
MISLEADS = 0.25
OTHER_ROWS = "it was judged on other test rows, so its verdict proves nothing"
Run = Callable[[Config], int]  # runs all stages and returns the exit code
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HeldRun:
    """A run that the gate held: its records, its base, its settings, those of ``base`` and the changes."""

    name: str
    config: Config
    result: Result
    gate: GateRecord
    base: Base
    settings: Mapping[str, Any]
    former: Mapping[str, Any]
    changed: Mapping[str, Sequence[Any]]


def bisect_run(store: Store, name: str, run: Run, limit: int, deadline: datetime | None = None) -> BisectRecord:
    """Find what spoilt run ``name``, and record it.

    Each suspect is tried by a training, or without one if the records suffice. When no training is left, only suspects
    of the second kind are tried. Several settings or features that are suspected together are tried together, and then
    by halves. ``bisect.json`` of the run is written after each of them, and the page of a night names the culprit.

    Args:
        run: Does a whole run.
        limit: The largest number of trainings.
        deadline: No training begins that would end after it, if it takes as long as the held run; None: no deadline.

    Raises:
        ConfigError: The gate did not hold that run, or it had no incumbent.
        ArtifactError: The run or what it started from is gone.
        DataError: The run's logs have changed since, so that a replay would train on other rows.
        LaunchError: Another process searches for what spoilt it.
        Interrupted: A signal ended a replay. What was found is recorded.
        NightjarError: A replay failed, with its exit code. What was found is recorded.
    """
    held = read_held_run(store, name)
    hint = "run the same command again once that one has ended"
    with folder_lock(store, run_directory(name), f"run {name!r}", held.config.launch.lease_seconds, hint=hint):
        suspects = find_suspects(_read_signs(store, held))
        search = _Search(store, held, run, limit, deadline)
        search.save(suspects=tuple(suspects))
        log.info("bisect     %s: %d suspects, at most %d replays", name, len(suspects), limit)
        culprit = None
        for place, suspect in enumerate(suspects):
            log.info("bisect     suspect %d of %d: %s", place + 1, len(suspects), suspect.title)
            if suspect.kind in (SETTINGS, FEATURES):
                culprit = search.try_suspect(suspect)
            elif suspect.kind == LIMITS:
                culprit = _judged_by_former_limits(held, suspect)
            # Rows of the day that explain no known share of the loss are named only if every other suspect was tried.
            elif suspect.kind != ROWS or suspect.explained is not None or not search.untold:
                culprit = _named_by_signs(held, suspect)
            if culprit is not None:
                break
        search.save(culprit=culprit, stopped="; ".join(search.untold) or None)
        path = f"{run_directory(name)}/{NIGHT}"
        # Only runs of nights have such a page.
        if culprit is not None and store.exists(path):
            record = replace(read(NightRecord, store, path), culprit=culprit.words)
            store.write_json(path, record.to_json())
            write_summary(store, record)
        return search.record


def read_held_run(store: Store, name: str) -> HeldRun:
    """Read the records of run ``name``, which the gate held; errors as ``bisect_run``."""
    path = f"{run_directory(name)}/{Result.FILE}"
    if not store.exists(path):
        raise ArtifactError(f"no run {name!r} in store {store.url}", hint="nightjar nights ls, or nightjar runs ls")
    result = read(Result, store, path)
    published = result.artifact("publish")
    if result.gate is None or result.gate.verdict != HOLD or not published:
        state = "was published" if result.gate is not None else f"is {result.status} without a verdict of the gate"
        raise ConfigError(
            f"run {name} {state}, expected one that the gate held: there is nothing to find",
            hint="nightjar nights ls lists the held nights",
        )
    gate, config = read(GateRecord, store, f"{published}/{GATE}"), load(store, name)
    if gate.checks and all(check.passed for check in gate.checks):
        raise ConfigError(
            f"run {name} passes every check of the gate and was held by a person: {gate.reasons[0]}",
            hint=f"nightjar models promote {gate.model} {gate.version} --reason '...' publishes it",
        )
    if gate.incumbent_version is None:
        raise ConfigError(
            f"run {name} had no incumbent, so nothing tells what has changed since a good model",
            hint=f"{published}/gate.html says why it was held",
        )
    base = base_of(find_version(store, config.model_name, gate.incumbent_version))
    former, settings = read_settings(store, config.model_name, base, name)
    if not settings:
        raise ArtifactError(
            f"the settings of {base.version} are gone, with its run {base.run}, so nothing tells which have changed",
            hint=f"{published}/gate.html says why {name} was held",
        )
    changed = changed_settings(former, settings)
    return HeldRun(
        name=name, config=config, result=result, gate=gate, base=base, settings=settings, former=former, changed=changed
    )


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what differs and can change a model: {path: [then, now]}.

    A path is that of a setting, or of the entry or group that only one of both has. A model of another name counts as a
    whole, as its settings are others.
    """
    changed: dict[str, list[Any]] = {}
    for path in config_changes(then, now):
        keys = set(keys_of(path)) - {"plan"}  # where tables lie changes no result
        if keys and not is_expected(path) and not f"{path}.".startswith(_NO_SUSPECTS):
            unit, values = _changed_unit(path, then, now)
            changed[unit] = values
    return changed


def _changed_unit(path: str, then: Any, now: Any) -> tuple[str, list[Any]]:
    # Return the setting, or the first entry or group on its path that only one side has, with both values.
    parts = path.split(".")
    if parts[0] == "model" and then["model"].get("name") != now["model"].get("name"):
        parts = ["model"]
    unit = []
    for part in parts:
        unit.append(part)
        then, now = then.get(part), now.get(part)
        if not isinstance(then, Mapping) or not isinstance(now, Mapping):
            break
    # Show an entry or group by its name, or as "set" if it has none.
    values = [value.get("name", "set") if isinstance(value, Mapping) else value for value in (then, now)]
    return ".".join(unit), values


def _read_signs(store: Store, held: HeldRun) -> Signs:
    data, path = held.config.data, held.result.artifact("ingest")
    drift: dict[str, Any] = {}
    if path is not None and store.exists(f"{path}/{QUALITY}"):
        drift = store.read_json(f"{path}/{QUALITY}")["checks"]["drift"]
    then, before = IngestPart(), store.find(held.base.dataset)
    if before is not None:
        then = IngestPart.from_json(before.summary)
    checkpoint = held.config.checkpoint
    return Signs(
        gate=held.gate,
        limits=held.config.gate,
        settings=held.changed,
        features=(*data.dense, *data.sparse),
        drift=drift,
        moved=data.checks.warn,
        # If only the tables continue, the model is not the incumbent even without the day's rows.
        continues=checkpoint.init_from == held.base.checkpoint and not checkpoint.init_tables_only,
        now=held.result.ingest or IngestPart(),
        then=then,
    )


class _Search:
    """The replays of a held run, and their record so far. ``untold``: what is unknown, and why."""

    def __init__(self, store: Store, held: HeldRun, run: Run, limit: int, deadline: datetime | None) -> None:
        self.store, self.held, self.run, self.limit, self.deadline = store, held, run, limit, deadline
        self.untold: list[str] = []
        gate = held.gate
        self.labels_failed = any(check.name in LABEL_CHECKS and not check.passed for check in gate.checks)
        self.record = BisectRecord(
            run=held.name,
            model=held.config.model_name,
            version=None if held.result.gate is None else held.result.gate.version,
            incumbent=held.base.version,
            ne=None if gate.candidate is None else gate.candidate.ne.point,
            incumbent_ne=None if gate.incumbent is None else gate.incumbent.ne.point,
            limit=limit,
        )

    def _refusal(self) -> str:
        # Return why no further replay may begin, or "" if one may.
        if len(self.record.replays) >= self.limit:
            return f"the limit of {self.limit} replays was reached"
        if self.deadline is not None and time.time() + self.held.result.seconds > self.deadline.timestamp():
            return "no replay would have ended before the deadline"
        return ""

    def save(self, **changes: Any) -> None:
        """Write the record, with ``changes``."""
        self.record = replace(self.record, **changes)
        self.store.write_json(f"{run_directory(self.held.name)}/{BisectRecord.FILE}", self.record.to_json())

    def try_suspect(self, suspect: Suspect) -> Culprit | None:
        """Replay without everything suspected, then with halves of it; None if that does not help."""
        if refusal := self._refusal():
            self.untold.append(f"{refusal} before {suspect.title}")
            return None
        shown = self._replay(suspect.kind, suspect.names)
        if shown.verdict is None or not shown.same_rows:
            self.untold.append(f"{suspect.title} cannot be told: {shown.message or OTHER_ROWS}")
        if not self._shows(suspect, shown):
            return None
        # If the gate passes without the whole group, a half that only recovers part of the loss is not the whole cause.
        names, whole_passes = suspect.names, self._passes(shown)
        # Features that carry nothing were each measured separately, and leaving out any half of them would do no harm.
        while len(names) > 1 and not self._refusal() and suspect.explained is None:
            half, rest = names[: len(names) // 2], names[len(names) // 2 :]
            tried = self._replay(suspect.kind, half)
            if self._passes(tried) or (not whole_passes and self._shows(suspect, tried)):
                names, shown = half, tried
            elif tried.verdict is not None and tried.same_rows:
                names = rest
            else:  # these settings do not compose without the others, which says nothing
                break
        if names != shown.names and not self._refusal():
            confirmed = self._replay(suspect.kind, names)
            if self._passes(confirmed) or (not whole_passes and self._shows(suspect, confirmed)):
                shown = confirmed
            else:  # they spoil it only together
                names = shown.names
        # Do not name alone what no replay has confirmed.
        return self._name(suspect, shown, likely=names)

    def _replay(self, kind: str, names: Sequence[str]) -> Replay:
        number = len(self.record.replays) + 1
        replay = Replay(run=f"{self.held.name}-bisect-{number}", kind=kind, names=tuple(names), seconds=0.0)
        what = "without" if kind == FEATURES else "with the former"
        log.info("bisect     replay %d of at most %d: %s %s", number, self.limit, what, ", ".join(names))
        started = time.monotonic()
        try:
            # A dataset is found by the fingerprint of its log and of the rows that other days kept for it.
            made, now = self.held.result.artifact("ingest"), _dataset_of(self.held.config, self.store)
            if made != now:
                raise DataError(
                    f"run {self.held.name} was trained on {made}, but its logs and settings now make {now}: replays "
                    "would train on other rows, or be made by another release",
                    hint="put the logs back as they were; --replays 0 names what the records of the run tell by "
                    "themselves",
                )
            config, dataset = self._config(replay)
            code = self.run(config)
            if code > SIGNALLED:
                self.save(stopped=f"a signal ended replay {number}")
                raise Interrupted(code - SIGNALLED, "what was found is recorded; the same command goes on")
            replay = self._judged(replay, code, dataset)
        except ConfigError as error:
            # These settings do not go together; the search goes on with the next suspect.
            replay = replace(replay, message=error.message)
        except NightjarError as error:
            self.save(stopped=f"replay {number} failed: {error.message}")
            raise
        replay = replace(replay, seconds=round(time.monotonic() - started, 3))
        self.save(replays=(*self.record.replays, replay))
        words = f"no verdict: {replay.message}"
        if replay.verdict is not None:
            words = replay.verdict
            if replay.ne is not None:
                words += f", NE {replay.ne:.4f}"
            if replay.change is not None:
                point, low, high = replay.change
                words += f", {point:+.2%} [{low:+.2%}, {high:+.2%}] beside the held model"
            if not replay.same_rows:
                words += f"; {OTHER_ROWS}"
            words += f"; {replay.seconds:.1f} s"
        log.info("bisect     replay %d: %s", number, words)
        return replay

    def _config(self, replay: Replay) -> tuple[Config, str]:
        # Return what the replay runs, and the dataset that it makes if the logs stay as they are.
        config = self.held.config
        if replay.kind == SETTINGS:
            config = _with_former(self.held, replay.names)
        data = config.data
        if replay.kind == FEATURES:
            # The features that are left out count as missing, which would hold the day.
            checks = replace(data.checks, hold=DriftLimits())
            data = replace(data, leave_out=[*data.leave_out, *replay.names], checks=checks)
        config = replace(
            config,
            run=replay.run,
            store=self.store.url,
            force=False,
            data=data,
            train=self._taught_as_held(config.train),
            gate=replace(config.gate, force=None),
            publish=replace(config.publish, judge_beside=self.held.base.version),
            track=TrackConfig(),
        )
        # Another dataset must not take the place of the day's dataset, which is not made again.
        dataset = _dataset_of(config, self.store)
        if dataset != self.held.result.artifact("ingest"):
            config = replace(config, data=replace(data, aside=True))
            dataset = _dataset_of(config, self.store)
        return config, dataset

    def _taught_as_held(self, train: TrainConfig) -> TrainConfig:
        # A replay would learn from the version that it is judged beside. That need not be the teacher of the held run:
        # another version may have come into service before the run was called again, or the run was forced and is
        # judged beside its own former version, which knows the labels of these rows.
        distill, held = train.distill, self.held.config.train.distill
        if self.held.result.train is None or not (distill.weight and held.weight) or distill.teacher is not None:
            return train
        teacher = self.held.result.train.teacher
        if teacher == self.held.base.version:
            return train
        if teacher is None:
            return replace(train, distill=replace(distill, weight=0.0))
        return replace(train, distill=replace(distill, teacher=teacher))

    def _judged(self, replay: Replay, code: int, dataset: str) -> Replay:
        # Record what the gate says of the replay. Its version is then useless, and would only clutter the model's
        # list of versions.
        result = read(Result, self.store, f"{run_directory(replay.run)}/{Result.FILE}")
        if code == ConfigError.exit_code and result.error is not None:
            return replace(replay, message=result.error.message)
        if code or result.gate is None:
            problem = result.error or ErrorPart(message="it ended without a verdict", exit_code=code)
            error = NightjarError(problem.message, hint=problem.hint or f"nightjar result {replay.run}")
            error.exit_code = code or NightjarError.exit_code
            raise error
        if result.artifact("ingest") != dataset:
            raise DataError(f"the logs changed during run {replay.run}", hint="put them back as they were")
        model, version = self.record.model, result.gate.version
        if version and version not in read_current(self.store, model).line:
            remove(self.store, version_path(model, version))
        gate = read(GateRecord, self.store, f"{result.artifact('publish')}/{GATE}")
        config = self.held.config
        change = ne_change(self.store, self.held.name, replay.run, gate=config.gate, seed=config.seed)
        # If predictions are gone, compare the incumbent, which is the same in both. It gets worse without a feature.
        held = self.held.gate
        same = (gate.rows, gate.clicks) == (held.rows, held.clicks)
        same = change is not None or (same and (replay.kind == FEATURES or gate.incumbent == held.incumbent))
        replay = replace(replay, verdict=gate.verdict, reasons=gate.reasons, same_rows=same)
        if replay.kind == FEATURES and same and gate.incumbent is not None:
            replay = replace(replay, incumbent=gate.incumbent.ne)
        if gate.candidate is None:
            return replay
        lost, explained = lost_ne(self.held.gate), None
        if lost and change is not None and self.record.ne is not None:
            explained = round(-change.point * self.record.ne / lost, 3)
        return replace(replay, ne=gate.candidate.ne.point, change=change, explained=explained)

    def _passes(self, replay: Replay) -> bool:
        limit, former = self.held.config.gate.max_ne_increase, self.record.incumbent_ne
        if replay.verdict != PASS or not replay.same_rows:
            return False
        if replay.kind != FEATURES or limit is None or former is None:
            return True
        # The incumbent gets worse without the feature as well, so the limit refers to its NE with the feature.
        return replay.ne is not None and replay.ne <= former * (1 + limit)

    def _shows(self, suspect: Suspect, replay: Replay) -> bool:
        # Whether ``replay`` shows that what it leaves out or changes back spoilt the run.
        if self._passes(replay):
            return True
        change = replay.change
        if change is None:
            return False
        regained = self._regained(replay)
        if regained >= MISLEADS:
            return True
        if suspect.kind == FEATURES and replay.incumbent is not None and regained <= 0 and self.labels_failed:
            # The incumbent never learnt from these rows and is as wrong without the feature, so the labels are left.
            return False
        if suspect.kind != FEATURES or suspect.explained is None:
            return replay.explained is not None and replay.explained >= HALF and change.high < 0
        # The feature carries nothing, and thus explains the loss, if the model is as good without it. A feature that
        # died in most rows still carries something.
        little = replay.explained is not None and replay.explained >= -DEAD
        if not (change.low <= 0 or little):
            return False
        former = self.held.gate.former
        if replay.incumbent is None or former is None or former.importance is None:
            return True
        # The incumbent must not have lost more than these features carried when it was published. If the labels are
        # wrong, it has lost more.
        carried = sum(former.importance[name].rise for name in replay.names if name in former.importance)
        return replay.incumbent.low <= former.ne + carried

    def _regained(self, replay: Replay) -> float:
        # Return the share of the rise of the incumbent's NE since it was published that is gone without the features.
        # The night's model has learnt to live with wrong values; the incumbent has not.
        now, former = self.held.gate.incumbent, self.held.gate.former
        if replay.incumbent is None or now is None or former is None or now.ne.point <= former.ne:
            return 0.0
        if replay.incumbent.high >= now.ne.point:  # chance may explain it
            return 0.0
        return (now.ne.point - replay.incumbent.point) / (now.ne.point - former.ne)

    def _name(self, suspect: Suspect, replay: Replay, likely: Sequence[str]) -> Culprit:
        kind, names, passes, explained = suspect.kind, replay.names, self._passes(replay), replay.explained
        s, them, carry = ("s", "them", "carry") if len(names) > 1 else ("", "it", "carries")
        figures = "it is judged" if replay.ne is None else f"NE is {replay.ne:.4f}"
        if replay.change is not None:
            side = "lower" if replay.change.point <= 0 else "higher"
            figures += f", {percent(abs(replay.change.point))} {side}"
        if kind == SETTINGS:
            changes = "; ".join(describe_setting(name, self.held.changed[name]) for name in names)
            text = f"setting{s} {changes}: changed back, {figures}"
        else:
            text = f"feature{s} {', '.join(names)}"
            if suspect.explained is not None:
                left = "little" if replay.change is not None and replay.change.low > 0 else "nothing"
                text += f", which {carry} {left} any more"
            text += f": without {them}, {figures}"
            if suspect.explained is not None:
                explained = suspect.explained
                text += f"; {suspect.sign}: {percent(explained, 0)} of the rise of NE since then"
            elif self._regained(replay) >= MISLEADS and replay.incumbent is not None:
                explained = round(self._regained(replay), 3)
                text += f"; {self.held.base.version} itself is better without {them}, NE {replay.incumbent.point:.4f}"
                text += f", not {self.record.incumbent_ne:.4f}: the values of today mislead"
        if passes:
            text += ", and the gate passes"
        if likely != names:
            text += f"; most likely it is {', '.join(likely)}, which no replay has confirmed"
        return Culprit(kind=kind, names=names, words=text, replay=replay.run, passes=passes, explained=explained)


def _with_former(held: HeldRun, names: Sequence[str]) -> Config:
    # Return the settings of the held run with those of ``names`` changed back.
    import yaml

    from pipeline.config.compose import from_yaml

    settings = copy.deepcopy(dict(held.settings))
    for name in names:
        tree: Any = settings
        former: Any = held.former
        *groups, last = name.split(".")
        for part in groups:
            tree, former = tree[part], former[part]
        tree.pop(last, None)
        if last in former:
            tree[last] = copy.deepcopy(former[last])
    return from_yaml(yaml.safe_dump(settings, sort_keys=False))


def _dataset_of(config: Config, store: Store) -> str:
    return steps(config, store, last="ingest")[0].path


def _judged_by_former_limits(held: HeldRun, suspect: Suspect) -> Culprit | None:
    # Judge the same figures by the former limits.
    if not would_pass(held.gate, held.config.gate, _with_former(held, suspect.names).gate):
        return None
    changes = "; ".join(describe_setting(name, held.changed[name]) for name in suspect.names)
    noun = "settings" if len(suspect.names) > 1 else "setting"
    words = f"{noun} {changes}: changed back, the gate passes this model"
    return Culprit(kind=LIMITS, names=suspect.names, words=f"{words}, so no replay was needed", passes=True)


def _named_by_signs(held: HeldRun, suspect: Suspect) -> Culprit:
    # Labels judge the incumbent itself, and without the rows of the day the candidate is the incumbent. Both are
    # controls that need no training.
    day, *slices = suspect.names
    where = f" with {', '.join(slices)}" if slices else ""
    if suspect.kind == LABELS:
        words = (
            f"labels of {day}{where}: {suspect.sign}. The incumbent did not learn from them, so no replay was needed"
        )
        return Culprit(kind=LABELS, names=suspect.names, words=words)
    words = f"rows of {day}{where}: without that day the model is {held.base.version}"
    if held.gate.change is not None and not slices:
        # The gate's change is relative to the incumbent's NE; the sentence gives it relative to the candidate's.
        change = held.gate.change.ne.point
        words += f", whose NE on the same test rows is {percent(abs(change / (1 + change)), 2)} "
        words += "lower" if change > 0 else "higher"
    words += f"; {suspect.sign}"
    return Culprit(kind=suspect.kind, names=suspect.names, words=words, explained=suspect.explained)
