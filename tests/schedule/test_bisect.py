"""``nightjar bisect`` on a store whose runs are only their records: which replays are made, and what they show."""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config import Config
from pipeline.config.compose import compose, to_yaml
from pipeline.core.errors import ArtifactError, ConfigError, GateHeldError
from pipeline.launch.signals import Interrupted
from pipeline.publishing.promotion import read_current
from pipeline.publishing.versions import version_path
from pipeline.records import (
    BisectRecord,
    Check,
    GatePart,
    ModelFigures,
    NightRecord,
    Result,
    StageOutcome,
    read,
)
from pipeline.schedule.bisect import bisect_run
from pipeline.schedule.nightly import read_record, run_night
from pipeline.specs import STAGES
from pipeline.store import Store
from tests.records.made import figures, gate_record
from tests.schedule.test_base import publish

RUN = "clicks-2026-01-02"
DAY = ["publish.model=clicks", "data.day=2026-01-02"]
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
            stages={"publish": StageOutcome(status="done", artifact=path)},
            gate=GatePart(verdict=verdict, version=version),
        )
        self.store.write_bytes(f"runs/{name}/config.yaml", to_yaml(config).encode())
        self.store.write_json(f"{path}/gate.json", record.to_json())
        self.store.write_json(f"runs/{name}/result.json", result.to_json())
        return 0 if "-bisect-" in name or verdict == "PASS" else 6

    def bisect(self, limit: int = 4) -> BisectRecord:
        return bisect_run(self.store, RUN, self.run, limit)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """A published night, and one with other ``SETTINGS`` that is held."""
    store = Store(str(tmp_path))
    publish(store, 1)
    found = Runs(store)
    store.write_bytes("runs/clicks-2026-01-01/config.yaml", to_yaml(FORMER).encode())
    found.run(HELD)
    return found


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


def test_settings_that_spoil_it_together_are_named_together(runs: Runs) -> None:
    """Either of them changed back is enough, so halves are exact; if both must be, the group is named."""
    runs.spoilt = lambda config: any(
        value_of(config, path) == SETTINGS[path] for path in ("train.lr", "train.precision")
    )
    record = runs.bisect(limit=20)
    assert record.culprit is not None and {"train.lr", "train.precision"} <= set(record.culprit.names)


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
    assert record.culprit is not None and record.culprit.kind == "rows"


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
    config = compose([*DAY, *CHANGED, "checkpoint.allow=[train.lr]", "nightly.bisect=3"], night=True)
    record = run_night(config, runs.store, date(2026, 1, 2), runs.run, 0.0)
    assert (record.outcome, record.exit_code) == ("held", 6)
    assert record.culprit is not None and "train.lr was" in record.culprit
    assert len(runs.replayed) == 3
    for page in ("nightly.html", "nightly.md"):
        assert "setting train.lr was" in (tmp_path / "runs" / RUN / page).read_text()
    assert "setting train.lr was" in (tmp_path / "index.html").read_text()
    kept = read_record(runs.store, "clicks", date(2026, 1, 2))
    assert kept == record and isinstance(kept, NightRecord)


def test_a_signal_while_a_night_bisects_leaves_its_verdict(runs: Runs) -> None:
    runs.spoilt, runs.stop_at = spoilt_by("train.lr"), 1
    config = compose([*DAY, *CHANGED, "nightly.bisect=3"], night=True)
    record = run_night(config, runs.store, date(2026, 1, 2), runs.run, 0.0)
    assert record.exit_code == 130
    kept = read_record(runs.store, "clicks", date(2026, 1, 2))
    assert kept is not None and (kept.outcome, kept.exit_code, kept.culprit) == ("held", 6, None)


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
