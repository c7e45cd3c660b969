"""Ray on two nodes makes the datasets that threads make, and its driver hears of figures, not of rows."""

import dataclasses
import gzip
import pickle

import numpy as np
import polars as pl
import pytest

from pipeline.config import DenseFeature, SparseFeature, SplitConfig
from pipeline.errors import DataError
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.spec import data_spec

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


@pytest.mark.parametrize("kind", ["parquet", "csv.gz"])
def test_parts_of_one_file_make_the_dataset_of_the_file(nodes, tmp_path, run_ingest, monkeypatch, kind):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 6000)
    monkeypatch.setattr("pipeline.ingest.formats.columnar.LEAST_ROWS", 64)
    text = written(tmp_path / "log.csv", 3000).read_bytes() + b"1,2\n2,x\n" * 20
    (tmp_path / "packed").mkdir()
    path = tmp_path / "packed" / f"log.{kind}"
    if kind == "parquet":
        frame = pl.read_csv(tmp_path / "log.csv").with_columns(label=pl.int_range(pl.len()) % 3)
        frame.write_parquet(path, row_group_size=100)
    else:
        members = [text[at : at + 3001] for at in range(0, len(text), 3001)]
        path.write_bytes(b"".join(map(gzip.compress, members)))
    config = [config_of(path, engine, block_mib=1) for engine in ("local", "ray")]
    config = [
        dataclasses.replace(each, data=dataclasses.replace(each.data, format=kind.split(".")[0])) for each in config
    ]
    (source,) = file_sources(config[0].data, data_spec(config[0].data), find_files(str(path)), 1)
    assert len(source.parts()) > 3
    local, by_ray = map(run_ingest, config)
    assert by_ray.checksums == local.checksums
    assert len(by_ray.quarantine) == (1000 if kind == "parquet" else 40)
