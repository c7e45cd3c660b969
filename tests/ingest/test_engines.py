"""The passes by several threads, by Ray, over parts of files: the same dataset, byte for byte."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import pipeline
from pipeline.config import IngestConfig, RayConfig, SparseFeature
from pipeline.core.errors import ConfigError
from pipeline.ingest.counts import VocabCounts
from pipeline.ingest.engines import LocalEngine, in_order
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.id_mappings import VocabMapping
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.stage import engine_of
from tests.launch.test_loopback import listening
from tests.servers import kept_port
from tests.waits import PATIENCE

from .conftest import csv_config, write_rows


def config_for(path, **changes):
    config = csv_config(path)
    return dataclasses.replace(config, ingest=dataclasses.replace(config.ingest, **changes))


def awkward(path, rows=9000):
    """A CSV with blank, short and bad lines, words among the numbers, Windows line ends and blank lines at the end."""
    lines = ["label,x,c"]
    for i in range(rows):
        lines.append(f"{i % 2},{i * 7 % 501},id{i % 97}" + ("\r" if i % 11 == 0 else ""))
        lines += [""] * (i % 89 == 0) + ["1,2"] * (i % 97 == 0)
        lines += [f"0,word{i},z"] * (i % 301 == 0) + ["0, 5,z"] * (i == 9)
    path.write_text("\n".join(lines) + "\n\n\r\n\n", newline="")
    return path


def test_work_is_done_in_order_and_its_errors_arrive():
    assert list(in_order(lambda i: i * i, iter(range(20)), 3)) == [i * i for i in range(20)]

    def fail(i):
        if i == 4:
            raise ValueError("four")
        return i

    results = in_order(fail, iter(range(20)), 3)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="four"):
        next(results)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_and_block_size_do_not_change_a_byte(tmp_path, run_ingest, monkeypatch, workers):
    path = awkward(tmp_path / "log.csv")
    whole = run_ingest(config_for(path))
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 5000)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(workers))
    cut = run_ingest(config_for(path, block_mib=1))
    assert cut.checksums == whole.checksums
    assert len(whole.quarantine) > 200


@pytest.mark.parametrize("block_bytes", [700, 2003, 10**6])
def test_parts_of_a_file_hold_what_the_file_holds(tmp_path, block_bytes):
    path = awkward(tmp_path / "log.csv", rows=3000)
    config = config_for(path)
    (source,) = file_sources(config.data, data_spec(config.data), find_files(str(path)), config.ingest.block_mib)
    source = dataclasses.replace(source, file=dataclasses.replace(source.file, block_bytes=block_bytes))
    parts = source.parts()
    assert (len(parts) > 3) == (block_bytes < 10**5)
    assert b"".join(b.data for part in parts for b in part.blocks()) == b"".join(b.data for b in source.blocks())
    text = path.read_bytes()
    assert all(text[part.file.start - 1 : part.file.start] == b"\n" for part in parts[1:])


@pytest.mark.slow
@pytest.mark.ray
def test_ray_makes_the_dataset_that_threads_make(tmp_path, run_ingest, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "logs").mkdir()
    for number in range(2):
        awkward(tmp_path / "logs" / f"{number}.csv")
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 5000)
    local = run_ingest(config_for(tmp_path / "logs", block_mib=1))
    by_ray = run_ingest(config_for(tmp_path / "logs", block_mib=1, engine="ray"))
    assert by_ray.checksums == local.checksums
    assert by_ray.quarantine == local.quarantine


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_of_this_machine_listens_on_its_loopback_alone(tmp_path):
    """Whoever reaches the ports of a Ray runs commands in it."""
    pytest.importorskip("ray")
    config = config_for(tmp_path / "log.csv", engine="ray")
    with engine_of(config.ingest):
        addresses = listening(psutil.Process())
    assert addresses == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_that_listens_elsewhere_is_stopped_and_refused(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: "127.0.0.2")
    with pytest.raises(ConfigError, match=r"listens on 127\.0\.0\.2"), engine_of(IngestConfig(engine="ray")):
        pass
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_that_cannot_be_started_is_named(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delattr("ray._private.ray_constants")  # a Ray that is built in another way
    monkeypatch.setitem(sys.modules, "ray._private.ray_constants", None)
    with pytest.raises(ConfigError, match="cannot be started on this machine"), engine_of(IngestConfig(engine="ray")):
        pass
    assert not ray.is_initialized()


@pytest.fixture
def port():
    with kept_port() as kept:
        yield kept


@pytest.fixture
def running_ray(port):
    """The address of a Ray that runs already, started by its own command; stopped afterwards."""
    ray = pytest.importorskip("ray")
    start = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        f"--port={port}",
        "--num-cpus=2",
        "--node-ip-address=127.0.0.1",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--block",
    ]
    # Its workers import the pipeline and Ray from where this process does.
    paths = [str(Path(module.__file__).parents[1]) for module in (pipeline, ray)]
    head = subprocess.Popen(
        start,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert any("Ray runtime started" in line for line in head.stdout)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.ray
def test_a_ray_that_runs_already_is_joined_and_tells_how_far_it_is(tmp_path, run_ingest, monkeypatch, running_ray):
    import ray

    path = awkward(tmp_path / "log.csv")
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 5000)
    told = []
    monkeypatch.setattr("pipeline.ingest.stage._RateReporter.add", lambda meter, rows: told.append((meter.title, rows)))
    local = run_ingest(config_for(path, block_mib=1))
    del told[:]
    joined = run_ingest(config_for(path, block_mib=1, engine="ray", ray=RayConfig(address=running_ray)))
    assert joined.checksums == local.checksums
    assert joined.quarantine == local.quarantine
    first = [rows for what, rows in told if what == "pass 1 of 2"]
    assert len(first) > 2 and sum(first) == local.summary["rows"]
    assert not ray.is_initialized()
    ray.init(address=running_ray, log_to_driver=False, logging_level="ERROR")  # it runs on
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_an_address_where_no_ray_is_is_a_clear_error(tmp_path, run_ingest):
    pytest.importorskip("ray")
    config = config_for(write_rows(tmp_path / "log.csv"), engine="ray", ray=RayConfig(address="127.0.0.1:9"))
    with pytest.raises(ConfigError, match="no Ray answers at ingest.ray.address=127.0.0.1:9"):
        run_ingest(config)


def test_a_ray_that_is_not_installed_is_a_clear_error(tmp_path, run_ingest, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="ingest.engine is ray, but Ray cannot be imported") as error:
        run_ingest(config_for(write_rows(tmp_path / "log.csv"), engine="ray"))
    assert "ingest.engine=local" in error.value.hint


def eight_features(path, rows=400):
    """A log and a schema of eight features of ids with vocabularies."""
    names = [f"c{number}" for number in range(8)]
    lines = [",".join(["label", "x", *names])]
    lines += [",".join([str(row % 2), "1", *(f"{name}{row * 7 % 31}" for name in names)]) for row in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return csv_config(path, sparse={name: SparseFeature(mapping="vocab") for name in names})


def test_tables_are_fitted_side_by_side(tmp_path, run_ingest, monkeypatch):
    config, fit, both = eight_features(tmp_path / "log.csv"), VocabMapping.fit, threading.Barrier(2, timeout=PATIENCE)
    alone = run_ingest(config)

    def met(*given):
        both.wait()
        return fit(*given)

    monkeypatch.setattr(VocabMapping, "fit", met)
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(2))
    assert run_ingest(config).checksums == alone.checksums


def test_tables_whose_ids_are_on_disk_are_fitted_one_at_a_time(tmp_path, run_ingest, monkeypatch):
    config, fit, fitting, seen = eight_features(tmp_path / "log.csv"), VocabMapping.fit, threading.Semaphore(1), []

    def counted(self, feature, counts, *given):
        assert fitting.acquire(blocking=False)
        seen.append(counts.on_disk)
        made = fit(self, feature, counts, *given)
        fitting.release()
        return made

    monkeypatch.setattr(VocabMapping, "fit", counted)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 200)
    monkeypatch.setattr(VocabMapping, "counts", lambda *_: VocabCounts(kept=40, limit=5))
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda _: LocalEngine(4))
    run_ingest(config)
    assert seen == [True] * 8
