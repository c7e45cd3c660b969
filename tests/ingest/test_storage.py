"""Logs and store on an object store that is sometimes busy and cuts connections: the same dataset, or nothing."""

import gzip
import uuid

import fsspec
import numpy as np
import pytest

from pipeline.config import SparseFeature, SplitConfig
from pipeline.core.errors import UnreachableError
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.stage import ingest, raw_fingerprint
from pipeline.store import Store
from tests.checkpoint.s3 import Fault
from tests.waits import no_waits

from .conftest import csv_config

PART = 5 << 20  # bytes; the smallest part of a multipart upload
FILES = 3


def lines_of(number: int, rows: int) -> list[str]:
    rng = np.random.default_rng(number)
    return [f"{int(rng.random() < 0.3)},{rng.random()},id{rng.integers(50)}" for _ in range(rows)]


@pytest.fixture
def s3(endpoint, monkeypatch):
    """A bucket of its own with logs in it, over a client that tries nothing again by itself."""
    quick = {"read_timeout": 60, "connect_timeout": 60, "retries": {"max_attempts": 0}}
    settings = {
        "key": "k",
        "secret": "s",
        "endpoint_url": endpoint.url,
        "config_kwargs": quick,
        "default_block_size": PART,
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 3)
    endpoint.fault = None
    fsspec.filesystem("s3").clear_instance_cache()
    bucket = f"i{uuid.uuid4().hex}"
    fs = fsspec.filesystem("s3")
    fs.mkdir(bucket)
    for number in range(FILES):
        text = "\n".join(["label,x,c", *lines_of(number, 400)]).encode()
        name = f"{bucket}/logs/part-{number}.csv"
        fs.pipe_file(name + ".gz" if number else name, gzip.compress(text) if number else text)
    fs.pipe_file(f"{bucket}/logs/_SUCCESS", b"")
    fs.call_s3("put_object", Bucket=bucket, Key="logs/")  # how consoles mark a folder
    with no_waits():
        yield f"s3://{bucket}"
    endpoint.fault = None
    fs.clear_instance_cache()


def config_of(path: str):
    return csv_config(path, sparse={"c": SparseFeature()}, split=SplitConfig(test_share=0.2))


def make(config, store: Store):
    with store.draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        return draft.commit(ingest(config.data, config.ingest, config.seed, draft))


@pytest.fixture
def expected(tmp_path):
    """The files of the dataset of the same logs on the local disk, but for where they lay: an ETag tells that."""
    for number in range(FILES):
        (tmp_path / f"part-{number}.csv").write_text("\n".join(["label,x,c", *lines_of(number, 400)]))
    files = make(config_of(f"{tmp_path}/part-*.csv"), Store(str(tmp_path / "store"))).files
    return {name: entry for name, entry in files.items() if name != "sources.json"}


@pytest.mark.parametrize("path", ["logs", pytest.param("logs/part-*", marks=pytest.mark.slow)])
def test_logs_and_store_on_an_object_store(s3, expected, path):
    store = Store(f"{s3}/store")
    dataset = make(config_of(f"{s3}/{path}"), store)
    assert dataset.files == expected
    store.verify(dataset)


@pytest.mark.parametrize(
    ("kind", "method", "part"),
    [
        (503, "GET", "/logs/part-1"),
        (500, "PUT", "manifest.json"),
        pytest.param("cut", "GET", "/logs/part-2", marks=pytest.mark.slow),
        pytest.param(503, "PUT", "/train/part-00000", marks=pytest.mark.slow),
    ],
)
def test_what_passes_is_tried_again(s3, endpoint, expected, kind, method, part):
    store = Store(f"{s3}/store")
    endpoint.fault = Fault(kind, method, part, count=1)  # of what s3fs does not try again, botocore tries once
    dataset = make(config_of(f"{s3}/logs"), store)
    assert endpoint.fault.seen, "the fault was never met"
    endpoint.fault = None
    assert dataset.files == expected
    store.verify(dataset)


@pytest.mark.parametrize(("kind", "method", "part"), [("cut", "GET", "/logs/part-1"), (500, "PUT", "/train/")])
def test_what_does_not_pass_is_named_and_leaves_nothing(s3, endpoint, kind, method, part):
    store = Store(f"{s3}/store")
    endpoint.fault = Fault(kind, method, part)
    with pytest.raises(UnreachableError, match=r"s3://.* does not answer: ") as caught:
        make(config_of(f"{s3}/logs"), store)
    assert "no partial output was kept" in caught.value.hint
    assert endpoint.fault.seen
    endpoint.fault = None
    store.fs.invalidate_cache()
    assert store.find("datasets/d/k") is None
    assert store.names("datasets/d") == []


def test_the_fingerprint_of_logs_that_cannot_be_listed(s3, endpoint):
    config = config_of(f"{s3}/logs")
    assert raw_fingerprint(config.data) == raw_fingerprint(config.data)
    fsspec.filesystem("s3").invalidate_cache()
    endpoint.fault = Fault(503, "GET", "list-type=2")
    with pytest.raises(UnreachableError, match="does not answer"):
        raw_fingerprint(config.data)


def test_files_of_several_parts(s3, endpoint):
    """A file larger than a part is uploaded in several, and is not there before the last one is."""
    store = Store(f"{s3}/store")
    endpoint.fault = Fault(503, "PUT", "partNumber=2", count=1)
    data = np.random.default_rng(0).bytes(3 * PART)
    with store.draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        with draft.open("train/part-00000.parquet") as sink:
            for start in range(0, len(data), PART // 2):
                sink.write(data[start : start + PART // 2])
            assert not store.exists("datasets/d/k/train/part-00000.parquet")
        dataset = draft.commit({})
    assert endpoint.fault.seen, "the file had one part"
    endpoint.fault = None
    store.verify(dataset)


def test_what_writers_keep_below_hidden_folders_of_a_bucket_is_no_log(s3):
    fs, bucket = fsspec.filesystem("s3"), s3.removeprefix("s3://")
    expected = find_files(f"{s3}/logs").paths
    for name in ("_temporary/0/part-0.csv", "_delta_log/0.json", ".sparkStaging/x.csv", "_x=1/part-9.csv"):
        fs.pipe_file(f"{bucket}/logs/{name}", b"label,x,c\n")
    assert find_files(f"{s3}/logs").paths == sorted([*expected, f"{bucket}/logs/_x=1/part-9.csv"])
    assert find_files(f"{s3}/logs/*/*").paths == [f"{bucket}/logs/_x=1/part-9.csv"]
