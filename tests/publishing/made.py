"""Versions made by hand, without training: a checkpoint of given rows and a ranking model of given weights."""

import dataclasses
import functools
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.checkpoint.reader import ChainReader
from pipeline.config import Config, DataConfig, HardwareConfig, SparseFeature
from pipeline.config.compose import to_yaml
from pipeline.models.settings import DlrmConfig
from pipeline.publishing.dense import CONFIG, probe, write_dense
from pipeline.publishing.program import PROGRAM, Program, read_program, write_program
from pipeline.publishing.served import SERVING, Description
from pipeline.publishing.table_writer import write_table
from pipeline.publishing.versions import version_path
from pipeline.records import WEIGHTS, DatasetSchema, SparseColumn, Tower, Towers
from pipeline.specs import ModelInputs
from pipeline.store import Store
from tests.checkpoint import built

SCHEMA = DatasetSchema(
    dense=("x", "y"),
    sparse=(
        SparseColumn(name="a", rows=50),
        SparseColumn(name="b/c", rows=37, multi=True, weighted=True),
        SparseColumn(name="long", rows=900),
    ),
    rows={"train": 0, "test": 0},
    files={},
    groups={},
)
FLAT = Towers(partition="flat", towers=(Tower(features=tuple(built.ROWS), hosts=(0,)),))
# What docs/publishing.md promises: units in the last place between logits as served and as trained, fp32 tables.
MOST_ULPS = 32
MODEL = DlrmConfig(embedding_dim=built.DIM, bottom_mlp=[8], top_mlp=[8])


def config(**publish) -> Config:
    sparse = {name: SparseFeature() for name in built.ROWS}
    made = Config(run="r", data=DataConfig(name="clicks", format="synthetic", sparse=sparse), model=MODEL)
    return dataclasses.replace(made, publish=dataclasses.replace(made.publish, **publish))


def groups(config: Config) -> dict[str, Any]:
    """What ``build_member`` takes of ``config``."""
    return {name: getattr(config, name) for name in ("model", "data", "hardware", "seed")}


def tables(step: int = 1) -> dict[str, torch.Tensor]:
    return {name: weight for name, (weight, _) in built.values(step).items()}


def inputs(seed: int, dim: int = built.DIM) -> ModelInputs:
    """Of a model of ``SCHEMA``."""
    return ModelInputs(dense=SCHEMA.dense, vectors=tuple(column.name for column in SCHEMA.sparse), dim=dim, seed=seed)


def dense_part(seed: int = 3):
    from pipeline.models.build import build_model
    from pipeline.models.dense_model import DenseModel

    return DenseModel(build_model(MODEL, inputs(seed))).eval()


@functools.cache
def archive() -> bytes:
    """The program of ``dense_part()``; torch takes half a second to export it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
            write_program(draft, dense_part(), 2, (3, built.DIM))
            draft.commit({})
        return Path(store.full(f"v/{PROGRAM}")).read_bytes()


def write_version(store: Store, coding: str, version: str = "v00001-00000000"):
    """A version of the tables of ``built.values(1)`` and ``dense_part()``; its path."""
    reader = ChainReader(store, built.put(store, 1))
    path = version_path("clicks", version)
    with store.draft(path, kind="model", key="0" * 32, config={}, inputs={}) as draft:
        layouts = {name: write_table(draft, [reader], name, coding).layout for name in built.ROWS}
        with draft.open(PROGRAM) as sink:
            sink.write(archive())
        draft.write_json(SERVING, Description.of(SCHEMA, built.DIM, layouts).to_json())
        draft.commit({"version": version, "verdict": "PASS"})
    return path


def write_built(store: Store, *, wrong: float = 0.0, package: str = "") -> str:
    """A version as the publish stage writes it, but for its program; its path. ``wrong``: added to its probe's logits.

    ``package``: of which it says that it adds the ranking model.
    """
    reader, path = ChainReader(store, built.put(store, 1)), version_path("clicks", "v00002-00000000")
    module = dense_part()
    weights = {f"head.ranking.{name}": value for name, value in module.ranking.state_dict().items()}
    logits = [each + wrong for each in probe(module, SCHEMA, MODEL, 1)]
    with store.draft(path, kind="model", key="1" * 32, config={}, inputs={}) as draft:
        layouts = {name: write_table(draft, [reader], name, "fp32").layout for name in built.ROWS}
        write_dense(draft, SCHEMA, FLAT, [weights], [1.0], logits)
        about = Description.of(SCHEMA, built.DIM, layouts).built_by("dlrm", package)
        draft.write_json(SERVING, dataclasses.replace(about, weights=WEIGHTS).to_json())
        with draft.open(CONFIG) as sink:
            sink.write(to_yaml(dataclasses.replace(config(), hardware=HardwareConfig(name="t"))).encode())
        draft.commit({"version": "v00002-00000000", "verdict": "PASS"})
    return path


def archived(folder: Path, module: torch.nn.Module, dense: int, embeddings: tuple[int, ...]) -> Program:
    """``module`` out of an archive, as versions of earlier releases hold it."""
    store = Store(str(folder / "archived"))
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        write_program(draft, module, dense, embeddings)
        draft.commit({})
    return read_program(Path(store.full(f"v/{PROGRAM}")))


@dataclasses.dataclass
class Lists:
    offsets: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None


def rows(count: int, seed: int = 0):
    """Made-up rows: dense [n, 2] and ids by feature."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, count)
    total = int(lengths.sum())
    lists = Lists(
        np.concatenate([[0], np.cumsum(lengths)]),
        rng.integers(0, 37, total).astype(np.int32),
        rng.uniform(0.5, 1.5, total).astype(np.float32),
    )
    ids = {
        "a": rng.integers(0, 50, count).astype(np.int32),
        "b/c": lists,
        "long": rng.geometric(0.02, count).clip(1, 899).astype(np.int32),
    }
    return rng.normal(0, 1, (count, 2)).astype(np.float32), ids


def plain(
    store,
    version,
    *,
    verdict: str = "PASS",
    size: int = 3,
    key: str = "k" * 32,
    train: str = "",
    files: Mapping[str, bytes] = types.MappingProxyType({}),
    **summary,
):
    """A version with one small file and ``files``, of the training with key ``train``, for tests of promoting."""
    inputs = {"train": train} if train else {}
    with store.draft(version_path("m", version), kind="model", key=key, config={}, inputs=inputs) as draft:
        with draft.open("tables/a.rows") as sink:
            sink.write(b"x" * size)
        for name, data in files.items():
            with draft.open(name) as sink:
                sink.write(data)
        return draft.commit({"version": version, "verdict": verdict, **summary})
