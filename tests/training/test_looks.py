"""Looks at the validation rows in whole trainings: made longer behind its best weights; rows that allow no figures."""

import json
import shutil
import sys

import pytest
from safetensors.torch import load_file

from pipeline.config import CheckpointConfig
from pipeline.config.train import AverageConfig, SnapshotConfig, ValidateConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training import trainer
from pipeline.training.config_settings import select_training_settings
from pipeline.training.early_stopping import Stopping
from pipeline.training.validation import ValidatedTraining, build_validation
from tests.embeddings.ranks import plan_for, spawn
from tests.logged import listen
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import ROWS, config

COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())


def trained(folder, name="k", init=None, **changes):
    store = Store(str(folder))
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    settings = config(1, global_batch=48, guard={"collapse": False}, **changes)
    plan, records = plan_for("table_wise", 1, rows=ROWS, dim=8), []
    arguments = (store, dataset, plan, f"runs/r/checkpoints/{name}", name, records.append)
    return trainer.train(select_training_settings(settings), *arguments, init=init), records


def only_the_first_look_is_good(self, look, best):
    return False


def made_longer(folder):
    """A training takes all its steps, its best look long before the end; a longer one comes to two plateaus."""
    Stopping._is_better = only_the_first_look_is_good
    write_dataset(folder, train=320, test=20, validation=60, sparse=COLUMNS)
    checkpoint = CheckpointConfig(every_steps=3, quantise="fp32", final_quantise="fp32", keep_last=2)
    changes = {"validate": ValidateConfig(patience=6, every_steps=4), "checkpoint": checkpoint}
    first, _ = trained(folder, epochs=2, **changes)
    shutil.copytree(folder / first["final"], folder / "first")
    names = sorted(path.name for path in (folder / "runs/r/checkpoints/k").iterdir())
    longer, records = trained(folder, epochs=9, **changes)
    outcome = {"first": first, "names": names, "longer": longer, "records": records}
    (folder / "outcome.json").write_text(json.dumps(outcome))


def test_a_longer_training_goes_back_to_the_weights_it_began_with(tmp_path):
    spawn(made_longer, 1, tmp_path)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    part = outcome["longer"]["train"]["validation"]
    assert outcome["first"]["train"]["validation"]["best_step"] == part["best_step"] == 4
    assert "step-00000004" not in outcome["names"]
    assert part["stopped"] and part["lr_drops"] == 1
    state = json.loads((tmp_path / outcome["longer"]["final"] / "state.json").read_text())
    assert state["train"]["validation"]["kept"] == state["train"]["step"]
    first, last = tmp_path / "first", tmp_path / outcome["longer"]["final"]
    files = [path.relative_to(first) for path in first.rglob("*.safetensors") if path.name != "dense.safetensors"]
    assert files
    assert all((first / name).read_bytes() == (last / name).read_bytes() for name in files)


def stopped_before_the_average(folder):
    Stopping._is_better = only_the_first_look_is_good
    write_dataset(folder, train=320, test=20, validation=60, sparse=COLUMNS)
    said = listen()
    for start in (0.5, 0.0):
        average = AverageConfig(kind="ema", start=start)
        trained(folder, epochs=9, average=average, validate=ValidateConfig(every_steps=4))
        (folder / f"{start}.txt").write_text("\n".join(said))
        shutil.rmtree(folder / "runs")
        said.clear()


def test_best_weights_from_before_the_average_starts_are_told(tmp_path):
    spawn(stopped_before_the_average, 1, tmp_path)
    assert "these weights are no average: train.average starts with step 33" in (tmp_path / "0.5.txt").read_text()
    assert "no average" not in (tmp_path / "0.0.txt").read_text()


START_MOVES = CheckpointConfig(allow=["train.average.start", "train.epochs"])


def begun_with_an_average(folder):
    """A training that has ended with an average starts another one, and goes on as a longer one."""
    Stopping._is_better = only_the_first_look_is_good
    write_dataset(folder, train=320, test=20, validation=60, sparse=COLUMNS)
    looks = ValidateConfig(every_steps=4)
    former, _ = trained(folder, average=AverageConfig(kind="swa", start=0.0))
    init = Store(str(folder)).get(former["final"], "train")
    later = AverageConfig(kind="swa", start=0.5)
    warm, _ = trained(folder, "warm", init=init, epochs=9, average=later, validate=looks, checkpoint=START_MOVES)
    trained(folder, epochs=9, average=later, validate=looks, checkpoint=CheckpointConfig(every_steps=15, keep_last=9))
    longer = former["final"].replace("14", "15")
    (folder / "finals.json").write_text(json.dumps([former["final"], warm["final"], longer]))


def test_looks_before_the_average_starts_are_at_no_former_trainings_average(tmp_path):
    spawn(begun_with_an_average, 1, tmp_path)
    former, *later = json.loads((tmp_path / "finals.json").read_text())
    assert any(name.endswith("/average") for name in load_file(tmp_path / former / "dense.safetensors"))
    for final in later:  # weights of the first look, and of a step before the average starts
        assert not any(name.endswith("/average") for name in load_file(tmp_path / final / "dense.safetensors"))


def one_class(split, columns):
    if split == "validation":
        columns["label"][:] = 0


def no_weight(split, columns):
    if split == "validation":
        columns["row_weight"][:] = 0


def few_weights(split, columns):
    if split == "train":
        columns["row_weight"][:] = 0
        columns["row_weight"][:9] = 1


def odd_rows(folder):
    said = {}
    for name, spoil in (("one class", one_class), ("no weight", no_weight), ("few weights", few_weights)):
        root = folder / name
        root.mkdir()
        write_dataset(root, train=320, test=20, validation=60, sparse=COLUMNS, row_weights=True, spoil=spoil)
        try:
            trained(root, epochs=1, log_every_steps=1)
            said[name] = ""
        except DataError as error:
            said[name] = f"{error.message} {error.hint}"
    (folder / "said.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    spawn(odd_rows, 1, folder)
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("name", ["one class", "no weight"])
def test_validation_rows_that_allow_no_figures_are_refused_with_the_setting_that_helps(said, name):
    assert "60 validation rows" in said[name] and "data.split.validation_share=<larger>" in said[name]


def test_steps_whose_rows_have_no_weight_are_no_fault(said):
    assert said["few weights"] == ""


OWN_VALIDATION = """
class OwnLooks:
    turned_off_by = "train.validate.monitor=ne"

    def __init__(self, training):
        pass

    @staticmethod
    def applies(config):
        return config.validate.monitor == "auc"
"""


def build_with_own_validation(folder, monkeypatch, **changes):
    """What ``build_validation`` returns beside an installed package that adds ``own_looks``."""
    about = folder / "own-1.0.dist-info"
    about.mkdir()
    (folder / "own_looks_of_a_package.py").write_text(OWN_VALIDATION)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    points = "[nightjar.validations]\nown_looks = own_looks_of_a_package:OwnLooks\n"
    (about / "entry_points.txt").write_text(points)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    settings = select_training_settings(config(1, validate=ValidateConfig(monitor="auc"), **changes))
    rest = dict.fromkeys(("train_split", "split", "order", "executor", "checkpoints", "start_logits", "init"))
    return build_validation(ValidatedTraining(settings=settings, **rest))


def test_the_only_plugin_that_applies_validates(tmp_path, monkeypatch):
    assert type(build_with_own_validation(tmp_path, monkeypatch)).__name__ == "OwnLooks"


def test_two_plugins_that_apply_to_one_training_are_named_with_what_turns_each_off(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"ensembles and own_looks of nightjar\.validations apply") as caught:
        build_with_own_validation(tmp_path, monkeypatch, snapshots=SnapshotConfig(count=2))
    assert caught.value.exit_code == 2
    assert caught.value.hint == "train.snapshots.count=1, or train.validate.monitor=ne"
