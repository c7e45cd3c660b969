"""``nightjar bisect`` on a store whose runs are only their records: which replays are made, and what they show."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config import Config
from pipeline.config.compose import compose, to_yaml
from pipeline.core.errors import ArtifactError, ConfigError, DataError, GateHeldError, LaunchError, NightjarError
from pipeline.evaluation.gate.gate import judge
from pipeline.launch.locks import run_lock
from pipeline.launch.signals import Interrupted
from pipeline.publishing.promotion import read_current
from pipeline.publishing.versions import version_path
from pipeline.records import (
    BisectRecord,
    Check,
    ErrorPart,
    Former,
    GatePart,
    Importance,
    Interval,
    ModelFigures,
    Result,
    StageOutcome,
    TrainPart,
    read,
)
from pipeline.schedule.bisect import bisect_run
from pipeline.schedule.nightly import read_record, run_nights
from pipeline.specs import STAGES
from pipeline.stages.steps import steps
from pipeline.store import Store
from tests.records.made import figures, gate_record, interval
from tests.schedule.test_base import publish

RUN = "clicks-2026-01-02"
# Three features in place of 39: each run reads and writes its settings several times.
FEW = [f"~data.dense.I{n}" for n in range(2, 14)] + [f"~data.sparse.C{n}" for n in range(3, 27)]
DAY = [*FEW, "publish.model=clicks", "data.day=2026-01-02"]
START = "checkpoint.init_from=runs/clicks-2026-01-01/checkpoints/c/step-00000009"
SETTINGS = {"train.lr": 0.3, "train.sparse_lr": 0.2, "train.warmup_steps": 7, "train.precision": "fp32"}
CHANGED = [f"{path}={value}" for path, value in SETTINGS.items()]
FORMER = compose([*DAY, START, f"run={RUN}"])
HELD = compose([*DAY, START, f"run={RUN}", *CHANGED])
WHOLE = {"kind": ModelFigures, "calibration_by_prediction": 0.02}
WORSE = {"incumbent": figures(0.80, **WHOLE), "change": figures(0.05, 0.0, 0.0)}
LABELS = Check("labels", "gate.max_label_shift", False, "calibration of the incumbent by prediction is off by 80%")


def value_of(config: Config, path: str) -> object:
    group, name = path.split(".")
    return getattr(getattr(config, group), name)


@dataclass
class Runs:
    """Runs of a store that are held while ``spoilt`` says so of their settings; it keeps those that were replayed."""

    store: Store
    spoilt: Callable[[Config], bool] = lambda config: True
    replayed: list[Config] = field(default_factory=list)
    stop_at: int = 0

    def run(self, config: Config, **gate) -> int:
        """Leave the records of ``config`` as a chain does, and a version."""
        name, verdict = str(config.run), "HOLD" if self.spoilt(config) else "PASS"
        if "-bisect-" in name:
            self.replayed.append(config)
            if len(self.replayed) == self.stop_at:
                return 128 + signal.SIGINT
        version, path = f"v{9 + len(self.replayed):05d}-0000000a", f"runs/{name}/publish/k"
        with self.store.draft(version_path("clicks", version), kind="model", key="k", config={}, inputs={}) as draft:
            draft.commit({})
        ne = 0.84 if verdict == "HOLD" else 0.80
        record = gate_record(
            verdict=verdict, candidate=figures(ne, **WHOLE), incumbent_version="v00001-00000001", **{**WORSE, **gate}
        )
        result = Result(
            run=name,
            status="done",
            stages={
                "ingest": StageOutcome(status="done", artifact=steps(config, self.store, last="ingest")[0].path),
                "publish": StageOutcome(status="done", artifact=path),
            },
            gate=GatePart(verdict=verdict, version=version),
        )
        self.store.write_bytes(f"runs/{name}/config.yaml", to_yaml(config).encode())
        self.store.write_json(f"{path}/gate.json", record.to_json())
        self.store.write_json(f"runs/{name}/result.json", result.to_json())
        return 0 if "-bisect-" in name or verdict == "PASS" else 6

    def bisect(self, limit: int = 4) -> BisectRecord:
        return bisect_run(self.store, RUN, self.run, limit)

    def nights(self, *overrides: str, last: int = 2, deadline: datetime | None = None) -> int:
        """Run the nights of January 2 to ``last``."""
        config = compose([*DAY, *overrides], night=True)

        def config_of(day: date) -> Config:
            return replace(config, data=replace(config.data, day=str(day)))

        days = [date(2026, 1, day) for day in range(2, last + 1)]
        return run_nights(days, config_of, self.store, self.run, keep_going=False, deadline=deadline)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store with a published night, and one with other ``SETTINGS`` that is held."""
    folder = tmp_path_factory.mktemp("made")
    store = Store(str(folder))
    publish(store, 1)
    store.write_bytes("runs/clicks-2026-01-01/config.yaml", to_yaml(FORMER).encode())
    Runs(store).run(HELD)
    return folder


@pytest.fixture
def runs(tmp_path: Path, made: Path) -> Runs:
    """The runs of a copy of the store ``made``."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return Runs(Store(str(tmp_path)))


def spoilt_by(*paths: str) -> Callable[[Config], bool]:
    return lambda config: all(value_of(config, path) == SETTINGS[path] for path in paths)


@pytest.mark.parametrize("path", ["train.lr", "train.precision"])
def test_the_setting_that_spoilt_the_night_is_found_by_halves(runs: Runs, path: str) -> None:
    runs.spoilt = spoilt_by(path)
    record = runs.bisect()
    assert record.culprit is not None
    assert (record.culprit.kind, record.culprit.names, record.culprit.passes) == ("settings", (path,), True)
    assert f"{path} was " in record.culprit.words and f", is {SETTINGS[path]}: changed back" in record.culprit.words
    assert len(record.replays) <= 4 and set(record.replays[0].names) == set(SETTINGS)
    assert read(BisectRecord, runs.store, f"runs/{RUN}/bisect.json") == record


def test_a_replay_is_the_held_run_with_the_former_settings_and_publishes_nothing(runs: Runs) -> None:
    runs.spoilt = spoilt_by("train.lr")
    runs.bisect(limit=1)
    (config,) = runs.replayed
    assert all(value_of(config, path) == value_of(FORMER, path) for path in SETTINGS)
    assert (config.run, config.publish.judge_beside, config.force) == (f"{RUN}-bisect-1", "v00001-00000001", False)
    assert config.track.to == []
    assert read_current(runs.store, "clicks").line == ("v00001-00000001",)
    assert "v00010-0000000a" not in runs.store.names("models/clicks"), "the version of a replay is removed"
    assert "v00009-0000000a" in runs.store.names("models/clicks"), "that of the held night stays"


@pytest.mark.parametrize(
    ("taught_by", "weight", "teacher"),
    [("v00001-00000001", 0.5, None), ("v00007-00000007", 0.5, "v00007-00000007"), (None, 0.0, None)],
)
def test_a_replay_has_the_teacher_of_the_held_run(runs: Runs, taught_by: str, weight: float, teacher: str) -> None:
    """By itself it would learn from the version that it is judged beside."""
    taught = ["train.distill.weight=0.5"]
    runs.store.write_bytes(
        "runs/clicks-2026-01-01/config.yaml", to_yaml(compose([*DAY, START, f"run={RUN}", *taught])).encode()
    )
    runs.run(compose([*DAY, START, f"run={RUN}", *CHANGED, *taught]))
    result = read(Result, runs.store, f"runs/{RUN}/result.json")
    result = replace(result, train=TrainPart(teacher=taught_by))
    runs.store.write_json(f"runs/{RUN}/result.json", result.to_json())
    runs.bisect(limit=1)
    (config,) = runs.replayed
    assert (config.train.distill.weight, config.train.distill.teacher) == (weight, teacher)


def test_settings_that_spoil_it_together_are_named_together(runs: Runs) -> None:
    """Either of them changed back is enough, so halves are exact; if both must be, the group is named."""
    runs.spoilt = lambda config: any(
        value_of(config, path) == SETTINGS[path] for path in ("train.lr", "train.precision")
    )
    record = runs.bisect(limit=20)
    assert record.culprit is not None and {"train.lr", "train.precision"} <= set(record.culprit.names)
    assert record.culprit.passes and "most likely" not in record.culprit.words


def test_a_half_that_takes_away_some_of_the_loss_is_not_all_where_the_gate_passes_without_the_whole(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two settings costs half of the loss: the figures of replays that have predictions say so."""

    def ne(config: Config) -> float:
        return 0.80 + 0.02 * sum(value_of(config, path) == SETTINGS[path] for path in ("train.lr", "train.precision"))

    def change(store: Store, run: str, other: str, **settings) -> Interval:
        config = next(config for config in runs.replayed if config.run == other)
        point = ne(config) / 0.84 - 1
        return Interval(point, point - 1e-4, point + 1e-4)

    monkeypatch.setattr("pipeline.schedule.bisect.ne_change", change)
    runs.spoilt = lambda config: ne(config) > 0.801
    record = runs.bisect(limit=20)
    assert record.culprit is not None and record.culprit.passes
    assert {"train.lr", "train.precision"} <= set(record.culprit.names)


def test_at_the_limit_what_no_replay_has_confirmed_is_only_likely(runs: Runs) -> None:
    runs.spoilt = lambda config: any(
        value_of(config, path) == SETTINGS[path] for path in ("train.lr", "train.precision")
    )
    record = runs.bisect(limit=3)
    assert record.culprit is not None and set(record.culprit.names) == set(SETTINGS)
    assert "; most likely it is train." in record.culprit.words
    assert record.culprit.names == record.replays[0].names and record.culprit.replay == record.replays[0].run


def test_the_limit_leaves_what_is_known_by_then(runs: Runs) -> None:
    runs.spoilt = spoilt_by("train.lr")
    record = runs.bisect(limit=2)
    assert len(record.replays) == 2 and record.culprit is not None
    assert "train.lr" in record.culprit.names and len(record.culprit.names) == 2
    none = runs.bisect(limit=0)
    assert none.culprit is None and none.replays == ()
    assert none.stopped == "the limit of 0 replays was reached before settings " + ", ".join(none.suspects[0].names)


def test_where_no_setting_helps_the_rows_of_the_day_are_left(runs: Runs) -> None:
    record = runs.bisect()
    assert [replay.verdict for replay in record.replays] == ["HOLD"]
    assert record.culprit is not None and (record.culprit.kind, record.culprit.replay) == ("rows", None)
    assert "without that day the model is v00001-00000001, whose NE on the same test rows is 4.76% lower" in (
        record.culprit.words
    )


def test_labels_need_no_replay(runs: Runs) -> None:
    runs.run(FORMER, checks=(LABELS,))
    record = runs.bisect()
    assert record.replays == () and record.culprit is not None
    assert record.culprit.kind == "labels" and LABELS.words in record.culprit.words


def test_without_replays_the_signs_alone_decide(runs: Runs) -> None:
    runs.run(HELD, checks=(LABELS,))
    record = runs.bisect(limit=0)
    assert [suspect.kind for suspect in record.suspects] == ["settings", "labels"]
    assert record.culprit is not None and record.culprit.kind == "labels"
    assert record.stopped is not None and "the limit of 0 replays was reached before settings" in record.stopped


def test_a_signal_keeps_what_was_found_and_the_same_command_goes_on(runs: Runs) -> None:
    runs.spoilt, runs.stop_at = spoilt_by("train.precision"), 2
    with pytest.raises(Interrupted) as stop:
        runs.bisect()
    assert stop.value.exit_code == 130
    kept = read(BisectRecord, runs.store, f"runs/{RUN}/bisect.json")
    assert [replay.verdict for replay in kept.replays] == ["PASS"]
    assert kept.culprit is None and kept.stopped == "a signal ended replay 2"
    record = runs.bisect()
    assert record.culprit is not None and record.culprit.names == ("train.precision",) and record.stopped is None


def test_a_replay_whose_settings_do_not_go_together_has_no_verdict_and_says_why(runs: Runs) -> None:
    def fail(config: Config) -> int:
        raise ConfigError("these do not go together")

    record = bisect_run(runs.store, RUN, fail, 4)
    assert [(replay.verdict, replay.message) for replay in record.replays] == [(None, "these do not go together")]
    assert record.stopped is not None and record.stopped.endswith("cannot be told: these do not go together")
    assert record.culprit is None, "the rows are only what is left once all else was tried"


@pytest.mark.parametrize("raised", [True, False])
def test_a_replay_that_fails_ends_the_search_and_acquits_nobody(runs: Runs, raised: bool) -> None:
    def fail(config: Config) -> int:
        error = LaunchError("the store did not answer")
        if raised:
            raise error
        result = Result(run=str(config.run), status="failed", error=ErrorPart(message=error.message, exit_code=8))
        runs.store.write_json(f"runs/{config.run}/result.json", result.to_json())
        return 8

    with pytest.raises(NightjarError, match="the store did not answer") as problem:
        bisect_run(runs.store, RUN, fail, 4)
    assert problem.value.exit_code == 8
    kept = read(BisectRecord, runs.store, f"runs/{RUN}/bisect.json")
    assert (kept.culprit, kept.stopped) == (None, "replay 1 failed: the store did not answer")


def test_one_search_of_a_run_at_a_time(runs: Runs) -> None:
    with run_lock(runs.store, RUN, 30.0), pytest.raises(LaunchError, match=f"run '{RUN}' is running already"):
        runs.bisect()
    assert runs.replayed == []


@pytest.mark.parametrize("log", ["1\tb\n1\tc\n", None])
def test_logs_that_have_changed_since_are_refused_before_a_replay(tmp_path: Path, runs: Runs, log: str | None) -> None:
    path = tmp_path / "day_2026-01-02.tsv"
    path.write_text("1\tb\n")
    config = compose(["data=criteo", f"data.path='{tmp_path}/day_{{day}}.tsv'", *DAY, START, f"run={RUN}"])
    runs.store.write_bytes("runs/clicks-2026-01-01/config.yaml", to_yaml(config).encode())
    runs.run(replace(config, train=replace(config.train, lr=0.3)))
    if log is None:
        path.unlink()
    else:
        path.write_text(log)
    with pytest.raises(DataError):
        runs.bisect()
    assert runs.replayed == []
    assert "replay 1 failed: " in str(read(BisectRecord, runs.store, f"runs/{RUN}/bisect.json").stopped)
    assert runs.bisect(limit=0).replays == ()


@pytest.mark.parametrize("setting", ["data.sparse_defaults.min_count=5", "train.global_batch=2048"])
def test_another_dataset_is_put_aside_and_that_of_the_day_is_not(runs: Runs, setting: str) -> None:
    held = compose([*DAY, START, f"run={RUN}", *CHANGED, setting])
    path = setting.partition("=")[0]
    runs.run(held)
    runs.spoilt = lambda config: config.train.lr == SETTINGS["train.lr"]
    record = runs.bisect(limit=20)
    assert record.culprit is not None and record.culprit.names == ("train.lr",)
    of_day = read(Result, runs.store, f"runs/{RUN}/result.json").artifact("ingest")
    for config, replay in zip(runs.replayed, record.replays, strict=True):
        made = steps(replace(config, data=replace(config.data, aside=False)), runs.store, last="ingest")[0].path
        assert config.data.aside == (made != of_day), replay.names
        assert not config.data.aside or path in replay.names
    asides = {config.data.aside for config in runs.replayed}
    assert asides == ({True, False} if path.startswith("data.") else {False})


def test_limits_of_the_gate_are_judged_by_the_record_alone(runs: Runs) -> None:
    strict = compose([*DAY, START, f"run={RUN}", "gate.max_ne_increase=0.0001", "train.lr=0.3"])
    measured = {
        "candidate": figures(0.8004, **WHOLE),
        "change": replace(figures(0.0005, 0.0, 0.0), ne=interval(0.0005, 0.0002)),
    }
    record = gate_record(incumbent=figures(0.80, **WHOLE), incumbent_version="v00001-00000001", **measured)
    runs.run(strict, checks=judge(record, strict.gate).checks, change=measured["change"])
    path = f"runs/{RUN}/publish/k/gate.json"
    runs.store.write_json(path, judge(record, strict.gate).to_json())
    found = runs.bisect()
    assert found.culprit is not None and (found.culprit.kind, found.replays) == ("limits", ())
    assert found.culprit.names == ("gate.max_ne_increase",) and "is 0.0001: changed back" in found.culprit.words
    worse = replace(record, candidate=figures(0.84, **WHOLE), change=figures(0.05, 0.0, 0.0))
    runs.store.write_json(path, judge(worse, strict.gate).to_json())
    runs.spoilt = spoilt_by("train.lr")
    other = runs.bisect()
    assert [replay.names for replay in other.replays] == [("train.lr",)], "the replay keeps the limits of the held run"
    assert [config.gate.max_ne_increase for config in runs.replayed] == [0.0001]


def test_settings_that_decide_the_test_rows_are_not_replayed_and_a_pass_on_other_rows_is_no_proof(runs: Runs) -> None:
    runs.run(compose([*DAY, START, f"run={RUN}", "data.split.test_share=0.3", "seed=9"]))
    record = runs.bisect()
    assert [suspect.kind for suspect in record.suspects] == ["rows"]
    assert "data.split.test_share was 0.2, is 0.3" in record.suspects[0].sign

    def other_rows(config: Config) -> int:
        return runs.run(config, rows=4000)

    runs.run(HELD)
    runs.spoilt = lambda config: False
    record = bisect_run(runs.store, RUN, other_rows, 4)
    assert [(replay.verdict, replay.same_rows) for replay in record.replays] == [("PASS", False)]
    assert record.culprit is None and "judged on other test rows" in str(record.stopped)


@pytest.mark.parametrize(
    ("incumbent", "worse", "kind"), [(0.80, 0.005, "features"), (0.80, 0.02, "rows"), (0.87, 0.005, "labels")]
)
def test_a_feature_that_carries_little_any_more_is_named_unless_the_incumbent_lost_more_than_that(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, incumbent: float, worse: float, kind: str
) -> None:
    """It carried 0.06 of NE, the incumbent had 0.78, and the model is a little worse without it."""
    change = Interval(worse, worse - 0.001, worse + 0.001)
    monkeypatch.setattr("pipeline.schedule.bisect.ne_change", lambda *args, **settings: change)
    before, now = ({"C1": Importance(rise=rise, error=0.001)} for rise in (0.06, 0.005))
    former = Former(ne=0.78, calibration=1.0, calibration_by_prediction=0.02, importance=before)
    gate = {"incumbent": figures(incumbent, **WHOLE), "change": figures(0.84 / incumbent - 1, 0.0, 0.0)}
    runs.run(FORMER, former=former, importance=now, checks=(LABELS,) if kind == "labels" else (), **gate)
    record = bisect_run(runs.store, RUN, lambda config: runs.run(config, **gate), 4)
    assert [(replay.names, replay.verdict) for replay in record.replays] == [(("C1",), "HOLD")]
    assert record.culprit is not None and record.culprit.kind == kind
    assert ("carries little any more" in record.culprit.words) == (kind == "features")


@pytest.mark.parametrize(("without", "culprit"), [(0.77, ("C1",)), (0.795, None)])
def test_a_feature_without_which_the_incumbent_is_clearly_better_is_named_though_the_model_needs_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, without: float, culprit: tuple[str, ...] | None
) -> None:
    """Its values are wrong today: the night's model has learnt them as they are, the incumbent has not."""

    def run(config: Config) -> int:
        return runs.run(config, incumbent=figures(without, **WHOLE))

    monkeypatch.setattr("pipeline.schedule.bisect.ne_change", lambda *args, **settings: Interval(0.01, 0.009, 0.011))
    before, now = (
        {"C1": Importance(rise=rise, error=0.001), "C2": Importance(rise=0.1, error=0.001)} for rise in (0.06, 0.02)
    )
    former = Former(ne=0.76, calibration=1.0, calibration_by_prediction=0.02, importance=before)
    runs.run(FORMER, former=former, importance=now, change=figures(-0.001, 0.0, 0.0))
    record = bisect_run(runs.store, RUN, run, 4)
    (replay,) = record.replays
    assert (replay.kind, replay.names, replay.verdict) == ("features", ("C1",), "HOLD")
    assert replay.incumbent == figures(without).ne
    assert (record.culprit and record.culprit.names) == culprit
    if record.culprit is not None:
        assert "v00001-00000001 itself is better without it, NE 0.7700, not 0.8000" in record.culprit.words
        assert record.culprit.explained == pytest.approx(0.75)


@pytest.mark.parametrize(("without", "kind"), [(0.80, "labels"), (0.81, "labels"), (0.787, "features")])
def test_a_feature_is_not_named_where_the_incumbent_fails_the_checks_of_labels_as_badly_without_it(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, without: float, kind: str
) -> None:
    """The night's model would be better without C1, which says little where its labels may be wrong."""
    monkeypatch.setattr("pipeline.schedule.bisect.ne_change", lambda *args, **settings: Interval(-0.04, -0.06, -0.03))
    monkeypatch.setattr("pipeline.schedule.suspects._moved_values", lambda signs: {"C1": "values of C1 moved"})
    former = Former(ne=0.74, calibration=1.0, calibration_by_prediction=0.02)
    runs.run(FORMER, former=former, checks=(LABELS,), change=figures(0.05, 0.0, 0.0))
    record = bisect_run(runs.store, RUN, lambda config: runs.run(config, incumbent=figures(without, **WHOLE)), 1)
    assert [replay.names for replay in record.replays] == [("C1",)]
    assert record.culprit is not None and record.culprit.kind == kind


def test_what_the_gate_did_not_hold_is_refused(runs: Runs) -> None:
    runs.spoilt = lambda config: False
    runs.run(HELD)
    with pytest.raises(ConfigError, match=f"run {RUN} was published, expected one that the gate held"):
        runs.bisect()
    with pytest.raises(ArtifactError, match="no run 'clicks-2026-01-09'"):
        bisect_run(runs.store, "clicks-2026-01-09", runs.run, 4)


def test_what_a_person_held_is_refused(runs: Runs) -> None:
    rows = Check("rows", "gate.min_rows", True, "5,000 rows scored")
    runs.run(
        HELD, checks=(rows,), reasons=("v00009-0000000a was rolled back",), model="clicks", version="v00009-0000000a"
    )
    with pytest.raises(ConfigError, match="passes every check of the gate and was held by a person: v00009") as error:
        runs.bisect()
    assert "nightjar models promote clicks v00009-0000000a" in error.value.hint


def test_a_model_that_was_trained_from_nothing_is_not_the_incumbent_without_its_rows(runs: Runs) -> None:
    runs.run(replace(HELD, checkpoint=replace(HELD.checkpoint, init_from=None)))
    record = runs.bisect()
    assert [suspect.kind for suspect in record.suspects] == ["settings"] and record.culprit is None
    other = "runs/other/checkpoints/c/step-00000001"
    runs.run(replace(HELD, checkpoint=replace(HELD.checkpoint, init_from=other)))
    record = runs.bisect()
    assert [suspect.kind for suspect in record.suspects] == ["settings"] and record.culprit is None


def test_settings_of_the_incumbent_are_read_from_its_version_where_its_run_is_gone(runs: Runs) -> None:
    runs.store.fs.rm(runs.store.full("runs/clicks-2026-01-01/config.yaml"))
    with pytest.raises(ArtifactError, match="the settings of v00001-00000001 are gone"):
        runs.bisect()
    runs.store.write_bytes(f"{version_path('clicks', 'v00001-00000001')}/config.yaml", to_yaml(FORMER).encode())
    assert [suspect.kind for suspect in runs.bisect(limit=0).suspects] == ["settings", "rows"]


def test_a_run_without_an_incumbent_has_nothing_to_be_compared_with(runs: Runs) -> None:
    path = f"runs/{RUN}/publish/k/gate.json"
    runs.store.write_json(path, runs.store.read_json(path) | {"incumbent_version": None})
    with pytest.raises(ConfigError, match="had no incumbent"):
        runs.bisect()


def test_a_model_that_is_only_judged_has_the_incumbent_that_is_asked_for_and_ends_no_run(runs: Runs) -> None:
    judged = replace(HELD, publish=replace(HELD.publish, judge_beside="v00001-00000001"))
    stage = STAGES.get("publish")
    assert stage.named_settings(judged, runs.store, {}) == {"incumbent": "v00001-00000001"}
    unknown = replace(HELD, publish=replace(HELD.publish, judge_beside="v00007-00000007"))
    with pytest.raises(ArtifactError, match="has no version 'v00007-00000007'"):
        stage.named_settings(unknown, runs.store, {})
    summary = {"gate": {"verdict": "HOLD", "reasons": ["NE rose"], "version": "v00002-00000002"}}
    for config in (judged, HELD):
        settings = stage.key_settings(config)
        path = f"runs/x/publish/{config is HELD}"
        with runs.store.draft(path, kind="publish", key="k", config=settings, inputs={}) as draft:
            artifact = draft.commit(summary)
        if config is HELD:
            with pytest.raises(GateHeldError):
                stage.accept(artifact)
        else:
            stage.accept(artifact)


def test_a_dataset_that_is_put_aside_is_not_that_of_its_day() -> None:
    aside = replace(HELD, data=replace(HELD.data, aside=True))
    stage = STAGES.get("ingest")
    assert stage.path(HELD, "k") == f"datasets/{HELD.data.name}/2026-01-02/k"
    assert stage.path(aside, "k") == f"datasets/{HELD.data.name}.aside/2026-01-02/k"
    assert stage.key_settings(aside) == stage.key_settings(HELD)


def test_a_held_night_spends_replays_on_itself_and_its_page_names_the_culprit(tmp_path: Path, runs: Runs) -> None:
    runs.spoilt = spoilt_by("train.lr")
    settings = [*CHANGED, "checkpoint.allow=[train.lr]", "nightly.bisect=3"]
    assert runs.nights(*settings) == 6
    assert len(runs.replayed) == 3
    for page in ("nightly.html", "nightly.md"):
        assert "setting train.lr was" in (tmp_path / "runs" / RUN / page).read_text()
    assert "setting train.lr was" in (tmp_path / "index.html").read_text()
    kept = read_record(runs.store, "clicks", date(2026, 1, 2))
    assert kept is not None and (kept.outcome, kept.exit_code) == ("held", 6)
    assert kept.culprit is not None and "train.lr was" in kept.culprit
    assert runs.nights(*settings) == 6 and len(runs.replayed) == 3, "once for each held version"


def test_a_signal_while_a_night_bisects_leaves_its_verdict_and_ends_no_later_night(runs: Runs) -> None:
    runs.spoilt, runs.stop_at = spoilt_by("train.lr"), 1
    assert runs.nights(*CHANGED, "nightly.bisect=3", last=3) == 130
    for day in (2, 3):
        kept = read_record(runs.store, "clicks", date(2026, 1, day))
        assert kept is not None and (kept.outcome, kept.exit_code, kept.culprit) == ("held", 6, None)


def test_no_replay_begins_that_would_not_end_before_the_deadline(runs: Runs) -> None:
    deadline = datetime(2026, 1, 2, tzinfo=UTC)
    record = bisect_run(runs.store, RUN, runs.run, 4, deadline)
    assert record.replays == () and record.culprit is None
    assert "no replay would have ended before the deadline before settings" in str(record.stopped)


def test_what_spoilt_a_version_is_not_shown_for_a_later_one(tmp_path: Path, runs: Runs, capsys) -> None:
    runs.spoilt = spoilt_by("train.lr")
    runs.bisect(limit=1)
    assert cli.main(["result", RUN, "--store", str(tmp_path)]) == 0
    assert "was held beside" in capsys.readouterr().out
    runs.run(FORMER)
    assert cli.main(["result", RUN, "--store", str(tmp_path)]) == 0
    assert "was held beside" not in capsys.readouterr().out


def test_the_command_prints_what_was_found_and_ends_with_6_where_nothing_was(
    tmp_path: Path, runs: Runs, capsys
) -> None:
    better = {"incumbent": figures(0.85, **WHOLE), "change": figures(-0.01, 0.0, 0.0)}
    runs.run(FORMER, **better)
    assert cli.main(["bisect", RUN, "--store", str(tmp_path), "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["culprit"] is None
    runs.run(FORMER, checks=(LABELS,))
    assert cli.main(["bisect", RUN, f"store={tmp_path}"]) == 0
    found = capsys.readouterr().out
    assert f"run {RUN} was held beside v00001-00000001 of model clicks\n\nlabels of " in found
    assert cli.main(["result", RUN, "--store", str(tmp_path)]) == 0
    assert "labels of " in capsys.readouterr().out
    assert cli.main(["bisect", "clicks-2026-01-01", "--store", str(tmp_path)]) == 7
    assert "hint: nightjar nights ls" in capsys.readouterr().err


def test_the_sign_that_names_the_culprit_is_printed_once(
    runs: Runs, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    runs.run(HELD, checks=(LABELS,))
    drift = {"checks": {"drift": {"C1": {"missing_share": 0.4}}}}
    dataset = steps(HELD, runs.store, last="ingest")[0].path
    runs.store.write_bytes(f"{dataset}/quality.json", json.dumps(drift).encode())
    assert cli.main(["bisect", RUN, "--replays", "0", "--store", runs.store.url]) == 0
    said = capfd.readouterr()
    assert (said.out + said.err + caplog.text).count(LABELS.words) == 1
    assert "labels this log: named above" in said.out
    assert re.search(r"features C1: .*missing.share.* by 0\.4", said.out)


def test_a_held_night_says_where_its_gate_page_is_and_what_spoilt_it(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    runs.spoilt = spoilt_by("train.lr")
    with caplog.at_level("INFO", logger="pipeline"):
        assert runs.nights(*CHANGED, "nightly.bisect=1") == 6
    said = [record.getMessage() for record in caplog.records]
    assert f"gate       {runs.store.url_of(f'runs/{RUN}/publish/k/gate.html')}" in said
    assert sum("changed back" in line for line in said) == 1
