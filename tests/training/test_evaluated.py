"""A checkpoint's logits and figures are the same to the last digit on any number of ranks."""

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.evaluation import evaluate
from pipeline.models.dlrm import DlrmConfig
from pipeline.store import Store
from pipeline.training.loop import train
from pipeline.training.predict import EVEN_ROWS, even_batch, predict
from pipeline.training.settings import PredictionSettings, TrainingSettings
from tests.embeddings.ranks import plan_for, spawn
from tests.models.trained import COLUMNS, DIM, ROWS, config_of
from tests.training.dataset import KEY, write_dataset

MODEL = DlrmConfig(embedding_dim=DIM, bottom_mlp=[96, 32], top_mlp=[200, 64])
TEST_ROWS, WORLDS = 1_003, (1, 2, 3, 4)


def trained(folder):
    """Train on the only rank; the path of the checkpoint goes to a file."""
    store = Store(str(folder))
    write_dataset(folder, train=1010, test=TEST_ROWS, sparse=COLUMNS)
    asked = TrainingSettings.of(config_of(MODEL, 1))
    plan, dataset = plan_for("table_wise", 1, rows=ROWS, dim=DIM), store.get(f"datasets/t/{KEY}", "ingest")
    (folder / "final").write_text(train(asked, store, dataset, plan, "runs/r/k", "key", lambda record: None)["final"])


def predicted(folder, sharding):
    """Score the held-out rows; rank 0 keeps the logits."""
    store, world = Store(str(folder)), dist.get_world_size()
    plan, dataset = plan_for(sharding, world, rows=ROWS, dim=DIM), store.get(f"datasets/t/{KEY}", "ingest")
    settings = PredictionSettings.of(config_of(MODEL, world))
    found = predict(settings, store, dataset, plan, (folder / "final").read_text())
    if found is not None:
        np.savez(folder / f"{sharding}-{world}.npz", logits=found.logits, labels=found.labels)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_logits_and_figures_are_the_same_on_1_2_3_and_4_ranks(checkpoint, sharding) -> None:
    found = {}
    for world in WORLDS:
        spawn(predicted, world, checkpoint, sharding)
        with np.load(checkpoint / f"{sharding}-{world}.npz", allow_pickle=False) as kept:
            found[world] = kept["logits"].tobytes(), evaluate(kept["labels"], kept["logits"])
            assert len(kept["logits"]) == TEST_ROWS and np.ptp(kept["logits"]) > 0.01
    assert all(each == found[1] for each in found.values()), [world for world in WORLDS if found[world] != found[1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a store with a trained checkpoint."""
    folder = tmp_path_factory.mktemp("store")
    spawn(trained, 1, folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 64, 130, 16_384])
def test_a_batch_is_divided_evenly(rows: int, ranks: int) -> None:
    made = even_batch(rows, ranks)
    assert made % (ranks * EVEN_ROWS) == 0 and rows <= made < rows + ranks * EVEN_ROWS
