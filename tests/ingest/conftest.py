"""Small configurations and a runner for ingestion tests."""

import io
import json
from pathlib import Path

import polars as pl
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.config import Config, DataConfig, DenseFeature, HardwareConfig, LabelConfig, SparseFeature
from pipeline.config.checks import check
from pipeline.ingest.stage import ingest
from pipeline.records import DatasetSchema
from pipeline.store import Store
from tests.logged import listen


class Dataset:
    """A committed dataset and easy ways to look at it."""

    def __init__(self, store, artifact, summary, messages):
        self.store, self.artifact, self.summary, self.messages = store, artifact, summary, messages
        self.schema = DatasetSchema.from_json(self.json("schema.json"))

    def bytes(self, name):
        with self.store.open(f"{self.artifact.path}/{name}") as source:
            return source.read()

    def json(self, name):
        return json.loads(self.bytes(name))

    def split(self, name):
        parts = [pl.read_parquet(self.bytes(file)) for file in self.schema.files[name]]
        return pl.concat(parts) if parts else pl.DataFrame()

    @property
    def all_rows(self):
        return pl.concat([part for part in (self.split("train"), self.split("test")) if part.width])

    def vocab(self, feature):
        return pl.read_parquet(self.bytes(f"vocab/{feature}.parquet"))

    @property
    def quarantine(self):
        return [json.loads(line) for line in self.bytes("quarantine.jsonl").splitlines()]

    @property
    def checksums(self):
        """Of all files but that which says where the logs lay."""
        return {name: entry.checksum for name, entry in self.artifact.files.items() if name != "sources.json"}


@pytest.fixture(autouse=True)
def readers_of_memory_files_have_positions_of_their_own(monkeypatch):
    """Every reader of a ``memory://`` file gets the same object from fsspec, position included.

    Ingestion reads a log while another thread takes its checksum, as any other filesystem allows.
    """
    opened = MemoryFileSystem._open

    def open_apart(self, path, mode="rb", **settings):
        file = opened(self, path, mode, **settings)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file

    monkeypatch.setattr(MemoryFileSystem, "_open", open_apart)


@pytest.fixture
def run_ingest(tmp_path):
    """Ingest a configuration into a fresh store; returns a Dataset. ``clock``: of ``ingest``, by name."""
    count = iter(range(1000))

    def run(config: Config, **clock) -> Dataset:
        check(config)
        store, messages = Store(str(tmp_path / f"store{next(count)}")), listen()
        with store.draft("datasets/d/k", kind="dataset", key="k", config={}, inputs={}) as draft:
            summary = ingest(config.data, config.ingest, config.seed, draft, **clock)
            artifact = draft.commit(summary)
        store.verify(artifact)
        kept = summary["rows_train"] + summary.get("rows_validation", 0) + summary["rows_test"]
        kept += summary.get("rows_left_out", 0) + summary.get("rows_repeated", 0) + summary.get("rows_gap", 0)
        assert summary["rows"] == kept + summary["rows_quarantined"]
        return Dataset(store, artifact, summary, messages)

    return run


def csv_config(path: Path | str, **changes) -> Config:
    """Columns label, x (dense) and c (sparse); ``changes`` are fields of DataConfig."""
    fields = {
        "name": "d",
        "format": "csv",
        "path": str(path),
        "label": LabelConfig(),
        "dense": {"x": DenseFeature()},
        "sparse": {"c": SparseFeature()},
        "max_quarantine_share": 1.0,
    }
    return Config(stages=["ingest"], data=DataConfig(**{**fields, **changes}), hardware=HardwareConfig(name="laptop"))


def write_rows(path: Path, rows: int = 300, header: str = "label,x,c") -> Path:
    """A CSV of ``rows`` plain rows."""
    lines = [header] if header else []
    lines += [f"{int(i % 3 == 0)},{i},id{i % 7}" for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
