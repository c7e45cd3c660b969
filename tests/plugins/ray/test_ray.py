"""Ray on two nodes makes the datasets that threads make, and its driver hears of figures, not of rows."""

import contextlib
import dataclasses
import gzip
import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from botocore.exceptions import EndpointConnectionError

from pipeline.config import DenseFeature, IngestConfig, SparseFeature, SplitConfig
from pipeline.core.errors import DataError, LaunchError, UnreachableError
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import answering
from pipeline.plugins.ray.engine import RayEngine
from tests.ingest.conftest import csv_config
from tests.ingest.test_days import Nights

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ray = pytest.importorskip("ray")
cloudpickle = pytest.importorskip("ray.cloudpickle")


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
        "label": (rng.random(rows) < 0.3).astype(int),
        "x": rng.integers(0, 900, rows),
        "y": rng.normal(size=rows),
        "c": [f"id{v}" for v in rng.zipf(1.4, rows)],
        "d": [f"id{v}" for v in rng.zipf(1.3, rows)],
        "l": lists,
    }
    pl.DataFrame(frame).write_csv(path)
    return path


def config_of(path, engine, **ingest):
    config = csv_config(path)
    data = dataclasses.replace(
        config.data,
        dense={"x": DenseFeature(), "y": DenseFeature(transform="percentile", bins=8)},
        sparse={
            "c": SparseFeature(rows=200),
            "d": SparseFeature(table="c"),
            "l": SparseFeature(separator="|", weight_separator=":"),
            "h": SparseFeature(column="c", mapping="hash", rows=50),
            "s": SparseFeature(column="d", mapping="learned", rows=40),
            "b": SparseFeature(column="x", bins=4),
        },
        split=SplitConfig(test_share=0.3, validation_share=0.2),
    )
    return dataclasses.replace(config, data=data, ingest=dataclasses.replace(config.ingest, engine=engine, **ingest))


def test_two_nodes_make_the_dataset_that_threads_make(nodes, tmp_path, run_ingest, monkeypatch):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 7000)
    path, layout = written(tmp_path / "log.csv"), {"block_mib": 1, "rows_per_group": 128, "groups_per_file": 3}
    local = run_ingest(config_of(path, "local", **layout))
    by_ray = run_ingest(config_of(path, "ray", **layout))
    assert by_ray.checksums == local.checksums
    assert len([name for name in local.checksums if name.startswith("train/")]) > 3


def test_the_driver_hears_less_than_the_rows(nodes, tmp_path, run_ingest, monkeypatch):
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


@pytest.mark.parametrize("test_days", [0, 1])
def test_days_one_after_the_other_and_a_continued_dataset(nodes, tmp_path, run_ingest, monkeypatch, test_days):
    """Rows, mappings, checks and profile of a range of days, and of the day that goes on from it and is compared."""
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 7000)
    monkeypatch.setattr("pipeline.ingest.quality.LEAK_ROWS", 1500)
    for day in (1, 2, 3, 4):
        (tmp_path / f"2026-01-0{day}").mkdir()
        written(tmp_path / f"2026-01-0{day}/log.csv", 500 * day)
    made = {}
    for engine in ("local", "ray"):
        config = config_of(tmp_path / "{day}/*.csv", engine, block_mib=1)
        split = SplitConfig(by="day", test_days=test_days) if test_days else config.data.split
        days = dataclasses.replace(config.data, day="2026-01-01..2026-01-03", split=split)
        nights = Nights(tmp_path / f"{engine}{test_days}")
        first = nights.ingest(dataclasses.replace(config, data=days))
        later = dataclasses.replace(config.data, day="2026-01-04", mapping_from=first.artifact.path)
        second = nights.ingest(dataclasses.replace(config, data=later))
        made[engine] = first, second
    for local, by_ray in zip(*made.values(), strict=True):
        assert by_ray.checksums == local.checksums


def killed_once(path):
    """Die the first time, as for lack of memory."""
    if not Path(path).exists():
        with contextlib.suppress(OSError):
            Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 5


def unreachable(_):
    raise EndpointConnectionError(endpoint_url="https://s3")


def test_a_worker_that_dies_is_replaced_and_what_ray_cannot_make_again_is_an_error_of_ours(nodes, tmp_path):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with RayEngine(IngestConfig(engine="ray")) as engine:
        assert engine._get(engine._task(killed_once)(str(tmp_path / "died"))) == 5
        with pytest.raises(LaunchError, match="Ray lost a worker") as error:
            engine._get(engine._task(killed_once)("/dev/null/never"))
        assert "ingest.block_mib" in error.value.hint
        ray.kill(engine._mergers[0])
        with pytest.raises(LaunchError, match="Ray lost a worker"):
            engine.split_counts()
        merged = engine._mergers[0].figures.remote()
        with pytest.raises(LaunchError, match="Ray lost a worker"):
            engine._get(engine._task(killed_once)(merged))  # a task that waits for it


def test_a_store_that_a_worker_cannot_reach_is_told_as_it_is_by_threads(nodes):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with (
        RayEngine(IngestConfig(engine="ray")) as engine,
        pytest.raises(UnreachableError, match="s3://logs does not answer: EndpointConnectionError"),
        answering("s3://logs", None),
    ):
        engine._get(engine._task(unreachable)(0))
