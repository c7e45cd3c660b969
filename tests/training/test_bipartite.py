"""Training on a bipartite cluster, on real gloo ranks: it equals that of a flat world with as many workers."""

import json
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.checkpoint.reader import ChainReader
from pipeline.config import ClipConfig, HardwareConfig, PartitionConfig
from pipeline.config.train import RankLossConfig, ValidateConfig
from pipeline.core.errors import NightjarError
from pipeline.records import SparseColumn, TaskColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.tiers import Together, with_slow
from tests.training.dataset import write_dataset
from tests.training.test_train import ROWS, config

KINDS = ["table_wise", "column_wise", "table_wise"]
RAGGED = (SparseColumn(name="a", rows=40), SparseColumn(name="b", rows=23, multi=True, weighted=True))
RAGGED += (SparseColumn(name="c", rows=11, multi=True),)


def plan(workers, owners, kinds="table_wise"):
    """Every table on ``owners`` ranks behind ``workers`` ones; 0: on the workers, as in a flat world."""
    made = plan_for(kinds, owners or workers, rows=ROWS, dim=8)
    tables = {
        name: replace(table, shards=tuple(replace(s, rank=s.rank + (owners and workers)) for s in table.shards))
        for name, table in made.tables.items()
    }
    return replace(made, tables=tables, world_size=workers + owners, ranks_per_host=1)


def settings(workers, owners, exchange="fp32", **changes):
    made = config(1, **{"epochs": 1, "global_batch": 125, "log_every_steps": 2, **changes})
    hardware = HardwareConfig(name="t", hosts=workers + owners, embedding_hosts=owners)
    return replace(made, hardware=hardware, partition=PartitionConfig(exchange=exchange))


def stored_rows(store, path, table):
    """All rows of ``table`` in a checkpoint, with their optimizer state, as text that two equal tables share."""
    parts = []
    for window in ChainReader(store, store.get(path, "train")).windows(table):
        values = [window.weight, *(window.state[name] for name in sorted(window.state))]
        parts += [value.numpy().tobytes().hex() for value in values]
    return parts


def fit(root, workers, owners, *, kinds="table_wise", tier="ddr", place="runs/r/checkpoints/k", **changes):
    """Train on these ranks; on rank 0 the losses, the logits of the test rows and all rows of tables."""
    store = Store(str(root))
    dataset = store.get(f"datasets/t/{'0123456789abcdef' * 2}", "ingest")
    current, records = settings(workers, owners, **changes), []
    made = on_tier(plan(workers, owners, kinds), tier, cache_rows=8 if tier == "ssd" else 0)
    summary = train(select_training_settings(current), store, dataset, made, place, "key", records.append)
    predictions = predict(select_prediction_settings(current), store, dataset, made, summary["final"])
    if predictions is None:
        return {}
    tables = {name: stored_rows(store, summary["final"], name) for name in ROWS}
    return {
        "summary": summary,
        "losses": [record["loss"] for record in records],
        "tables": tables,
        "logits": predictions.logits.tolist(),
        "sent": [record["inter_host_bytes_per_sample"] for record in records],
    }


CASES = {
    "plain": {},
    "base": {"pipeline": "base"},
    "mixed": {"kinds": KINDS, "data": {"sparse": RAGGED}},
    "looks": {"data": {"validation": 200}, "validate": ValidateConfig(every_steps=3)},
    "tasks": {"data": {"tasks": (TaskColumn(name="buy", kind="binary"),)}},
    "fp16": {"exchange": "fp16"},
    "shampoo": {"dense_optimizer": "shampoo"},
    "ranked": {"rank_loss": RankLossConfig(kind="pairwise", group_by="a")},
    "penalised": {"embedding_l2": 1e-3, "clip": ClipConfig(dense_norm=0.05, table_value=0.0002)},
}
DEFAULT = ("plain", "mixed")  # of two workers and two owners; the other cases are slow
SSD = {"plain": {}, "ssd": {"tier": "ssd", "kinds": "table_wise"}}
STOPPED = {"max_steps": 4}


def write(root, **data):
    columns = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
    write_dataset(root, **{"train": 1110, "test": 300, "sparse": columns, **data})


def run(folder, workers, owners, jobs):
    """Every one of ``jobs`` {name: (root, options)}; rank 0 leaves what ``fit`` gives as ``<name>.json``."""
    logging.disable(logging.WARNING)
    for name, (root, options) in jobs.items():
        try:
            found = fit(root, workers, owners, **options)
        except NightjarError as error:
            found = {"error": str(error)}
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


def trained(folder, workers, owners, jobs):
    spawn(run, workers + owners, folder, workers, owners, jobs, local=1)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in jobs}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{(workers, owners): {case: what ``fit`` gives}}: a flat world of two ranks, and worlds that have embedding ranks.

    Case ``there`` began in the flat world and ends in the bipartite one, case ``back`` the other way round.
    """
    folder = tmp_path_factory.mktemp("bipartite")
    further = [name for name in CASES if name not in DEFAULT]

    def prepare(here, name):
        """The store of a case, its data written, and its options."""
        moved, stopped, _ = name.partition("-stopped")
        if moved in ("there", "back"):
            if stopped:
                write(folder / moved)
            return folder / moved, STOPPED if stopped else {}
        options = dict({**CASES, **SSD}[name])
        write(here / name, **options.pop("data", {}))
        return here / name, options

    def train_together(workers, owners, names):
        here = folder / f"world-{workers}-{owners}"
        return trained(here, workers, owners, {name: prepare(here, name) for name in names})

    groups = {
        (2, 0): ([*DEFAULT, "there-stopped"], ["back"], further),
        (2, 2): ([*DEFAULT, "there", "back-stopped"], further),
        (2, 1): (SSD,),
        (1, 1): (SSD,),
    }
    found = {world: Together(partial(train_together, *world), *each) for world, each in groups.items()}
    for world in ((2, 0), (2, 2)):  # "there" goes on where the first world stopped, "back" where the second did
        ran = bool(found[world]["plain"])
        assert ran
    return found


def same(found, wanted):
    failed = "error" in found
    assert not failed, found
    assert found["losses"] == wanted["losses"] and len(found["losses"]) > 3
    assert found["logits"] == wanted["logits"]
    assert found["tables"] == wanted["tables"]


@pytest.mark.parametrize("name", with_slow(CASES, DEFAULT))
def test_it_trains_the_bits_of_a_flat_world_of_as_many_workers(outcomes, name):
    same(outcomes[2, 2][name], outcomes[2, 0][name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SSD)
def test_one_embedding_rank_serves_two_workers_from_memory_or_ssd(outcomes, name):
    same(outcomes[2, 1][name], outcomes[2, 0]["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SSD)
def test_one_worker_trains_the_same_model_but_for_rounding(outcomes, name):
    one, two = outcomes[1, 1][name], outcomes[2, 0]["plain"]
    assert np.allclose(one["logits"], two["logits"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("world", "name"), [((2, 2), "there"), ((2, 0), "back")])
def test_a_checkpoint_goes_on_in_the_other_kind_of_world(outcomes, world, name):
    """The rows that a flat world stored restore into a bipartite one bit for bit, and the other way round."""
    found, plain = outcomes[world][name], outcomes[2, 0]["plain"]
    assert found["summary"]["train"]["resumed"]["step"] == 4
    assert (found["logits"], found["tables"]) == (plain["logits"], plain["tables"])


@pytest.mark.parametrize("owners", with_slow([1, 2], [2]))
def test_rows_never_travel(outcomes, owners):
    """A sample sends ids and lengths, its embeddings come back and their gradients go: nothing else."""
    ids, lengths, embeddings = 3 * 4, 3 * 4, 3 * 8 * 4
    assert outcomes[2, owners]["plain"]["sent"][1] == pytest.approx(ids + lengths + 2 * embeddings, rel=0.05)
