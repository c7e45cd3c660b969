"""Asynchronous training learns, takes every batch once, resumes, and refuses what needs one step after the other."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pipeline.config import CheckpointConfig, ClipConfig
from pipeline.config.compose import compose
from pipeline.config.train import HogwildConfig, ValidateConfig
from pipeline.core.errors import ConfigError, GuardError
from pipeline.models.settings import WideDeepConfig
from pipeline.plugins.hogwild import executor
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training import trainer
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.early_stopping import Stopping
from pipeline.training.predict import predict
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.tiers import with_slow
from tests.training.dataset import KEY, write_dataset
from tests.training.test_looks import only_the_first_look_is_good
from tests.training.test_train import ROWS, config

TRAIN_ROWS, BATCH = 2110, 50
CASES = {
    "sync": {"mode": "sync"},
    "adagrad": {},
    "lazy adam": {"sparse_optimizer": "lazy_adam", "sparse_lr": 0.01},
    "one thread": {"hogwild": HogwildConfig(threads=1)},
    "checkpoints": {"checkpoint": CheckpointConfig(every_steps=10, quantise="fp32", keep_last=2)},
    "resumed": {"max_steps": 40, "then": {"max_steps": None}},
    "looks": {
        "validation": 200,
        "epochs": 9,
        "validate": ValidateConfig(every_steps=20, patience=2, cycle_epochs=None),
    },
    "clipped": {"clip": ClipConfig(dense_norm=0.1, table_value=0.001)},
    "statistics": {"model": WideDeepConfig(embedding_dim=8, wide=4, top_mlp=[16])},  # a parameter without a gradient
    "parts": {"accumulate": 5},
    "bad batch": {"spoil": True},
}


def spoil(split, columns):
    if split == "train":
        columns["b"][1234] = 23


def train_case(folder, case):
    """Train one case in this process and leave what it did as JSON."""
    if case == "looks":  # which look is the best would follow from which thread was first
        Stopping._is_better = only_the_first_look_is_good
    changes = dict(CASES[case])
    then, validation = changes.pop("then", None), changes.pop("validation", 0)
    model = changes.pop("model", None)
    columns = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
    bad = spoil if changes.pop("spoil", False) else None
    write_dataset(folder, train=TRAIN_ROWS, test=400, validation=validation, sparse=columns, spoil=bad)
    store = Store(str(folder))
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    options = {"mode": "hogwild", "hogwild": HogwildConfig(threads=4), "global_batch": BATCH, **changes}
    settings = config(1, **options)
    if model is not None:
        settings = replace(settings, model=model)
    plan = plan_for("table_wise", 1, rows=ROWS, dim=8)
    seen: Counter = Counter()
    _count_rows(seen)
    records: list = []
    arguments = (store, dataset, plan, "runs/r/checkpoints/k", "k", records.append)
    summary = trainer.train(select_training_settings(settings), *arguments)
    if then is not None:
        settings = config(1, **{**options, **then})
        summary = trainer.train(select_training_settings(settings), *arguments)
    scores = predict(select_prediction_settings(settings), store, dataset, plan, summary["final"])
    losses = np.logaddexp(0, np.where(scores.labels == 1, -scores.logits, scores.logits))
    outcome = {
        "summary": summary,
        "records": records,
        "loss": float(losses.mean()),
        "seen": sorted(seen.values()),
        "rate": float(scores.labels.mean()),
        "rows": len(seen),
        "names": sorted(path.name for path in (folder / "runs/r/checkpoints/k").iterdir()),
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


def _count_rows(seen):
    """Count the rows of training batches; column d0 numbers them."""

    def counted(kind):
        class Counted(kind):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.model.register_forward_pre_hook(self._count)

            def _count(self, module, args):
                if module.training:
                    batch = args[0]
                    seen.update((batch.dense[batch.weights > 0, 0] * TRAIN_ROWS).round().int().tolist())

        return Counted

    for mode in ("sync", "hogwild"):
        trainer.EXECUTORS[mode] = counted(trainer.find_executor(mode))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    known = {}

    def run(case):
        if case not in known:
            folder = tmp_path_factory.mktemp("hogwild")
            spawn(train_case, 1, folder, case)
            known[case] = json.loads((folder / "outcome.json").read_text())
        return known[case]

    return run


@pytest.mark.measures
@pytest.mark.parametrize(
    "case",
    with_slow(
        ["adagrad", "lazy adam", "one thread", "checkpoints", "clipped", "statistics", "parts"],
        ["checkpoints", "statistics"],
    ),
)
def test_every_row_is_trained_once_an_epoch_and_the_model_learns(outcome, case):
    found, sync = outcome(case), outcome("sync")
    assert found["rows"] == TRAIN_ROWS and set(found["seen"]) == {2}
    assert found["summary"]["train"]["steps"] == sync["summary"]["train"]["steps"] == 2 * -(-TRAIN_ROWS // BATCH)
    rate = found["rate"]
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found["loss"] < base  # by how much follows from the threads: make bench-hogwild
    assert sum(record["step"] == 86 for record in found["records"]) == 1
    assert found["records"][-1]["samples"] == 2 * TRAIN_ROWS


def test_checkpoints_hold_the_steps_that_were_begun(outcome):
    found = outcome("checkpoints")
    steps = [int(name.removeprefix("step-")) for name in found["names"]]
    assert steps[-1] == 86 and found["summary"]["checkpoint"]["count"] >= len(steps) > 1


def test_a_resumed_training_takes_the_other_batches(outcome):
    found = outcome("resumed")
    assert found["summary"]["train"]["resumed"]["step"] == 40
    assert found["rows"] == TRAIN_ROWS and set(found["seen"]) == {2}


@pytest.mark.measures
def test_looks_at_validation_rows_stop_it(outcome):
    found = outcome("looks")
    part = found["summary"]["train"]["validation"]
    assert part["stopped"] and part["lr_drops"] == 1
    assert found["summary"]["train"]["steps"] < 9 * 43
    assert part["ne"] < 1


def refused(folder):
    with pytest.raises(GuardError) as caught:
        train_case(folder, "bad batch")
    (folder / "refused.txt").write_text(str(caught.value))


def test_an_error_of_a_thread_ends_the_training(tmp_path):
    spawn(refused, 1, tmp_path)
    assert "'b'" in (tmp_path / "refused.txt").read_text()


REFUSED = {
    "hardware=laptop2": ["ask for 2 ranks", "hardware=laptop"],
    "train.compile=true": ["train.compile is true", "takes several at once", "train.mode=sync"],
    "train.average.kind=ema": ["train.average.kind is ema", "train.average.kind=none"],
    "train.dense_optimizer=shampoo": ["train.dense_optimizer is shampoo", "train.dense_optimizer=adam"],
    "partition=dmt": ["partition.name is dmt", "partition=flat"],
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_needs_one_step_after_the_other_is_refused(override):
    with pytest.raises(ConfigError) as error:
        compose(["experiment=demo", "train.mode=hogwild", override])
    for part in REFUSED[override]:
        assert part in f"{error.value.message} {error.value.hint}"


def test_tables_that_do_not_lie_whole_in_memory_are_refused():
    for plan, part in (
        (on_tier(plan_for("table_wise", 1, rows=ROWS), "ssd"), "table 'a' on tier ssd"),
        (plan_for("data_parallel", 1, rows=ROWS), "table 'a', which is planned data_parallel"),
        (plan_for("row_wise", 1, rows=ROWS), "the plan has table 'a' row_wise"),
    ):
        with pytest.raises(ConfigError, match=part) as error:
            executor._check_plan(plan)
        name, _, value = error.value.hint.partition(", ")[0].partition("=")
        compose(["experiment=demo", f"{name.replace('.a.', '.C1.')}={value}"])
