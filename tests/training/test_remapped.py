"""A row that belongs to another id than in the checkpoint's data set starts anew: weights and optimizer state."""

import shutil

import numpy as np
import pytest
import torch

from pipeline.config import CheckpointConfig, Config, SparseFeature, SplitConfig
from pipeline.core.errors import ArtifactError
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.row_access import reset_rows
from pipeline.embeddings.tables import TableSpec
from pipeline.ingest.stage import ingest
from pipeline.records import dataset_path
from pipeline.store import Store, artifact_key
from pipeline.training.resume_checks import remapped_rows
from tests.checkpoint.single import access, shard, write
from tests.ingest.conftest import csv_config

DAYS = (("2026-01-01", "old"), ("2026-01-02", "new"), ("2026-01-04", "newest"))


def day_config(folder, day: str, source: str | None, feature: SparseFeature) -> Config:
    (folder / day).mkdir(parents=True, exist_ok=True)
    name = dict(DAYS)[day]
    lines = [f"{i % 2},{i},{'always' if i % 3 else name},{day}" for i in range(30)]
    (folder / f"{day}/a.csv").write_text("\n".join(["label,x,c,t", *lines]))
    return csv_config(
        f"{folder}/{{day}}/a.csv",
        day=day,
        timestamp="t",
        mapping_from=source,
        split=SplitConfig(test_share=0.0),
        sparse={"c": feature},
    )


@pytest.fixture
def nights(tmp_path):
    """As ``nights_of``, of a table that evicts."""
    return nights_of(tmp_path, SparseFeature(evict_after_days=2))


def nights_of(tmp_path, feature):
    """A store with the datasets of three days, each carrying on the mapping of the one before, and their configs."""
    store, made, source = Store(str(tmp_path / "store")), [], None
    for day, _ in DAYS:
        config = day_config(tmp_path, day, source, feature)
        key = artifact_key("ingest", {"day": day}, {})
        with store.draft(dataset_path("d", key, day), kind="ingest", key=key, config={}, inputs={}) as draft:
            dataset = draft.commit(ingest(config.data, config.ingest, config.seed, draft))
        made.append((dataset, config))
        source = dataset.path
    return store, made


def checkpoint(store, dataset, config):
    """A checkpoint that was trained on ``dataset``."""
    artifact = write(store, "runs/r/checkpoints/k/step-00000001", access(shard("c", rows=5)))
    data = {"name": config.data.name, "day": config.data.day}
    return type(artifact)(**{**vars(artifact), "inputs": {"dataset": dataset.key}, "config": {"data": data}})


def remapped(store, init, dataset, config):
    return remapped_rows(store, init, dataset, config.data, config.checkpoint)


def test_rows_of_evicted_ids_are_found_by_comparing_the_mappings(nights):
    store, made = nights
    found = [
        remapped(store, checkpoint(store, *made[then]), *made[now]) for then, now in ((0, 1), (1, 2), (0, 2), (2, 2))
    ]
    # "new" is appended on the second day; on the fourth "old" loses row 3 to "newest".
    assert [{name: rows.tolist() for name, rows in one.items()} for one in found] == [{}, {"c": [3]}, {"c": [3]}, {}]


def test_rows_that_a_full_table_gave_to_other_ids_start_anew(tmp_path):
    store, made = nights_of(tmp_path, SparseFeature(rows=4))
    assert [dataset.summary["rows_replaced"] for dataset, _ in made] == [{}, {"c": 1}, {"c": 1}]
    for then, now in ((0, 1), (1, 2), (0, 2)):
        init = checkpoint(store, *made[then])
        assert {name: rows.tolist() for name, rows in remapped(store, init, *made[now]).items()} == {"c": [3]}
    init = checkpoint(store, *made[1])
    shutil.rmtree(store.full(made[1][0].path))  # then the list of freed rows tells
    assert remapped(store, init, *made[2])["c"].tolist() == [3]


def test_without_the_checkpoints_data_set_the_list_of_freed_rows_tells(nights):
    store, made = nights
    init = checkpoint(store, *made[1])
    shutil.rmtree(store.full(made[1][0].path))
    assert remapped(store, init, *made[2])["c"].tolist() == [3]
    first = checkpoint(store, *made[0])
    shutil.rmtree(store.full(made[0][0].path))
    with pytest.raises(ArtifactError, match="no longer exists: the rows of table 'c' whose ids changed are unknown"):
        remapped(store, first, *made[2])


def test_renamed_tables_are_compared_by_id(nights):
    store, made = nights
    dataset, config = made[2]
    init = checkpoint(store, *made[1])
    config.checkpoint = CheckpointConfig(init_from="r", rename={"c": "d"})
    config.data.sparse = {"d": SparseFeature(column="c", evict_after_days=2)}
    config.data.mapping_from = None
    with store.draft("datasets/d/2026-01-04/renamed", kind="ingest", key="renamed", config={}, inputs={}) as draft:
        renamed = draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    # "always" is in row 2 of both; "newest" has the row of "old".
    assert remapped(store, init, renamed, config)["d"].tolist() == [3, 4]


def test_reset_rows_have_their_initial_values_and_no_state():
    whole, table = TableSpec("c", 9000, 8), []
    for column, row, rows in ((0, 0, 8500), (4, 0, 8500), (0, 8500, 500), (4, 8500, 500)):
        part = shard("c", rows=rows, columns=4, row=row, column=column)
        part.weight.fill_(7.0)
        table.append(part)
    rows = np.array([8499, 3, 8500, 8999], np.int64)
    model = access(*table)
    model.tables = {"c": whole, "other": TableSpec("other", 9000, 8)}
    reset_rows(model, "c", rows, seed=5)
    expected = initial_rows(5, whole, 0, 9000)
    for part in table:
        own = torch.zeros(9000, dtype=torch.bool)
        own[rows] = True
        own = own[part.row : part.row + part.rows]
        wanted = expected[part.row : part.row + part.rows, part.column : part.column + 4]
        assert torch.equal(part.weight[own], wanted[own])
        assert (part.weight[~own] == 7).all()
        assert (part.state["adagrad_sum"][own] == 0).all() and (part.state["adagrad_sum"][~own] == 1).all()
        assert own.sum() == 2
