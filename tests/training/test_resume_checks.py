"""A training that is made longer goes on, one that is made shorter says so; another coding of the end is written."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.config import CheckpointConfig, TrainConfig
from pipeline.config.train import AverageConfig
from pipeline.core.errors import ConfigError
from pipeline.training.resume_checks import (
    check_average,
    check_finer,
    check_length,
    coding_of,
    length_line,
    planned_before,
    rates_differ,
    same_coding,
)
from tests.commands import nightjar, nightjar_in_turn
from tests.few_features import FEW

SMALL = [
    *FEW,
    "data.synthetic.rows=3000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=256",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
    "train.threads_per_rank=1",
    "train.warmup_steps=2",
    "train.log_every_steps=2",
]
TRAIN, CONSTANT = "stages=[ingest,plan,partition,train]", "train.schedule=constant"
STRICT = ["train.guard.min_logit_std=1e9", "train.guard.collapse_after_steps=8", "train.guard.window_steps=2"]
JOBS = {
    "first": ["run=a", TRAIN, CONSTANT],
    "longer": ["run=a", TRAIN, CONSTANT, "train.epochs=2"],
    "straight": ["run=b", TRAIN, CONSTANT, "train.epochs=2"],
    "first again": ["run=a", TRAIN, CONSTANT],
    "shorter": ["run=a", TRAIN, CONSTANT, "train.epochs=2", "train.max_steps=13"],
    "coarser": ["run=a", CONSTANT, "train.epochs=2", "checkpoint.final_quantise='8'"],
    "cut": ["run=a", TRAIN, CONSTANT, "train.epochs=3", "train.max_steps=25"],
    "coarse": ["run=c", TRAIN, CONSTANT, "train.max_steps=3", "checkpoint.final_quantise='8'"],
    "finer": ["run=c", TRAIN, CONSTANT, "train.max_steps=3"],
    "falling": ["run=d", TRAIN, "train.schedule=linear"],
    "falling on": ["run=d", TRAIN, "train.schedule=linear", "train.epochs=2"],
    "stopped": ["run=e", TRAIN, "checkpoint.every_steps=3", *STRICT],
    "guarded less": ["run=e", TRAIN, "checkpoint.every_steps=3", "train.guard.collapse=false", "train.pipeline=base"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The store, and what every job said, errors behind it."""
    store = tmp_path_factory.mktemp("length") / "store"
    jobs = [["run", f"store={store}", *SMALL, *job] for job in JOBS.values()]
    done = [*nightjar_in_turn(jobs[:-1]), nightjar(*jobs[-1])]  # the last one follows a guard, which ends its process
    texts = [f"{each.stdout}code {each.returncode}{each.stderr}" for each in done]
    return store, dict(zip(JOBS, texts, strict=True))


def final_of(store: Path, text: str) -> Path:
    """The last checkpoint of the training that a job's output says it committed."""
    (path,) = re.findall(r"train +done in .*?: (\S+)", text)
    return store / json.loads((store / path / "train.json").read_text())["final"]


def content(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold numbers."""
    return {str(p.relative_to(checkpoint)): p.read_bytes() for p in checkpoint.rglob("*.safetensors")}


def test_more_epochs_go_on_from_the_end_of_the_former_ones(said: tuple[Path, dict[str, str]]) -> None:
    store, text = said
    assert "code 0" in text["first"] and "code 0" in text["longer"]
    assert re.search(r"resumed from runs/a/checkpoints/\w+/step-00000010 after step 10\n", text["longer"])
    assert "train.epochs was 1, is 2: training continues to step 20; 10 were planned" in text["longer"]
    assert "resumed" not in text["straight"]


def test_what_went_on_is_bit_for_bit_what_was_planned_so_from_the_start(said: tuple[Path, dict[str, str]]) -> None:
    store, text = said
    assert content(final_of(store, text["longer"])) == content(final_of(store, text["straight"]))
    assert len(content(final_of(store, text["longer"]))) > 6


def test_the_shorter_training_that_is_finished_stays_finished(said: tuple[Path, dict[str, str]]) -> None:
    store, text = said
    assert "train      skipped: " in text["first again"] and "code 0" in text["first again"]
    assert (final_of(store, text["first"]) / "manifest.json").is_file()


def test_a_training_cannot_be_made_shorter_than_it_is(said: tuple[Path, dict[str, str]]) -> None:
    _, text = said
    assert "code 2" in text["shorter"]
    assert "train.epochs=2 train.max_steps=13 plan 13 steps, but this training has already taken 20" in text["shorter"]
    assert "hint: train.max_steps=null for the training as it is; run=<another name>" in text["shorter"]


def test_max_steps_may_be_raised_in_the_middle_of_an_epoch(said: tuple[Path, dict[str, str]]) -> None:
    store, text = said
    assert "train.epochs was 2, is 3 and train.max_steps was null, is 25" in text["cut"]
    assert final_of(store, text["cut"]).name == "step-00000025"


def test_the_end_in_fewer_bits_is_written_beside_what_is_there(said: tuple[Path, dict[str, str]]) -> None:
    store, text = said
    assert "code 0" in text["coarser"]
    coarse, whole = final_of(store, text["coarser"]), final_of(store, text["straight"])
    assert coarse.parent.name.endswith("-8-fp32") and coarse.name == whole.name
    assert sum(map(len, content(coarse).values())) < sum(map(len, content(whole).values()))
    assert final_of(store, text["longer"]).is_dir()
    assert re.search(r"evaluate +done", text["coarser"])


def test_bits_that_are_gone_are_not_promised(said: tuple[Path, dict[str, str]]) -> None:
    _, text = said
    assert "code 0" in text["coarse"] and "code 2" in text["finer"]
    assert "was written with checkpoint.final_quantise=8" in text["finer"]
    assert "hint: checkpoint.final_quantise=8; or run=<another name>" in text["finer"]


def test_a_schedule_that_ends_later_says_what_becomes_of_the_rates(said: tuple[Path, dict[str, str]]) -> None:
    _, text = said
    assert (
        "train.schedule=linear now ends there: the learning rates, 0 of their peak in the last step taken, are "
        in (text["falling on"])
    )
    assert "code 0" in text["falling on"]


def test_what_a_guard_advises_goes_on_where_it_stopped(said: tuple[Path, dict[str, str]]) -> None:
    _, text = said
    assert "code 5" in text["stopped"] and "train.guard.collapse=false to continue" in text["stopped"]
    assert "code 0" in text["guarded less"]
    assert re.search(r"resumed from runs/e/checkpoints/\w+/step-0000000[369] after step [369]\n", text["guarded less"])


def recorded(**train: object) -> dict[str, object]:
    return {"train": asdict(TrainConfig(**train)), "checkpoint": asdict(CheckpointConfig())}


def test_the_steps_planned_before_are_those_of_the_settings_recorded() -> None:
    train = TrainConfig(global_batch=100, epochs=3)
    assert planned_before(train, recorded(global_batch=100, epochs=2, max_steps=50), 1000) == 20
    assert planned_before(train, {}, 1000) == 30


def test_the_hint_for_a_training_that_is_too_long_names_what_it_was_planned_with() -> None:
    check_length(TrainConfig(), recorded(), 7, 7, "p")
    with pytest.raises(ConfigError) as caught:
        check_length(TrainConfig(epochs=1, max_steps=5), recorded(epochs=2), 9, 5, "runs/r/p")
    assert caught.value.hint.startswith("train.epochs=2 train.max_steps=null for the training as it is; ")
    assert "plan 5 steps, but this training has already taken 9 (runs/r/p)" in caught.value.message


def test_nothing_is_said_where_the_length_is_the_same() -> None:
    assert length_line(TrainConfig(max_steps=40, global_batch=10), recorded(), 9, 10, 100) == ""


@pytest.mark.parametrize(
    ("train", "differ"),
    [
        (TrainConfig(warmup_steps=2, schedule="constant"), False),
        (TrainConfig(warmup_steps=2, schedule="linear", decay_ratio=1.0), True),
        (TrainConfig(warmup_steps="auto", schedule="constant"), True),
        (TrainConfig(warmup_steps=2, schedule="linear", decay_ratio=0.1), False),
    ],
)
def test_a_length_decides_the_rates_of_steps_that_are_taken(train: TrainConfig, differ: bool) -> None:
    assert rates_differ(train, 200, 100, 50) is differ
    assert not rates_differ(train, 100, 100, 50) and not rates_differ(train, 200, 100, 0)
    # With cycles the length cuts only the last one short; a constant schedule has none.
    constant = train.schedule == "constant"
    assert rates_differ(train, 200, 100, 50, cycle=25) is (constant and differ)
    assert rates_differ(train, 90, 200, 90, cycle=60) is (differ or not constant)


def test_a_cycle_that_was_cut_short_says_what_becomes_of_the_rates() -> None:
    train = TrainConfig(epochs=2, global_batch=10, warmup_steps=0, schedule="linear", decay_ratio=1.0)
    then = recorded(epochs=2, max_steps=15)
    whole = length_line(train, then, 8, 20, 100, cycle=10)
    assert "now ends there" not in whole, "the first cycle ends where it did"
    cut = length_line(train, then, 15, 20, 100, cycle=10)
    assert "the learning rates, 0 of their peak in the last step taken, are 0.444 of it in the next one" in cut


def test_rates_are_said_as_shares_that_can_be_read() -> None:
    train = TrainConfig(global_batch=256, epochs=2, warmup_steps=2, schedule="linear", decay_ratio=0.2)
    line = length_line(train, recorded(epochs=1), 10, 20, 2500)
    assert line.endswith("the learning rates, 0 of their peak in the last step taken, are 1 of it in the next one")
    assert length_line(train, recorded(epochs=1), 10, 20, 2500, cycle=10).endswith("10 were planned")


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        ({}, {}, True),
        ({}, {"hot_share": 0.5}, True),
        ({}, {"state": "bf16"}, False),
        ({"final_quantise": "4"}, {"final_quantise": "4", "hot_share": 0.5}, False),
        ({"final_quantise": "auto"}, {"final_quantise": "auto", "expected_restores": 1}, False),
        ({"final_quantise": "mixed"}, {"final_quantise": "mixed", "expected_restores": 21}, False),
        ({"final_quantise": "mixed"}, {"final_quantise": "mixed", "hot_share": 0.5}, False),
        ({"final_quantise": "8"}, {"final_quantise": "8", "expected_restores": 1}, True),
    ],
)
def test_codings_are_the_same_where_the_codes_are(then: dict, now: dict, same: bool) -> None:
    assert same_coding(CheckpointConfig(**now), {"checkpoint": asdict(CheckpointConfig(**then))}) is same


def test_fewer_bits_can_be_made_of_all_and_no_more_of_few() -> None:
    fewer = CheckpointConfig(final_quantise="8", state="bf16")
    check_finer(fewer, recorded(), "p")
    check_finer(fewer, {"checkpoint": asdict(fewer)}, "p")
    with pytest.raises(
        ConfigError, match=r"checkpoint.final_quantise=8 checkpoint.state=bf16: the bits that this"
    ) as e:
        check_finer(CheckpointConfig(), {"checkpoint": asdict(fewer)}, "p")
    assert e.value.hint.startswith("checkpoint.final_quantise=8 checkpoint.state=bf16; ")
    assert coding_of(CheckpointConfig()) == "fp32-fp32"


@pytest.mark.parametrize(
    ("then", "now", "setting"),
    [
        ({"final_quantise": "auto", "expected_restores": 1}, {"expected_restores": 20}, "expected_restores=1"),
        ({"final_quantise": "mixed", "expected_restores": 20}, {"expected_restores": 21}, "expected_restores=20"),
        ({"final_quantise": "2", "hot_share": 0.0}, {"hot_share": 0.5}, "hot_share=0.0"),
    ],
)
def test_bits_that_follow_from_another_setting_cannot_be_made_more(then: dict, now: dict, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"was written with checkpoint.{setting}: the bits that this"):
        check_finer(CheckpointConfig(**{**then, **now}), {"checkpoint": asdict(CheckpointConfig(**then))}, "p")


def test_other_restores_with_the_same_bits_are_no_finer_coding() -> None:
    then = CheckpointConfig(final_quantise="auto", expected_restores=5)
    check_finer(CheckpointConfig(final_quantise="auto", expected_restores=20), {"checkpoint": asdict(then)}, "p")


def test_an_average_that_should_have_started_earlier_is_refused() -> None:
    average = AverageConfig(kind="swa", start=0.5)
    shorter = TrainConfig(global_batch=10, max_steps=60, average=average)
    then = recorded(global_batch=10, max_steps=120, average=average)
    with pytest.raises(ConfigError, match=r"from step 31 on, .* planned with 120 and has taken 60 \(p\)") as caught:
        check_average(shorter, then, 60, 60, 10_000, "p")
    assert caught.value.hint.startswith("train.max_steps=120 for the training as it was planned")
    check_average(shorter, then, 30, 60, 10_000, "p")  # it has not missed a step yet
    for changes in ({"start": 0.0}, {"use": False}):
        other = replace(average, **changes)
        check_average(
            replace(shorter, average=other),
            recorded(global_batch=10, max_steps=120, average=other),
            60,
            60,
            10_000,
            "p",
        )


def test_what_the_length_decided_of_the_steps_taken_is_said() -> None:
    average = AverageConfig(kind="swa", start=0.5)
    longer = TrainConfig(global_batch=10, max_steps=120, average=average, warmup_steps=1, schedule="constant")
    line = length_line(longer, recorded(global_batch=10, max_steps=100), 80, 120, 10_000)
    assert line.endswith("has those from step 51 on, where one of 120 steps from the start would begin with step 61")
    warm = TrainConfig(global_batch=10, max_steps=120, schedule="constant")
    line = length_line(warm, recorded(global_batch=10, max_steps=100), 80, 120, 10_000)
    assert line.endswith("it warmed up for 10 steps, where 120 steps would have had 12")
    ended = replace(warm, schedule="linear", warmup_steps=2, max_steps=51, decay_ratio=1.0)
    line = length_line(
        ended, recorded(global_batch=10, max_steps=101, schedule="linear", decay_ratio=1.0), 51, 51, 10_000
    )
    assert line.endswith("the learning rates were 0.505 of their peak in the last step, and fall no more")
