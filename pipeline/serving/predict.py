"""Scores raw rows with a published version: parses and transforms them as ingestion does, then runs the model.

Everything that decides how a row is read comes from the version itself, not from today's configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

import fsspec
import numpy as np
import polars as pl

from pipeline.config import DataConfig, DedupeConfig, SamplingConfig
from pipeline.config.data import connector_at
from pipeline.config.sequences import given_sequences
from pipeline.errors import ArtifactError, ConfigError, DataError
from pipeline.evaluation import evaluate
from pipeline.evaluation.metrics import sigmoid
from pipeline.evaluation.tasks import evaluate_tasks
from pipeline.ingest.file_source import FileSource, file_sources
from pipeline.ingest.parse import parse
from pipeline.ingest.rawfiles import Files, find_files, missing_data
from pipeline.ingest.rejects import Quarantine, Reject
from pipeline.ingest.sampling import rows_counted_for
from pipeline.ingest.sources import RawBlock, Source
from pipeline.ingest.spec import CRITEO_COLUMNS, DataSpec, data_spec
from pipeline.ingest.state import read_state
from pipeline.ingest.tasks import labels_of
from pipeline.ingest.transform import State, transform
from pipeline.publishing import promotion, versions
from pipeline.publishing.served import ServedModel, local_version
from pipeline.records import LABEL, Description, TaskColumn, weight_column
from pipeline.records.record import read
from pipeline.records.serving import SERVING
from pipeline.specs import LABEL_KINDS, MAIN_TASK, MODELS
from pipeline.store import Store, disk_errors
from pipeline.units import MIB, plural

SHOWN = 5  # rejected rows that the result tells of
P = ParamSpec("P")
Scored = pl.DataFrame  # columns file, line, probability, further tasks; label where the rows have one


def score_file(
    store: Store,
    model: str,
    version: str | None,
    path: str,
    write: Callable[[Scored], None],
    *,
    cache_mib: float,
    labelled: bool = True,
    reject: Callable[[str, list[Reject]], None] = lambda file, rejects: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Score the raw rows at ``path`` (file, directory or glob), block by block; what was done.

    ``version`` None: the one that serves. ``write`` gets the scores of every block, ``reject`` its rows that do not
    parse, with their file; the result counts those and shows the first. ``labelled`` false: the rows have no label
    column. ``progress`` gets bytes read of how many, on disk. With labels of both classes the result has the figures
    ``eval``. Raises ArtifactError for a version that is missing or damaged, DataError for rows that do not fit.
    """
    name = version or promotion.read_current(store, model).version
    if name is None:
        raise ArtifactError(f"model {model!r} has no serving version", hint="nightjar models ls")
    place = versions.version_path(model, name)
    artifact = versions.find_version(store, model, name)
    versions.require_intact(store, model, artifact, versions.small_files(artifact))
    data, block_mib = _data(store, place, path, labelled)
    spec = _spec(data, labelled)
    state = read_state(store, place, spec)
    began, rows, rejected, written = time.monotonic(), 0, Rejected(reject), False
    kept: list[_Labelled] = []
    with local_version(store, place) as folder, _named(path):
        served = ServedModel(folder, int(cache_mib * MIB))
        versions.require_intact(store, model, artifact, served.files_in_memory())
        total, blocks = _blocks(data, spec, block_mib)
        for block, read in blocks:
            scored, lines, rejects = _score(block, spec, state, served, labelled)
            rejected.add(block.file, rejects)
            rows += len(lines)
            written = True
            if labelled:
                kept.append(scored)
            write(_scores(block.file, lines, scored, served.description))
            progress(min(read, total - 1), total)
        progress(total, total)
        if rejected.rows and not rows:
            raise DataError(f"none of {plural(rejected.rows, 'row')} parses, the first: {rejected.first[0]}")
        if not written:  # a file of scores has its columns even where it has no rows
            write(_scores("", np.zeros(0, np.int64), _none(served, spec, labelled), served.description))
        cache = served.cache_figures()
    seconds = time.monotonic() - began
    done: dict[str, Any] = {
        "model": model, "version": name, "rows": rows, "rows_rejected": rejected.rows, "rejected": rejected.first,
        "seconds": round(seconds, 3), "rows_per_s": round(rows / max(seconds, 1e-9), 1), "cache": cache,
    }  # fmt: skip
    return done | _figures(kept, served.description)


@dataclasses.dataclass(frozen=True)
class _Labelled:
    """Logits of rows ([n], or [n, T] of several tasks), their labels by task (empty: they have none), weights."""

    logits: np.ndarray
    labels: dict[str, np.ndarray]
    weights: np.ndarray | None

    @property
    def columns(self) -> np.ndarray:
        """The logits as [n, T]."""
        return self.logits[:, None] if self.logits.ndim == 1 else self.logits


def _none(served: ServedModel, spec: DataSpec, labelled: bool) -> _Labelled:
    """No rows."""
    nothing = np.zeros(0, np.float32)
    names = [MAIN_TASK, *(task.name for task in spec.tasks)] if labelled else []
    logits = np.zeros((0, 1 + len(served.description.tasks or ())), np.float32)
    return _Labelled(logits, dict.fromkeys(names, nothing), nothing if labelled and _counted(spec) else None)


def _counted(spec: DataSpec) -> bool:
    """Whether labelled rows count for more or less than one."""
    return spec.row_weight is not None or spec.sampling.known_before


class Rejected:
    """Counts the rows that do not parse and passes them on, block by block; keeps only the ``first`` few."""

    def __init__(self, write: Callable[[str, list[Reject]], None]) -> None:
        self.write = write
        self.rows = 0
        self.first: list[str] = []

    def add(self, file: str, rejects: list[Reject]) -> None:
        """Take in the ``rejects`` of a block of ``file``."""
        if rejects:
            self.rows += len(rejects)
            shown = rejects[: SHOWN - len(self.first)]
            self.first += [f"{file} line {reject.line}: {reject.reason}" for reject in shown]
            self.write(file, rejects)


def _blocks(data: DataConfig, spec: DataSpec, block_mib: int) -> tuple[int, Iterator[tuple[RawBlock, int]]]:
    """Bytes on disk, and the blocks, each with how many of the bytes were read by then."""
    if data.connector is None:
        files = find_files(data.path or "")
        return files.bytes, _file_blocks(files, file_sources(data, spec, files, block_mib))
    snapshot = data.connector.latest(data)
    total = max(snapshot.delivery(None).bytes, 1)
    return total, _table_blocks(total, snapshot.sources(None, spec, int(block_mib * MIB)))


def _table_blocks(total: int, sources: Sequence[Source]) -> Iterator[tuple[RawBlock, int]]:
    for number, source in enumerate(sources, start=1):
        for block in source.blocks():
            yield block.read(), total * number // len(sources)


def _file_blocks(files: Files, sources: Sequence[FileSource]) -> Iterator[tuple[RawBlock, int]]:
    before = 0
    for source in sources:
        for block, at in source.placed_blocks():
            yield block.read(), before + at
        before += int(files.fs.info(source.path)["size"])


def _scores(file: str, lines: np.ndarray, scored: _Labelled, description: Description) -> Scored:
    """What is written of a block: its ``file``, and of each row number in it, prediction and label, if it has one.

    A further task has a column of its name, and for its labels (null where missing) one called ``label_<name>``.
    """
    main, *others = scored.columns.T
    columns = {"file": pl.Series([file] * len(lines), dtype=pl.String), "line": lines, "probability": sigmoid(main)}
    for (name, kind), logits in zip((description.tasks or {}).items(), others, strict=True):
        columns[name] = LABEL_KINDS.get(kind).predicted(logits)
    for name, labels in scored.labels.items():
        columns[LABEL if name == MAIN_TASK else f"label_{name}"] = pl.Series(labels).fill_nan(None)
    return pl.DataFrame(columns)


def _data(store: Store, place: str, path: str, labelled: bool) -> tuple[DataConfig, int]:
    """``data`` as the version at ``place`` was made with, at ``path``, and ``ingest.block_mib``.

    ArtifactError where the package of its ranking model is not installed.
    """
    from pipeline.compose import from_yaml

    built = read(Description, store, f"{place}/{SERVING}")
    if built.package and built.model not in MODELS.names():
        raise ArtifactError(
            f"{place} is a version of ranking model {built.model!r} of package {built.package}, which is not installed",
            hint=f"pip install {built.package.replace(' ', '==')}",
        )
    with store.open(f"{place}/config.yaml") as source:
        config = from_yaml(source.read().decode())
    data = dataclasses.replace(config.data, path=path)
    connector, inside = connector_at(path)
    if connector is not None:
        options = data.options if data.connector is connector else {}
        data = dataclasses.replace(data, path=inside, format=connector.name, options=options, day=None, snapshot=None)
        return data, config.ingest.block_mib
    if data.format == "synthetic":  # a synthetic log is saved as a Criteo TSV
        data = dataclasses.replace(data, format="criteo")
    ending = path.rpartition(".")[2]
    if ending in ("parquet", "orc", "avro", "jsonl"):  # columns by name, whatever the training's logs were written as
        data = dataclasses.replace(data, format=ending)
    if not labelled:
        data = dataclasses.replace(data, columns=_without_label(data))
    return data, config.ingest.block_mib


def _without_label(data: DataConfig) -> list[str]:
    names = data.columns or (CRITEO_COLUMNS if data.format == "criteo" else [])
    labels = {
        data.label.column,
        data.weight,
        data.sampling.column,
        *(task.column or name for name, task in data.tasks.items()),
    }
    return [name for name in names if name not in labels]


def _spec(data: DataConfig, labelled: bool) -> DataSpec:
    """What a row must have: the features, and the label if there is one. Days and splits matter to training only.

    Histories that ingestion built must come with the row, as lists of structs.
    """
    data = dataclasses.replace(data, dedupe=DedupeConfig(), sequences=given_sequences(data.sequences))
    spec = data_spec(data if labelled else dataclasses.replace(data, tasks={}, weight=None, sampling=SamplingConfig()))
    unused = ("data.day_column", "data.timestamp", "data.hour_column", *(() if labelled else ("data.label.column",)))
    columns = {name: option for name, option in spec.columns.items() if option not in unused or name == spec.row_time}
    return dataclasses.replace(spec, day_column=None, timestamp=None, hour_column=None, true_probability=False,
                               columns=columns)  # fmt: skip


def _score(
    block: RawBlock, spec: DataSpec, state: State, served: ServedModel, labelled: bool
) -> tuple[_Labelled, np.ndarray, list[Reject]]:
    """Logits and labels of the rows of ``block`` that parse, their line numbers, and the others."""
    raw = block.frame
    if not labelled:
        raw = raw.with_columns(pl.lit(spec.negative).alias(spec.label))
    parsed = parse(raw, block.lines, spec)
    rejects = [*block.rejects, *parsed.rejects]
    columns = transform(parsed.frame, spec, state)
    dense = columns.select(served.description.dense).to_numpy().astype(np.float32)
    ids = {name: _ids(columns, name, multi) for name, multi in served.description.sparse.items()}
    ids |= {name: _ids(columns, name, True) for name in served.description.event_columns}
    logits = served.score(np.ascontiguousarray(dense), ids)
    labels = labels_of(columns, spec) if labelled else {}
    weights = rows_counted_for(columns, spec) if labelled else None
    return _Labelled(logits, labels, weights), parsed.lines, sorted(rejects, key=lambda reject: reject.line)


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
    weights = weight_column(name)
    return _Lists(
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        columns[name].explode().to_numpy(),
        columns[weights].explode().to_numpy() if weights in columns.columns else None,
    )


def _figures(kept: list[_Labelled], description: Description) -> dict[str, Any]:
    """``eval``: NE, AUC, ... of labelled rows of both classes, and of further tasks; {} else."""
    if not kept:
        return {}
    labels = {name: np.concatenate([each.labels[name] for each in kept]) for name in kept[0].labels}
    logits = np.concatenate([each.columns for each in kept])
    weights = (
        None if kept[0].weights is None else np.concatenate([w for w in (e.weights for e in kept) if w is not None])
    )
    clicked = labels[MAIN_TASK]
    counted = clicked if weights is None else clicked[weights > 0]
    if not 0 < counted.sum() < len(counted):
        return {}
    figures: dict[str, Any] = evaluate(clicked, np.ascontiguousarray(logits[:, 0]), weights=weights)
    tasks = [TaskColumn(name=name, kind=kind) for name, kind in (description.tasks or {}).items()]
    if tasks:
        others = evaluate_tasks(tasks, labels, logits, weights)
        figures["tasks"] = {name: each.to_json() for name, each in others.items()}
    return {"eval": figures}


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors about the rows name the command's argument and flags, not the settings of an ingestion."""
    try:
        yield
    except DataError as error:
        if error.message == missing_data(path).message:
            raise DataError(
                f"nothing exists at {path}, expected a file, a directory or a glob that matches files",
                hint="nightjar predict <file, directory or glob>",
            ) from None
        hint = "--no-label, if the rows have no label column"
        if "(data.label.column)" not in error.message:
            hint = f"rows with the format, header and columns that the version's config.yaml names under data; {hint}"
        raise DataError(error.message.replace(f"data.path={path}", path), hint=hint) from None


@contextmanager
def score_sink(out: str, path: str) -> Iterator[Callable[[Scored], None]]:
    """Takes scores block by block and writes them to ``out`` (any fsspec URL): Parquet by its name, else CSV.

    ``-`` is standard output. A file has its name only once it is whole. ConfigError where the rows at ``path`` would be
    overwritten.
    """
    if out == "-":
        yield _csv(sys.stdout.buffer)
        sys.stdout.flush()
        return
    with _whole_file(out, "--out", path) as sink, contextlib.ExitStack() as stack:
        yield _guarded(_parquet(sink, stack) if out.endswith(".parquet") else _csv(sink), out, "--out")


@contextmanager
def reject_sink(out: str | None, path: str) -> Iterator[Callable[[str, list[Reject]], None]]:
    """Takes rejected rows block by block and writes them to ``out``: a JSON object a line, as ``quarantine.jsonl``.

    None: they are written nowhere. As ``score_sink`` otherwise.
    """
    if out is None:
        yield lambda file, rejects: None
        return
    with _whole_file(out, "--rejected", path) as sink:
        yield _guarded(Quarantine(sink).add, out, "--rejected")


@contextmanager
def _whole_file(out: str, option: str, path: str) -> Iterator[Any]:
    """A file at ``out``, named by ``option``, that has its name only once it is whole."""
    fs, full = fsspec.core.url_to_fs(out)
    with _named(path):
        read = find_files(path).paths if connector_at(path)[0] is None else []
    if full in read:
        raise ConfigError(f"{option} {out} is one of the input files", hint=f"{option} <another name>")
    partial = f"{full}.partial"
    with disk_errors(out, f"{option} "):
        fs.makedirs(full.rpartition("/")[0] or ".", exist_ok=True)
        try:
            with fs.open(partial, "wb") as sink:
                yield sink
            fs.mv(partial, full)
        except BaseException:
            if fs.exists(partial):
                fs.rm_file(partial)
            raise


def _guarded(write: Callable[P, None], out: str, option: str) -> Callable[P, None]:
    """``write``, whose failures name its own file: two of them may be open."""

    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        with disk_errors(out, f"{option} "):
            write(*arguments, **named)

    return guarded


def _csv(sink: Any) -> Callable[[Scored], None]:
    blocks = itertools.count()
    return lambda scores: sink.write(scores.write_csv(include_header=next(blocks) == 0).encode())


def _parquet(sink: Any, stack: contextlib.ExitStack) -> Callable[[Scored], None]:
    import pyarrow.parquet as pq

    writers: list[Any] = []

    def write(scores: Scored) -> None:
        table = scores.to_arrow()
        if not writers:
            writers.append(stack.enter_context(pq.ParquetWriter(sink, table.schema, compression="zstd")))
        writers[0].write_table(table)

    return write
