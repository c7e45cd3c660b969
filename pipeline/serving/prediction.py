"""Scores raw rows of a file, a folder or a table with a published version, and writes the scores to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import fsspec
import numpy as np
import polars as pl
from fsspec.implementations.local import LocalFileSystem

from pipeline.config.data import DataConfig, connector_at
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import ArtifactError, ConfigError, DataError
from pipeline.core.units import MIB, plural
from pipeline.evaluation.metrics import evaluate, evaluate_tasks, sigmoid
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.rawfiles import find_files, is_missing_data
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.sources import Block
from pipeline.ingest.values import Quarantine, Reject
from pipeline.publishing import promotion, versions
from pipeline.publishing.served import local_version
from pipeline.records.dataset import LABEL, TaskColumn
from pipeline.records.serving import Description
from pipeline.serving.scorer import ScoredBlock, Scorer, one_thread
from pipeline.serving.scoring_processes import Effort, Ranks, in_blocks
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK
from pipeline.store.artifacts import Store
from pipeline.store.errors import disk_errors
from pipeline.store.files import whole_file

# Number of rejected rows that the result shows.
SHOWN = 5
P = ParamSpec("P")
# Columns file, line, probability, further tasks; label where the rows have one.
Scored = pl.DataFrame


def score_file(
    store: Store,
    model: str,
    version: str | None,
    path: str,
    write: Callable[[Scored], None],
    *,
    cache_mib: float,
    labelled: bool = True,
    ranks: int | None = None,
    none_is_error: bool = True,
    reject: Callable[[str, list[Reject]], None] = lambda file, rejects: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Score the raw rows at ``path`` (file, directory or glob), block by block.

    Args:
        store: Where the model is.
        model: Its name.
        version: None: the one that serves.
        path: The rows.
        write: Gets the scores of every block.
        cache_mib: Memory for table rows.
        labelled: False: the rows have no label column.
        ranks: Processes that score; None: as many as pay. Their number changes no bit of the scores.
        none_is_error: Whether it is an error if there are rows and none of them parses.
        reject: Gets the rows of a block that do not parse, with their file.
        progress: Gets how many bytes on disk were read, and how many there are.

    Returns:
        A summary. It counts rejected rows and shows the first, and has the figures ``eval`` if there are labels of both
        classes.

    Raises:
        ArtifactError: The version is missing or damaged.
        DataError: The rows do not fit.
    """
    name = version or promotion.read_current(store, model).version
    if name is None:
        raise ArtifactError(f"model {model!r} has no serving version", hint="nightjar models ls")
    place = versions.version_path(model, name)
    artifact = versions.find_version(store, model, name)
    versions.require_intact(store, model, artifact, versions.small_files(artifact))
    began, rows, rejected, written = time.monotonic(), 0, RejectCounter(reject), False
    kept: list[ScoredBlock] = []
    with local_version(store, place, ("",)) as folder, _name_argument(path), one_thread():
        opening: dict[str, Any] = {"path": path, "memory": int(cache_mib * MIB), "labelled": labelled}
        opening["ranks"] = ranks or available_cpus()
        scorer = Scorer(store, place, folder, **opening)
        versions.require_intact(store, model, artifact, scorer.served.files_in_memory())
        total, blocks = blocks_of(scorer.data, scorer.spec, scorer.block_mib)
        with Ranks(scorer, {"folder": str(folder), **opening}) as side:
            for scored, read in in_blocks(side, blocks, Effort(ranks, total, scorer.block_mib * MIB)):
                rejected.add(scored.file, scored.rejects)
                rows += len(scored.lines)
                written = True
                if labelled:
                    kept.append(dataclasses.replace(scored, lines=scored.lines[:0], rejects=[]))
                write(score_lines(scored, scorer.description))
                progress(min(read, total - 1), total)
            cache = side.cache_figures()
        progress(total, total)
        if none_is_error and rejected.rows and not rows:
            raise DataError(f"none of {plural(rejected.rows, 'row')} parses, the first: {rejected.first[0]}")
        if not written:
            # A file of scores has its columns even where it has no rows.
            write(score_lines(scorer.none(), scorer.description))
    seconds = time.monotonic() - began
    done: dict[str, Any] = {
        "model": model,
        "version": name,
        "rows": rows,
        "rows_rejected": rejected.rows,
        "rejected": rejected.first,
        "seconds": round(seconds, 3),
        "rows_per_s": round(rows / max(seconds, 1e-9), 1),
        "ranks": side.count,
        "cache": cache,
    }
    return done | _figures(kept, scorer.description)


class RejectCounter:
    """Counts the rows that do not parse and passes them on, block by block; keeps only the ``first`` few."""

    def __init__(self, write: Callable[[str, list[Reject]], None]) -> None:
        self.write = write
        self.rows = 0
        self.first: list[str] = []

    def add(self, file: str, rejects: list[Reject]) -> None:
        """Count and pass on the ``rejects`` of a block of ``file``."""
        if not rejects:
            return
        self.rows += len(rejects)
        for reject in rejects[: SHOWN - len(self.first)]:
            self.first.append(f"{file} line {reject.line}: {reject.reason}")
        self.write(file, rejects)


def blocks_of(data: DataConfig, spec: DataSpec, block_mib: int) -> tuple[int, Iterator[tuple[Block, int]]]:
    """Return the bytes on disk, and the blocks, each with the number of bytes read so far."""
    if data.connector is None:
        files = find_files(data.path or "")
        file_parts = file_sources(data, spec, files, block_mib)

        def file_blocks() -> Iterator[tuple[Block, int]]:
            before = 0
            for source in file_parts:
                for block, at in source.placed_blocks():
                    yield block, before + at
                before += int(files.fs.info(source.path)["size"])

        return files.bytes, file_blocks()
    snapshot = data.connector.latest(data)
    total = max(snapshot.delivery(None).bytes, 1)
    parts = snapshot.sources(None, spec, int(block_mib * MIB))

    def table_blocks() -> Iterator[tuple[Block, int]]:
        for number, part in enumerate(parts, start=1):
            for block in part.blocks():
                yield block, total * number // len(parts)

    return total, table_blocks()


def score_lines(scored: ScoredBlock, description: Description) -> Scored:
    """Return what is written for a block: for each row its file, number, prediction, and label if it has one.

    A further task has a column of its name, and for its labels (null where missing) one called ``label_<name>``.
    """
    main, *others = scored.columns.T
    columns = {
        "file": pl.Series([scored.file] * len(scored.lines), dtype=pl.String),
        "line": scored.lines,
        "probability": sigmoid(main),
    }
    for (name, kind), logits in zip((description.tasks or {}).items(), others, strict=True):
        columns[name] = LABEL_KINDS.get(kind).predicted(logits)
    for name, labels in scored.labels.items():
        title = LABEL if name == MAIN_TASK else f"label_{name}"
        columns[title] = pl.Series(labels).fill_nan(None)
    return pl.DataFrame(columns)


def _figures(kept: list[ScoredBlock], description: Description) -> dict[str, Any]:
    # Returns ``eval``: NE, AUC, ... of labelled rows, and those of further tasks; {} without labels of both classes.
    if not kept:
        return {}
    labels = {name: np.concatenate([block.labels[name] for block in kept]) for name in kept[0].labels}
    logits = np.concatenate([block.columns for block in kept])
    weights, counted = None, labels[MAIN_TASK]
    # The version's settings decide about weights, so all blocks have them or none has.
    parts = [block.weights for block in kept if block.weights is not None]
    if parts:
        weights = np.concatenate(parts)
        # Both classes must be present among the rows that count.
        counted = counted[weights > 0]
    if not 0 < counted.sum() < len(counted):
        return {}
    figures: dict[str, Any] = evaluate(labels[MAIN_TASK], np.ascontiguousarray(logits[:, 0]), weights=weights)
    tasks = [TaskColumn(name=name, kind=kind) for name, kind in (description.tasks or {}).items()]
    if tasks:
        others = evaluate_tasks(tasks, labels, logits, weights)
        figures["tasks"] = {name: task.to_json() for name, task in others.items()}
    return {"eval": figures}


@contextmanager
def _name_argument(path: str) -> Iterator[None]:
    # Errors about the rows name the command's argument and flags, not the settings of an ingestion.
    try:
        yield
    except DataError as error:
        hint = "--no-label, if the rows have no label column"
        if is_missing_data(error, path):
            hint = "nightjar predict <file, directory or glob>"
        elif "(data.label.column)" not in error.message:
            hint = f"rows with the format, header and columns that the version's config.yaml names under data; {hint}"
        raise DataError(error.message.replace(f"data.path={path}", path), hint=hint) from None


@contextmanager
def score_sink(out: str, path: str) -> Iterator[Callable[[Scored], None]]:
    """Open a writer of scores, block by block, to ``out`` (any fsspec URL): Parquet if its name says so, else CSV.

    ``-`` is standard output. A file has its name only once it is whole. ConfigError where the rows at ``path`` would be
    overwritten.
    """
    if out == "-":
        yield _csv_writer(sys.stdout.buffer)
        sys.stdout.flush()
        return
    _require_other_file(out, "--out", path)
    with whole_file(out, "--out") as sink, contextlib.ExitStack() as stack:
        write = _parquet_writer(sink, stack) if out.endswith(".parquet") else _csv_writer(sink)
        yield _guarded(write, out, "--out")


@contextmanager
def reject_sink(out: str | None, path: str) -> Iterator[Callable[[str, list[Reject]], None]]:
    """Open a writer of rejected rows, block by block, to ``out``: a JSON object a line, as in ``quarantine.jsonl``.

    Without ``out``, they are not written. Otherwise as ``score_sink``.
    """
    if out is None:
        yield lambda file, rejects: None
        return
    _require_other_file(out, "--rejected", path)
    with whole_file(out, "--rejected") as sink:
        yield _guarded(Quarantine(sink).add, out, "--rejected")


def _require_other_file(out: str, option: str, path: str) -> None:
    # Raises ConfigError if ``out`` is one of the rows' files at ``path``, under any name.
    read = None
    with _name_argument(path):
        if connector_at(path)[0] is None:
            read = find_files(path)
    fs, full = fsspec.core.url_to_fs(out)
    # A file on another file system is not one of the input files.
    if read is None or type(fs) is not type(read.fs):
        return
    names = set(read.paths)
    if isinstance(fs, LocalFileSystem):
        # A link to an input file is that file.
        full, names = os.path.realpath(full), set(map(os.path.realpath, names))
    if full in names:
        raise ConfigError(f"{option} {out} is one of the input files", hint=f"{option} <another name>")


def _guarded(write: Callable[P, None], out: str, option: str) -> Callable[P, None]:
    # Errors of ``write`` name its own file, because two of them may be open.
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        with disk_errors(out, f"{option} ", place="the file system"):
            write(*arguments, **named)

    return guarded


def _csv_writer(sink: Any) -> Callable[[Scored], None]:
    blocks = itertools.count()
    return lambda scores: sink.write(scores.write_csv(include_header=next(blocks) == 0).encode())


def _parquet_writer(sink: Any, stack: contextlib.ExitStack) -> Callable[[Scored], None]:
    import pyarrow.parquet as pq

    writers: list[Any] = []

    def write(scores: Scored) -> None:
        table = scores.to_arrow()
        if not writers:
            writers.append(stack.enter_context(pq.ParquetWriter(sink, table.schema, compression="zstd")))
        writers[0].write_table(table)

    return write
