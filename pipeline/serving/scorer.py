"""Scores blocks of raw rows with an opened version: parses and transforms them as ingestion does, then runs the model.

Everything that decides how a row is read comes from the version itself, not from today's configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import torch

from pipeline.config import Config
from pipeline.config.data import DataConfig, connector_at
from pipeline.config.ingest import DedupeConfig, SamplingConfig, SplitConfig
from pipeline.config.sequences import given_sequences
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.ingest.engines import in_order
from pipeline.ingest.labels import labels_of, rows_counted_for
from pipeline.ingest.parse import parse
from pipeline.ingest.schema import CRITEO_COLUMNS, DataSpec
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import Block
from pipeline.ingest.state import read_state
from pipeline.ingest.transform_pass import transform
from pipeline.ingest.values import Reject
from pipeline.publishing.served import ServedModel
from pipeline.records.dataset import weight_column
from pipeline.records.record import read
from pipeline.records.serving import SERVING, Description
from pipeline.specs.label_kind import MAIN_TASK
from pipeline.specs.model import MODELS
from pipeline.store.artifacts import Store


@dataclasses.dataclass(frozen=True)
class ScoredBlock:
    """The scores of a block.

    Attributes:
        file: The block's file.
        lines: Numbers of the rows that parse, [n].
        logits: Logits of these rows, [n]; with several tasks [n, T].
        labels: By task, [n] each; empty where rows have none.
        weights: How many rows each row counts as, [n]; None: one.
        rejects: The rows that do not parse.
    """

    file: str
    lines: np.ndarray
    logits: np.ndarray
    labels: dict[str, np.ndarray]
    weights: np.ndarray | None
    rejects: list[Reject]

    @property
    def columns(self) -> np.ndarray:
        """The logits as [n, T]."""
        return self.logits[:, None] if self.logits.ndim == 1 else self.logits


class Scorer:
    """The version at ``place`` of ``store``, whose files are in ``folder``, opened for the rows at ``path``.

    ``memory``: bytes for table rows; ``ranks``: processes of this machine that score beside each other and share them.
    ArtifactError where the version is damaged, or the package of its ranking model is not installed.
    """

    def __init__(
        self, store: Store, place: str, folder: Path, path: str, *, memory: int, labelled: bool, ranks: int = 1
    ) -> None:
        self.labelled = labelled
        self.data, self.block_mib = _data(store, place, path, labelled)
        self.spec = _spec(self.data, labelled)
        self._state = read_state(store, place, self.spec)
        self.served = ServedModel(folder, memory, ranks=ranks)

    @property
    def description(self) -> Description:
        """The version's ``serving.json``."""
        return self.served.description

    def cache_figures(self) -> dict[str, float]:
        """See ``ServedModel``."""
        return self.served.cache_figures()

    def score(self, unread: Block) -> ScoredBlock:
        """Return logits and labels of the rows that parse, and the other rows."""
        block = unread.read()
        raw = block.frame
        if not self.labelled:
            raw = raw.with_columns(pl.lit(self.spec.negative).alias(self.spec.label))
        parsed = parse(raw, block.lines, self.spec)
        columns = transform(parsed.frame, self.spec, self._state)
        dense = columns.select(self.description.dense).to_numpy().astype(np.float32)
        ids = {}
        for name, multi in (self.description.sparse | dict.fromkeys(self.description.event_columns, True)).items():
            ids[name] = _ids(columns, name, multi)
        logits = self.served.score(np.ascontiguousarray(dense), ids)
        labels: dict[str, np.ndarray] = {}
        weights: np.ndarray | None = None
        if self.labelled:
            labels, weights = labels_of(columns, self.spec), rows_counted_for(columns, self.spec)
        # Rows are rejected while they are read and while they are parsed; the report has both in the order of lines.
        rejects = sorted([*block.rejects, *parsed.rejects], key=lambda reject: reject.line)
        return ScoredBlock(block.file, parsed.lines, logits, labels, weights, rejects)

    def none(self) -> ScoredBlock:
        """Return the scores of no rows."""
        nothing = np.zeros(0, np.float32)
        labels, weights = dict[str, np.ndarray](), None
        if self.labelled:
            labels = {MAIN_TASK: nothing}
            for task in self.spec.tasks:
                labels[task.name] = nothing
            if self.spec.row_weight is not None or self.spec.sampling.known_before:
                weights = nothing
        logits = np.zeros((0, 1 + len(self.description.tasks or ())), np.float32)
        return ScoredBlock("", np.zeros(0, np.int64), logits, labels, weights, [])


def _data(store: Store, place: str, path: str, labelled: bool) -> tuple[DataConfig, int]:
    # Returns group ``data`` that the version was made with, changed for the rows at ``path``, and ingest.block_mib.
    built = read(Description, store, f"{place}/{SERVING}")
    if built.package and built.model not in MODELS.names():
        raise ArtifactError(
            f"{place} is a version of ranking model {built.model!r} of package {built.package}, which is not installed",
            hint=f"pip install {built.package.replace(' ', '==')}",
        )
    config = version_settings(store, place)
    data = dataclasses.replace(config.data, path=path)
    connector, inside = connector_at(path)
    if connector is not None:
        # The training's day and snapshot do not apply to this path, nor do the options of another connector.
        options = data.options if data.connector is connector else {}
        data = dataclasses.replace(data, path=inside, format=connector.name, options=options, day=None, snapshot=None)
        return data, config.ingest.block_mib
    if data.format == "synthetic":
        # A synthetic log is saved as a Criteo TSV.
        data = dataclasses.replace(data, format="criteo")
    ending = path.rpartition(".")[2]
    if ending in ("parquet", "orc", "avro", "jsonl"):
        # Columns of these formats have names, whatever format the training's logs had.
        data = dataclasses.replace(data, format=ending)
    if not labelled:
        labels = {data.label.column, data.weight, data.sampling.column}
        for name, task in data.tasks.items():
            labels.add(task.column or name)
        columns = data.columns
        if not columns and data.format == "criteo":
            columns = CRITEO_COLUMNS
        data = dataclasses.replace(data, columns=[name for name in columns or () if name not in labels])
    return data, config.ingest.block_mib


def version_settings(store: Store, place: str) -> Config:
    """Read the configuration of the version at ``place``; ArtifactError if it is invalid."""
    from pipeline.config.compose import from_yaml

    with store.open(f"{place}/config.yaml") as source:
        text = source.read()
    try:
        return from_yaml(text.decode())
    except (UnicodeDecodeError, RecursionError, ConfigError) as error:
        why = error.message if isinstance(error, ConfigError) else type(error).__name__
        raise ArtifactError(
            f"{store.url_of(place)}/config.yaml is no configuration: {why}", hint="publish it again"
        ) from None


def _spec(data: DataConfig, labelled: bool) -> DataSpec:
    # Returns what a row must have: the features, and the label if there is one. Days and splits matter to training
    # only. Histories that ingestion built must come with the row, as lists of structs.
    data = dataclasses.replace(
        data, dedupe=DedupeConfig(), split=SplitConfig(), sequences=given_sequences(data.sequences)
    )
    unused = ["data.day_column", "data.timestamp", "data.hour_column"]
    if not labelled:
        data = dataclasses.replace(data, tasks={}, weight=None, sampling=SamplingConfig())
        unused.append("data.label.column")
    spec = data_spec(data)
    columns = {}
    for name, option in spec.columns.items():
        # Nothing is split here, so times are not needed, except the row time, from which ages of events count.
        if option not in unused or name == spec.row_time:
            columns[name] = option
    return dataclasses.replace(
        spec, day_column=None, timestamp=None, hour_column=None, true_probability=False, columns=columns
    )


@dataclasses.dataclass(frozen=True)
class _Lists:
    """A multi-valued column as ``ServedModel`` takes it."""

    offsets: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None


def _ids(columns: pl.DataFrame, name: str, multi: bool) -> Any:
    if not multi:
        return columns[name].to_numpy()
    lengths = columns[name].list.len().to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    weights, column = None, weight_column(name)
    if column in columns.columns:
        weights = columns[column].explode().to_numpy()
    return _Lists(offsets, columns[name].explode().to_numpy(), weights)


A = TypeVar("A")
B = TypeVar("B")


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Let torch compute with one thread in this context, as every rank does; yields how many threads it had before.

    The number of threads decides the order in which a library adds numbers.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def run_in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Yield ``work`` of each item in order, by as many threads as torch has; torch gets one thread in each of them."""
    with one_thread() as threads, contextlib.closing(in_order(work, iter(items), threads)) as results:
        yield from results
