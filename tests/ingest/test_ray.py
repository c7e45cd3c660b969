"""Ray on two nodes makes the datasets that threads make, and its driver hears of figures, not of rows."""

import dataclasses
import pickle

import numpy as np
import polars as pl
import pytest

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.errors import DataError

from .conftest import csv_config

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes with a CPU each, which this process has joined."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def written(path, rows=6000):
    """A log of every kind of feature: counts, ids, lists with weights, ids of two features of one table."""
    rng = np.random.default_rng(11)
    lists = ["|".join(f"t{v}:{v / 4}" for v in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(rows)]
    frame = {
        "label": (rng.random(rows) < 0.3).astype(int), "x": rng.integers(0, 900, rows), "y": rng.normal(size=rows),
        "c": [f"id{v}" for v in rng.zipf(1.4, rows)], "d": [f"id{v}" for v in rng.zipf(1.3, rows)], "l": lists,
    }  # fmt: skip
    pl.DataFrame(frame).write_csv(path)
    return path


def config_of(path, engine, **ingest):
    config = csv_config(path)
    data = dataclasses.replace(
        config.data,
        dense={"x": DenseFeature(), "y": DenseFeature(transform="percentile", bins=8)},
        sparse={
            "c": SparseFeature(rows=200), "d": SparseFeature(table="c"),
            "l": SparseFeature(separator="|", weight_separator=":"),
            "h": SparseFeature(column="c", mapping="hash", rows=50),
            "s": SparseFeature(column="d", mapping="learned", rows=40), "b": SparseFeature(column="x", bins=4),
        },
        split=SplitConfig(test_share=0.3, validation_share=0.2),
    )  # fmt: skip
    return dataclasses.replace(config, data=data, ingest=dataclasses.replace(config.ingest, engine=engine, **ingest))


def test_two_nodes_make_the_dataset_that_threads_make(nodes, tmp_path, run_ingest, monkeypatch):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 7000)
    path, layout = written(tmp_path / "log.csv"), {"block_mib": 1, "rows_per_group": 128, "groups_per_file": 3}
    local = run_ingest(config_of(path, "local", **layout))
    by_ray = run_ingest(config_of(path, "ray", **layout))
    assert by_ray.checksums == local.checksums
    assert len([name for name in local.checksums if name.startswith("train/")]) > 3


def test_the_driver_hears_less_than_the_rows(nodes, tmp_path, run_ingest, monkeypatch):
    from pipeline.ingest.ray_engine import RayEngine

    heard, get = [], RayEngine._get
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 7000)
    monkeypatch.setattr(RayEngine, "_get", lambda self, refs: (heard.append(value := get(self, refs)), value)[1])
    told = []
    for rows in (3000, 12_000):
        del heard[:]
        run_ingest(config_of(written(tmp_path / f"{rows}.csv", rows), "ray", block_mib=1))
        told.append(sum(len(pickle.dumps(value)) for value in heard))
    assert told[1] < 2 * told[0]  # four times the rows


def test_an_error_of_a_worker_is_the_error_of_the_run(nodes, tmp_path, run_ingest):
    path = tmp_path / "log.csv"
    path.write_text("label,x\n1,2\n")
    with pytest.raises(DataError, match="lacks|missing|no column") as error:
        run_ingest(config_of(path, "ray"))
    assert error.value.hint
