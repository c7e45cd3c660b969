"""Whole studies on small synthetic logs, and what ends them before they begin."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.compose import compose
from pipeline.config.compose.experiment import experiment_file
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.plugins.tuning import study, study_store
from pipeline.plugins.tuning.study_store import best_of
from pipeline.records.study import BROKEN, DONE, PRUNED, TRYING
from pipeline.store import Store
from tests.commands import nightjar
from tests.plugins.tuning.studies import SPACE, trial

SMALL = [
    "data=synthetic",
    "data.synthetic.rows=6000",
    "data.split.validation_share=0.2",
    "train.global_batch=128",
    "train.threads_per_rank=1",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "hardware=laptop",
    "train.precision=fp32",
]
RATES = "train.lr=tag(log, interval(1e-4,1e-1))"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ([*SMALL, "model.embedding_dim=4"], "nothing to tune", "nightjar tune 'train.lr"),
        ([*SMALL, "train.lrr=choice(1,2)"], "train.lrr", "train.lr"),
        ([*SMALL, "train.lr=interval(-1,1)"], "train.lr is -1", "train.lr"),
        ([*SMALL, "model=choice(dlrm,dcn)"], "model=dcn is unknown", "model=dcnv2"),
        ([*SMALL, RATES, "data.split.validation_share=0"], "validation rows", "data.split.validation_share=0.1"),
        ([*SMALL, RATES, "stages=[ingest,plan]"], "has no train", "leave stages out"),
        ([*SMALL, RATES, "stages=[ingest,plan,partition,train,evaluate,publish]"], "trials are not published", "best"),
        ([*SMALL, RATES, "tune.trial=3"], "tune.trial=3 is set", "leave it out"),
        ([*SMALL, RATES, "force=true"], "force=true", "study=<another name>"),
        ([*SMALL, RATES, "study=a/b"], "tune.study is 'a/b'", "tune.study=a-b"),
    ],
)
def test_a_wrong_study_ends_before_anything_starts(overrides, message: str, hint: str, tmp_path) -> None:
    store = tmp_path / "store"
    with pytest.raises(ConfigError) as caught:
        study.tune([*overrides, f"store={store}"])
    assert message in caught.value.message and hint in f"{caught.value.message} {caught.value.hint}"
    assert not (store / "studies").exists()


def test_the_first_trials_are_the_present_settings_and_the_best_earlier_ones() -> None:
    config = compose(["train.lr=0.01", "model=dcnv2", "model.top_mlp=[8,4]"])
    _, space = study.split(
        ["train.lr=interval(0.001,0.1)", "model=dlrm,dcnv2", "model.top_mlp=choice([8,4],[4])", "train.epochs=1,2"]
    )
    earlier = [trial(0, 0.4, parameters={**dict.fromkeys(space, "x"), "train.lr": 0.05}), trial(1)]
    (first,), given = study._firsts(config, space, earlier)
    assert given
    assert first == {"train.lr": 0.01, "model": "dcnv2", "model.top_mlp": "[8,4]", "train.epochs": "1"}
    best = {**first, "train.lr": 0.02, "model": "dlrm"}
    assert study._firsts(config, space, [trial(0, 0.4, parameters=best)]) == ([first, best], True)
    assert study._firsts(config, space, [trial(0, 0.4, parameters=first)]) == ([first], True)
    assert study._firsts(compose(["train.lr=0.5"]), SPACE, []) == ([], False)


def test_a_warm_start_takes_what_ended_of_an_earlier_study_of_this_store(tmp_path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(ArtifactError, match="no study 'monday' in store .*; studies: none"):
        study._earlier(compose(["tune.warm_start=monday"]), store, "tuesday")
    with pytest.raises(ConfigError, match="tune.warm_start=monday is this study itself"):
        study._earlier(compose(["tune.warm_start=monday"]), store, "monday")
    shared, space = study.split([*SMALL, RATES, "tune.study=monday"])
    study._begun(compose(shared), store, shared, space)
    for number, state in enumerate((DONE, TRYING, PRUNED, BROKEN)):
        study_store.create_trial(store, "monday", trial(number, state=state))
    earlier = study._earlier(compose(["tune.warm_start=monday"]), store, "tuesday")
    assert [each.state for each in earlier] == [DONE, PRUNED]
    assert study._earlier(compose([]), store, "tuesday") == []


def test_an_experiment_file_composes_to_what_the_overrides_do(tmp_path) -> None:
    overrides = [
        "experiment=adult",
        "model=dlrm",
        "data.path=x.data",
        "train=long",
        "train.lr=0.0123",
        "model.top_mlp=[16,8]",
        "+data.dense.extra={column: age}",
        "train.average.kind=ema",
    ]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/best.yaml").write_text(experiment_file(overrides, about=["why"]))
    found, wanted = compose(["experiment=best"], str(tmp_path)), compose(overrides)
    assert found == wanted and "# why" in (tmp_path / "experiment/best.yaml").read_text()
    assert "experiment: adult" not in (tmp_path / "experiment/best.yaml").read_text()
    with pytest.raises(ConfigError, match="data.dense.age is removed, which an experiment file cannot say"):
        experiment_file([*overrides, "~data.dense.age"])


def test_a_study_of_this_name_with_another_space_or_other_settings_is_refused(tmp_path) -> None:
    store = Store(str(tmp_path))
    shared, space = study.split([*SMALL, RATES, "tune.study=s"])
    config = compose(shared)
    record = study._begun(config, store, shared, space)
    assert study._begun(config, store, [*shared, "tune.trials=99"], space) == record
    with pytest.raises(ConfigError, match="study 's' searches train.lr over another space") as caught:
        study._begun(config, store, shared, study.split([*SMALL, "train.lr=0.1,0.2"])[1])
    assert caught.value.hint == "study=<another name> tune.warm_start=s"
    with pytest.raises(ConfigError, match="study 's' has seed=2026, but these overrides have seed=7"):
        study._begun(compose([*shared, "seed=7"]), store, [*shared, "seed=7"], space)
    path = tmp_path / "studies/s/study.json"
    known = json.loads(path.read_text())
    del known["settings"]["seed"]  # as if a later release had added it
    path.write_text(json.dumps(known))
    assert study._begun(config, store, shared, space).settings == known["settings"]


COMMAND = [
    *SMALL,
    RATES,
    "study=s",
    "train.epochs=4",
    "tune.parallel=2",
    "tune.min_epochs=0.5",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
]


def trials(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((folder / "store/studies/s/trials").glob("[0-9]*.json"))]


@pytest.mark.slow
def test_a_study_finds_a_best_trial_that_its_file_makes_again_bit_for_bit(tmp_path) -> None:
    sweep = ["run", "-m", "hydra/sweeper=nightjar", *COMMAND, "tune.trials=3"]
    done = nightjar(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(str(tmp_path / "store"))
    known = study_store.trials_of(store, "s")
    assert [each.number for each in known] == [0, 1, 2] and {each.state for each in known} <= {DONE, PRUNED}
    best = best_of(known)
    assert best is not None and known[0].parameters == {"train.lr": 0.002}
    assert [each.given for each in known] == [True, False, False]
    for each in known:
        assert each.state == PRUNED or sum(each.parts) / each.ne == pytest.approx(sum(best.parts) / best.ne)
    assert len(list((tmp_path / "store/datasets/synthetic").iterdir())) == 1  # trials share it
    for each in known:
        result = json.loads((tmp_path / f"store/runs/{each.run}/result.json").read_text())
        codes = {DONE: None, PRUNED: 9}
        assert (result.get("error") or {}).get("exit_code") == codes[each.state]
        assert each.state == DONE or (each.steps or 0) < (each.steps_total or 0)
    page = (tmp_path / "store/studies/s/report.html").read_text()
    assert "Pareto front" in page and "s-0000" not in page and "train.lr=" in page

    (tmp_path / "my/experiment").mkdir(parents=True)
    text = nightjar("tune", "show", "s", "--yaml", cwd=tmp_path).stdout
    assert text.strip() == (tmp_path / "store/studies/s/best.yaml").read_text().strip()
    (tmp_path / "my/experiment/best.yaml").write_text(text)
    again = nightjar("run", "experiment=best", "run=again", cwd=tmp_path, timeout=600)
    assert again.returncode == 0, again.stderr
    first, second = (
        json.loads((tmp_path / f"store/runs/{run}/result.json").read_text()) for run in (best.run, "again")
    )
    assert first["eval"] == second["eval"] and second["stages"]["ingest"]["status"] == "skipped"
    assert first["train"]["validation"]["ne"] == second["train"]["validation"]["ne"] == best.ne
    shown = json.loads(nightjar("tune", "show", "s", "--json", cwd=tmp_path).stdout)
    assert shown["best"] == best.number and len(shown["trials"]) == 3
    assert nightjar("tune", "ls", cwd=tmp_path).stdout.splitlines()[1].startswith("s ")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place]).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_a_study_on_a_full_disk_goes_on_once_there_is_space_and_its_trial_has_not_failed(disk: Path) -> None:
    """The cheaper tests are those of the loop, in ``test_tuner.py``."""
    command = ["tune", *COMMAND, f"store={disk}/store", "data.synthetic.rows=20000", "tune.trials=1"]
    full = nightjar(*command, cwd=disk, timeout=600)
    assert full.returncode == 7, full.stdout + full.stderr
    assert "no space left" in full.stderr and "the same command continues the study" in full.stderr
    (left,) = trials(disk)
    assert left["state"] == TRYING and "error" not in left
    subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
    again = nightjar(*command, cwd=disk, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    (done,) = trials(disk)
    assert done["state"] == DONE and done["started"] == left["started"]


# A tuner that stops, as by Ctrl-Z, once it has taken in a trial's first look: it still has its study.
STOPS = """
import os, signal, sys
from pipeline.cli import main
from pipeline.plugins.tuning.tuner import Tuner
answer = Tuner._answer
def stop_after_a_look(tuner, trial):
    answer(tuner, trial)
    if tuner.trials[trial.number].looks:
        os.kill(os.getpid(), signal.SIGSTOP)
Tuner._answer = stop_after_a_look
sys.exit(main(["tune", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_study_that_is_killed_loses_and_doubles_nothing(tmp_path) -> None:
    command = [sys.executable, "-c", STOPS, *COMMAND, "tune.trials=3"]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    _, status = os.waitpid(first.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), (tmp_path / "log").read_text()
    second = nightjar("tune", *COMMAND, "tune.trials=3", cwd=tmp_path)
    assert second.returncode == 8 and "study 's' is running already" in second.stderr
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = {each["number"]: each for each in trials(tmp_path)}
    again = nightjar("tune", *COMMAND, "tune.trials=3", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    known = trials(tmp_path)
    assert [each["number"] for each in known] == [0, 1, 2]
    for number, former in before.items():
        now = known[number]
        assert now["parameters"] == former["parameters"] and now["started"] == former["started"]
        assert now["looks"][: len(former["looks"])] == former["looks"]
    for each in known:
        steps = [look["step"] for look in each["looks"]]
        assert each["state"] in (DONE, PRUNED) and steps == sorted(set(steps))
    assert sorted(path.name for path in (tmp_path / "store/runs").iterdir()) == [each["run"] for each in known]
