"""``train.global_batch=auto``: by the rows, and as it was where a training goes on from another one's checkpoint."""

import json
import shutil
from dataclasses import replace

import pytest

from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.stages.stage_inputs import automatic_batch, with_batch
from tests.commands import nightjar, nightjar_in_turn
from tests.few_features import FEW

SMALL = [
    *FEW,
    "data.synthetic.rows=3000",
    "data.synthetic.ids_per_feature=60",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
    "train.threads_per_rank=1",
]
WARM = ["run=warm", "checkpoint.init_from=chosen", "checkpoint.every_steps=2", "train.max_steps=4"]
JOBS = [["run=cold"], ["run=chosen", "train.global_batch=96", "train.max_steps=4"], WARM]


@pytest.mark.parametrize(
    ("rows", "batch"),
    [(0, 4096), (1, 64), (12_799, 64), (25_600, 128), (48_000, 192), (799_915, 3968), (819_200, 4096), (10**10, 4096)],
)
def test_an_epoch_has_two_hundred_steps_where_there_are_rows_for_them(rows, batch):
    assert automatic_batch(rows) == batch
    assert rows < 12_800 or rows // batch >= 200


def test_a_number_stays_and_auto_follows_from_the_rows_not_from_the_hardware():
    chosen = Config()
    chosen.train = replace(chosen.train, global_batch=7)
    assert with_batch(chosen, 48_000) is chosen
    small, large = Config(), Config()
    large.hardware = replace(large.hardware, hosts=4, ranks_per_host=8)
    assert with_batch(small, 48_000).train.batch == with_batch(large, 48_000).train.batch == 192
    assert small.train.global_batch == "auto"


def test_more_ranks_than_samples_are_refused_and_a_batch_not_settled_is_never_a_number():
    config = Config()
    config.hardware = replace(config.hardware, hosts=100, ranks_per_host=8)
    with pytest.raises(ConfigError, match="auto is 64 for 1,000 train rows, expected at least one .* 800 ranks") as got:
        with_batch(config, 1_000)
    assert got.value.hint == "train.global_batch=51200, or fewer ranks: hardware.hosts=1"
    with pytest.raises(ConfigError, match="train.global_batch is auto"):
        _ = config.train.batch


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The store after all jobs, and what each of them said."""
    store = tmp_path_factory.mktemp("batch") / "store"
    ended = nightjar_in_turn([["run", f"store={store}", *SMALL, *job] for job in JOBS])
    shutil.rmtree(store / "runs/chosen/checkpoints")
    shutil.rmtree(store / "runs/warm/train")
    ended.append(nightjar("run", f"store={store}", *SMALL, *WARM))
    for each in ended:
        assert each.returncode == 0, each.stdout + each.stderr
    return store, [each.stdout for each in ended]


def outcome(store, run):
    return json.loads((store / f"runs/{run}/result.json").read_text())


def planned(store, run):
    return json.loads((store / outcome(store, run)["stages"]["plan"]["artifact"] / "plan.json").read_text())


def test_the_plan_and_the_training_have_the_same_number(done):
    store, parts = done
    assert outcome(store, "cold")["train"]["global_batch"] == planned(store, "cold")["global_batch"] == 64
    assert "steps of 64 samples planned" in parts[0]


def test_a_warm_start_keeps_the_number_of_the_checkpoint(done):
    store, parts = done
    assert outcome(store, "warm")["train"]["global_batch"] == planned(store, "warm")["global_batch"] == 96
    assert "steps of 96 samples planned" in parts[2]


def test_it_keeps_it_when_the_checkpoint_is_gone(done):
    _, parts = done
    assert "resumed from runs/warm/checkpoints/" in parts[3]
    assert "steps of 96 samples planned" in parts[3]


def test_what_if_plans_with_the_number_of_the_checkpoint(done):
    store, _ = done

    def figures(*more):
        ended = nightjar("what-if", f"store={store}", *SMALL, *more, "--json")
        code = ended.returncode  # a name: the command's output has the seconds that planning took
        assert code == 0, ended.stderr
        return [(record["step_ms"], record["reserved_bytes"]) for record in json.loads(ended.stdout)]

    smaller, same = figures("train.global_batch=64,96")
    assert smaller != same
    assert figures("checkpoint.init_from=warm") == [same]
