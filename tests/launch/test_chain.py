"""The chain with stages of a few lines: order, skipping, force, upstream artifacts, failures, result.json."""

import logging
import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError, DataError, LaunchError
from pipeline.launch.chain import StageChain
from pipeline.launch.run_records import Report, write_report
from pipeline.launch.signals import Interrupted, deadline
from pipeline.records import Result
from pipeline.records.runs import Step
from pipeline.specs import default_stages
from pipeline.store import Artifact, Store
from tests.keys import INPUTS
from tests.logged import listen
from tests.waits import be_interrupted

SUMMARIES = {
    "ingest": {"rows": 5, "rows_train": 4, "rows_test": 1, "rows_quarantined": 0, "bytes_in": 9, "rows_per_s": 1.0},
    "plan": {"tiers": {"hbm_bytes": 0, "ddr_bytes": 1, "ssd_bytes": 0}, "predicted_step_ms": 1.0, "tables": {}},
    "partition": {"towers": 1},
    "train": {
        "train": {
            "samples": 4,
            "steps": 1,
            "global_batch": 4,
            "seconds": 0.1,
            "samples_per_s": 40.0,
            "data_wait_share": 0.0,
            "peak_rss_bytes": 1,
            "world_size": 1,
            "internal": 3,
        },
        "checkpoint": {
            "count": 1,
            "bytes_written": 8,
            "bytes_full_equivalent": 8,
            "stall_share": 0.0,
            "skipped": 0,
            "failed": 0,
        },
        "final": "runs/x/checkpoints/k/step-00000001",
    },
    "evaluate": {"samples": 1, "ne": 0.9, "auc": 0.7, "logloss": 0.5, "calibration": 1.0, "bayes_ne": 0.8},
}


def make_config(*overrides: str) -> Config:
    return compose(["run=x", f"launch.inline=[{','.join(default_stages())}]", *overrides])


def make_steps() -> list[Step]:
    return [
        Step(
            name=name,
            key=f"k-{name}",
            path=f"artifacts/{name}",
            inputs={stage: f"artifacts/{stage}" for stage in INPUTS[name]},
            input_keys={stage: f"k-{stage}" for stage in INPUTS[name]},
            scratch=("scratch",) if name == "train" else (),
        )
        for name in default_stages()
    ]


FINAL = SUMMARIES["train"]["final"]


def write_final(store: Store) -> None:
    """The checkpoint that the train artifact names."""
    with store.draft(FINAL, kind="checkpoint", key="k", config={}, inputs={}) as draft:
        draft.write_json("state.json", {"step": 1})
        draft.commit({"step": 1, "type": "baseline", "parents": []})


class Stages:
    """Stands in for run_stage: commits a small artifact, or raises what it was told to."""

    def __init__(self, store: Store) -> None:
        self.store, self.ran, self.errors = store, [], {}

    def __call__(self, step: Step) -> Artifact:
        self.ran.append(step.name)
        if step.name == "train":
            write_final(self.store)
        with self.store.draft(step.path, kind=step.name, key=step.key, config={}, inputs=step.input_keys) as draft:
            draft.write_json("data.json", {"stage": step.name})
            if step.name in self.errors:
                raise self.errors[step.name]
            return draft.commit(SUMMARIES[step.name])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def stages(store: Store) -> Stages:
    return Stages(store)


def run_chain(store: Store, stages: Stages, *overrides: str) -> Result:
    return StageChain(make_config(*overrides), store, make_steps(), stages, lambda data: None).run()


def test_runs_all_stages_in_order_and_skips_what_is_committed(store: Store, stages: Stages) -> None:
    first = run_chain(store, stages)
    assert stages.ran == default_stages()
    assert {o.status for o in first.stages.values()} == {"done"}
    said = listen()
    again = run_chain(store, stages)
    assert stages.ran == default_stages()
    assert {o.status for o in again.stages.values()} == {"skipped"}
    assert said[0] == "ingest     skipped: artifacts/ingest exists already"
    assert again.eval == first.eval


class Other(logging.Handler):
    """Another run, which holds the lock of an artifact until the chain waits, and then commits it, or gives up."""

    def __init__(self, store: Store, step: Step, stack: ExitStack, *, commits: bool) -> None:
        super().__init__(logging.INFO)
        self.step, self.stack, self.commits = step, stack, commits
        self.draft = stack.enter_context(store.draft(step.path, kind=step.name, key=step.key, config={}, inputs={}))

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for another run" in record.getMessage():
            if self.commits:
                self.draft.write_json("data.json", {"stage": "of another run"})
                self.draft.commit(SUMMARIES[self.step.name])
            self.stack.close()


@pytest.mark.parametrize("commits", [True, False])
def test_a_chain_waits_for_the_dataset_that_another_run_makes(store: Store, stages: Stages, commits: bool) -> None:
    listen()
    own = logging.getLogger("pipeline")
    with ExitStack() as stack:
        other = Other(store, make_steps()[0], stack, commits=commits)
        own.addHandler(other)
        try:
            result = run_chain(store, stages)
        finally:
            own.removeHandler(other)
    assert result.stages["ingest"].status == ("skipped" if commits else "done")
    tried = ["ingest"] if commits else ["ingest", "ingest"]
    assert stages.ran == [*tried, *default_stages()[1:]]
    data = store.read_json("artifacts/ingest/data.json")
    assert data == {"stage": "of another run" if commits else "ingest"}


def test_a_stage_of_one_run_alone_waits_for_nobody(store: Store, stages: Stages) -> None:
    step = next(step for step in make_steps() if step.name == "train")
    with (
        store.draft(step.path, kind="train", key=step.key, config={}, inputs={}),
        pytest.raises(LaunchError, match="artifacts/train is already being written"),
    ):
        run_chain(store, stages)


def test_result_json_has_exactly_the_keys_of_the_architecture(store: Store, stages: Stages) -> None:
    run_chain(store, stages)
    result = store.read_json("runs/x/result.json")
    assert list(result) == ["run", "status", "stages", "ingest", "plan", "train", "checkpoint", "eval"]
    assert list(result["stages"]) == default_stages()
    assert {tuple(o) for o in result["stages"].values()} == {("status", "seconds", "artifact", "started")}
    assert {part: list(result[part]) for part in ("ingest", "plan", "train", "checkpoint", "eval")} == {
        "ingest": ["rows", "rows_train", "rows_test", "rows_quarantined", "bytes_in", "rows_per_s"],
        "plan": ["tiers", "predicted_step_ms", "tables"],
        "train": [
            "samples",
            "steps",
            "global_batch",
            "seconds",
            "samples_per_s",
            "data_wait_share",
            "peak_rss_bytes",
            "world_size",
        ],
        "checkpoint": ["count", "bytes_written", "bytes_full_equivalent", "stall_share", "skipped", "failed"],
        "eval": ["samples", "ne", "auc", "logloss", "calibration", "bayes_ne"],
    }
    assert (result["run"], result["status"]) == ("x", "done")


def test_a_part_of_the_chain_shows_what_it_stands_on_as_skipped(store: Store, stages: Stages) -> None:
    run_chain(store, stages, "stages=[ingest,plan]")
    assert stages.ran == ["ingest", "plan"]
    result = run_chain(store, stages, "stages=[partition]")
    assert stages.ran == ["ingest", "plan", "partition"]
    assert {name: o.status for name, o in result.stages.items()} == {
        "ingest": "skipped",
        "plan": "skipped",
        "partition": "done",
    }
    assert result.train is None
    assert result.eval is None


def test_stages_run_in_the_chains_order_whatever_order_they_are_named_in(store: Store, stages: Stages) -> None:
    run_chain(store, stages, "stages=[plan,ingest]")
    assert stages.ran == ["ingest", "plan"]


def test_a_missing_input_names_the_command_that_makes_it(store: Store, stages: Stages) -> None:
    with pytest.raises(ArtifactError) as caught:
        run_chain(store, stages, "stages=[plan]")
    assert caught.value.hint == "nightjar ingest with the same overrides makes it"
    assert stages.ran == []
    assert store.read_json("runs/x/result.json")["error"]["exit_code"] == 7


def test_force_makes_the_named_stages_again_and_drops_their_scratch(store: Store, stages: Stages) -> None:
    run_chain(store, stages)
    store.write_json("scratch/checkpoint.json", {})
    stages.ran.clear()
    result = run_chain(store, stages, "stages=[train]", "force=true")
    assert stages.ran == ["train"]
    assert not store.exists("scratch")
    assert result.stages["ingest"].status == "skipped"


def test_a_failed_stage_is_recorded_and_the_next_start_goes_on_there(store: Store, stages: Stages) -> None:
    stages.errors["partition"] = DataError("feature C1 is gone", hint="x=y")
    with pytest.raises(DataError):
        run_chain(store, stages)
    result = store.read_json("runs/x/result.json")
    assert result["status"] == "failed"
    assert result["error"] == {"message": "feature C1 is gone", "exit_code": 3, "hint": "x=y"}
    assert result["stages"]["partition"]["status"] == "failed"
    assert result["stages"]["partition"]["artifact"] is None
    assert list(result["stages"]) == ["ingest", "plan", "partition"]
    assert not store.exists("artifacts/partition")
    stages.errors.clear()
    assert run_chain(store, stages).stages["plan"].status == "skipped"
    assert stages.ran == ["ingest", "plan", "partition", "partition", "train", "evaluate"]


def test_an_unexpected_fault_has_exit_code_1_in_the_result(store: Store, stages: Stages) -> None:
    stages.errors["ingest"] = ZeroDivisionError("division by zero")
    with pytest.raises(ZeroDivisionError):
        run_chain(store, stages)
    assert store.read_json("runs/x/result.json")["error"] == {"message": "division by zero", "exit_code": 1}


def test_a_truncated_artifact_is_not_skipped_over(store: Store, stages: Stages) -> None:
    run_chain(store, stages)
    Path(store.full("artifacts/ingest/data.json")).write_text("{}")
    with pytest.raises(ArtifactError, match="has 2 bytes, expected") as caught:
        run_chain(store, stages)
    assert "stages=[ingest] force=true" in caught.value.hint


@pytest.mark.parametrize("damaged", ["state.json", "manifest.json", ""])
def test_a_training_whose_final_checkpoint_is_damaged_runs_again(store: Store, stages: Stages, damaged: str) -> None:
    run_chain(store, stages)
    if damaged:
        Path(store.full(f"{FINAL}/{damaged}")).write_text("{")  # cut short
    else:
        store.fs.rm(store.full(FINAL), recursive=True)
    with pytest.raises(ArtifactError) as caught:
        run_chain(store, stages, "stages=[evaluate]")
    assert FINAL in caught.value.message
    assert caught.value.hint == "nightjar train with the same overrides makes it again"
    stages.ran.clear()
    said = listen()
    run_chain(store, stages, "stages=[train,evaluate]")
    assert stages.ran == ["train"]
    assert said[0].startswith("train      again, from the newest whole checkpoint: ")


def test_several_hosts_cannot_be_trained_on_here_but_can_be_planned_for(store: Store, stages: Stages) -> None:
    inline = "launch.inline=[ingest,plan,partition]"
    for many in (["hardware=h100x2x8"], ["hardware.hosts=17"]):
        with pytest.raises(ConfigError, match="launch=local runs on one machine"):
            run_chain(store, stages, *many, inline)
        run_chain(store, stages, *many, inline, "stages=[ingest,plan]")
    pin, mended = "+plan.tables.C1.sharding=table_row_wise", "++plan.tables.C1.sharding=row_wise"
    others = "plan.sharding_types=[data_parallel,table_wise,row_wise,column_wise]"
    for settings, hint in (
        (["plan.sharding_types=[table_row_wise]"], others),
        (["plan.sharding_types=[table_wise]", pin], mended),
        (["plan.sharding_types=[table_row_wise]", pin], f"{others} {mended}"),
    ):
        with pytest.raises(ConfigError, match="plan asks for table_row_wise") as caught:
            run_chain(store, stages, "hardware.hosts=2", *settings, inline)
        assert caught.value.hint == hint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_chain_with_its_exit_code(store: Store, stages: Stages, number: int) -> None:
    former = signal.getsignal(number)

    def interrupted(step: Step) -> Artifact:
        os.kill(os.getpid(), number)
        be_interrupted()

    with pytest.raises(Interrupted) as caught:
        StageChain(make_config(), store, make_steps(), interrupted, bytes).run()
    assert caught.value.exit_code == 128 + number
    assert store.read_json("runs/x/result.json")["error"]["exit_code"] == 128 + number
    assert signal.getsignal(number) is former


class Stoppable:
    """A scheduler of this machine and its one job: a signal reaches the launcher, the stage says that it stopped."""

    name, outlasts, poll_seconds = "job", False, 0.0

    def __init__(self, store: Store, number: int) -> None:
        self.store, self.number = store, number

    def expect(self, steps: list[Step]) -> None:
        """Nothing takes long."""

    def takes(self, stage: str) -> bool:
        return False

    def find(self, step: Step) -> None:
        """No earlier launcher's."""

    def submit(self, step: Step, config_url: str) -> "Stoppable":
        return self

    def state(self) -> str:
        os.kill(os.getpid(), self.number)
        return "running"

    def output(self) -> bytes:
        return b""

    def logs(self) -> str:
        return ""

    def stop(self, seconds: float) -> None:
        write_report(self.store, "x", "train", Report.of(LaunchError("told to stop after step 3")))

    def cancel(self) -> None:
        """Nothing is left to end."""

    close = cancel


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stage_that_a_signal_stopped_leaves_the_signal_its_exit_code(store: Store, number: int) -> None:
    chain = StageChain(compose(["run=x", "stages=[train]"]), store, make_steps(), run_inline=str, write=bytes)
    chain.selected[0] = replace(chain.selected[0], inputs={})
    chain._runner = Stoppable(store, number)
    with pytest.raises(Interrupted, match="told to stop after step 3") as caught:
        chain.run()
    assert caught.value.exit_code == 128 + number
    assert store.read_json("runs/x/result.json")["error"]["exit_code"] == 128 + number


def test_a_deadline_stops_a_stage_in_the_launchers_own_process() -> None:
    with (
        pytest.raises(LaunchError, match="ingest stage was stopped at its deadline") as caught,
        deadline("ingest", 0.001),
    ):
        be_interrupted()
    assert "launch.deadline_minutes=" in caught.value.hint
