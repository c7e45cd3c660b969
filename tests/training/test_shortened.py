"""A training made shorter, or longer, ends with the bits of one planned so: its level, average and best weights."""

import json
import shutil

import pytest

from pipeline.config import CheckpointConfig
from pipeline.config.train import AverageConfig, SnapshotConfig, ValidateConfig
from pipeline.core.errors import ConfigError
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training import checkpoints, trainer
from pipeline.training.config_settings import select_training_settings
from pipeline.training.early_stopping import Stopping
from tests.embeddings.ranks import plan_for, spawn
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import ROWS, config

COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
SHORT, LONG = 6, 12
ALWAYS, LATE = AverageConfig(kind="ema", start=0.0, decay=0.8), AverageConfig(kind="swa", start=0.5)
CASES = {
    "plain": {},
    "level": {"sampled": "logit"},
    "average": {"average": ALWAYS},
    "level of an average": {"sampled": "logit", "average": ALWAYS},
    "average kept aside": {"sampled": "logit", "average": AverageConfig(kind="ema", start=0.0, use=False)},
    "looks": {"sampled": "logit", "average": ALWAYS, "validate": ValidateConfig(every_steps=4)},
}


def only_the_first_look_is_good(self, look, best):
    return False


def trained(folder, name, steps, **changes):
    """Train to ``steps`` with a checkpoint in the middle; returns the last checkpoint's path."""
    return session(folder, name, steps, **changes)["final"]


def session(folder, name, steps, *, sampled="", **changes):
    """As ``trained``; returns the figures."""
    store = Store(str(folder))
    if not (folder / "datasets").exists():
        validation = 80 if {"validate", "snapshots"} & changes.keys() else 0
        write_dataset(folder, train=1200, test=20, validation=validation, sparse=COLUMNS, sampled=sampled)
    dataset, plan = store.get(f"datasets/t/{KEY}", "ingest"), plan_for("table_wise", 1, rows=ROWS, dim=8)
    checkpoint = CheckpointConfig(every_steps=SHORT, quantise="fp32", final_quantise="fp32", keep_last=4)
    options = {"epochs": 3, "max_steps": steps, "lr": 0.02, "warmup_steps": 1, **changes}
    settings = config(1, global_batch=200, guard={"collapse": False}, checkpoint=checkpoint, **options)
    place = f"runs/r/checkpoints/{name}"
    return trainer.train(select_training_settings(settings), store, dataset, plan, place, name, lambda record: None)


def content(folder, path):
    """The numbers of a checkpoint."""
    return {file.name: file.read_bytes() for file in sorted((folder / path).rglob("*.safetensors"))}


def compare(folder, name, changes):
    """Whether ``SHORT`` steps of a training that lost its end are those planned so, and ``LONG`` steps of it again."""
    interrupted = trained(folder, "k", LONG, **changes)
    assert interrupted.endswith(f"k/step-{LONG:08d}")
    planned = content(folder, interrupted)
    shutil.rmtree(folder / interrupted)
    shortened = trained(folder, "k", SHORT, **changes)
    straight = trained(folder, "straight", SHORT, **changes)
    again = trained(folder, "straight", LONG, **changes)
    once_more = trained(folder, "k", SHORT, **changes)
    outcome = {
        "shortened": content(folder, shortened) == content(folder, straight) and shortened != straight,
        "longer": content(folder, again) == planned,
        "longer again": content(folder, trained(folder, "k", LONG, **changes)) == planned,
        "once more": once_more == shortened,
        "files": len(planned),
    }
    (folder.parent / f"{name}.json").write_text(json.dumps(outcome))


def compare_all(folder):
    for name, changes in CASES.items():
        if "validate" in changes:
            Stopping._is_better = only_the_first_look_is_good
        compare(folder / name.replace(" ", "-"), name, changes)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shortened")
    spawn(compare_all, 1, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_shortened_training_ends_as_one_that_was_planned_so(outcomes, name):
    assert outcomes[name]["shortened"] and outcomes[name]["files"] > 3


@pytest.mark.parametrize("name", CASES)
def test_the_same_command_ends_with_the_same_checkpoint(outcomes, name):
    assert outcomes[name]["once more"]


@pytest.mark.parametrize("name", [name for name in CASES if name != "looks"])
def test_a_training_made_longer_goes_on_without_what_was_only_published(outcomes, name):
    assert outcomes[name]["longer"] and outcomes[name]["longer again"]


def refused(folder):
    path = trained(folder, "k", LONG, average=LATE)
    shutil.rmtree(folder / path)
    with pytest.raises(ConfigError, match="its average starts with step 7"):
        trained(folder, "k", SHORT, average=LATE)


def test_a_training_that_missed_its_average_is_not_made_shorter(tmp_path):
    spawn(refused, 1, tmp_path)


def snapshots_again(folder):
    changes = {"sampled": "logit", "snapshots": SnapshotConfig(count=2, keep=2, choose="last", kind="cyclic")}
    path = trained(folder, "k", LONG, **changes)
    first = content(folder, path)
    shutil.rmtree(folder / path)
    assert content(folder, trained(folder, "k", LONG, **changes)) == first


def test_a_cycle_begins_with_the_same_weights_whether_or_not_training_was_interrupted(tmp_path):
    spawn(snapshots_again, 1, tmp_path)


def falling(folder):
    first = session(folder, "k", LONG, schedule="linear")
    shutil.rmtree(folder / first["final"])
    assert "resumed" not in first["train"]
    shortened = session(folder, "k", SHORT, schedule="linear")
    assert shortened["train"]["resumed"]["planned"] == LONG
    assert "resumed" not in session(folder, "straight", SHORT, schedule="linear")["train"]
    longer = session(folder, "straight", LONG, schedule="linear")
    assert longer["train"]["resumed"]["planned"] == SHORT
    constant = trained(folder, "constant", LONG)
    shutil.rmtree(folder / constant)
    assert "planned" not in session(folder, "constant", SHORT)["train"]["resumed"]


def test_a_length_that_decided_the_rates_is_recorded(tmp_path):
    """Its key is that of a training which was planned so, and which has other bits."""
    spawn(falling, 1, tmp_path)


def longer_than_a_former_end(folder):
    said = []
    checkpoints.log.warning = lambda text, *given: said.append(text % given)
    trained(folder, "new", SHORT, sampled="logit")
    trained(folder, "new", LONG, sampled="logit")
    assert not any("of an earlier release" in line for line in said)
    checkpoints.LEVEL = "not yet known"
    end = trained(folder, "old", SHORT, sampled="logit")
    checkpoints.LEVEL = "level"
    trained(folder, "old", LONG, sampled="logit")
    (line,) = [line for line in said if "of an earlier release" in line]
    assert line.startswith(end)


def test_going_on_from_an_end_that_an_earlier_release_shifted_is_a_warning(tmp_path):
    spawn(longer_than_a_former_end, 1, tmp_path)
