"""The ingest stage: two passes over the logs in blocks, memory bounded by the block size and the vocabularies.

Pass 1 parses, splits and counts; pass 2 transforms and writes. Everything in between is exact and
independent of order, so the dataset's bytes depend on the logs and the configuration alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl

from pipeline.artifacts import Draft, fingerprint
from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.ingest import declared, synthetic
from pipeline.ingest.fit import Fit
from pipeline.ingest.output import PartWriter, Quarantine, write_vocab
from pipeline.ingest.parse import parse
from pipeline.ingest.profiling import make_profile
from pipeline.ingest.sources import RawBlock, file_blocks, find_files, missing_data
from pipeline.ingest.spec import DataSpec, data_spec, require_columns
from pipeline.ingest.spill import Spill, prefetched, temporary_spill
from pipeline.ingest.transform import State, dataset_schema, fitted_state, transform, transforms_json

Progress = Callable[[str], None]


def raw_fingerprint(config: Config) -> str:
    """Fingerprint of the input data; DataError if nothing exists at ``data.path``."""
    if config.data.format == "synthetic":
        return synthetic.VERSION
    if config.data.format == "tables":
        return declared.VERSION
    path = config.data.path or ""
    try:
        mark = fingerprint(path)
    except (ValueError, ImportError) as error:
        raise DataError(f"data.path={path} cannot be opened: {error}", hint="data.path=<a supported URL>") from None
    if not mark:
        raise missing_data(path)
    return mark


def ingest(config: Config, draft: Draft, progress: Progress) -> dict[str, Any]:
    """Write the dataset of ``config.data`` into ``draft``; returns the artifact's summary (rows, bytes, rows/s).

    Raises DataError for input that is missing, empty or not what the schema says, ConfigError for a schema
    that contradicts itself.
    """
    if config.data.format == "tables":
        return declared.write(config.data, draft)
    started = time.monotonic()
    spec = data_spec(config.data)
    blocks, bytes_in = _blocks(config, spec)
    with temporary_spill() as spill:
        with draft.open("quarantine.jsonl") as sink:
            quarantine = Quarantine(sink)
            fit, synthetic_bytes = _first_pass(blocks, spec, spill, quarantine, _Meter(progress, "pass 1 of 2"))
        _check(fit, quarantine, config)
        state = fitted_state(spec, fit)
        files, groups = _second_pass(config, draft, spec, fit, state, spill, _Meter(progress, "pass 2 of 2"))
    for name, fitted in state.sparse.items():
        if fitted.vocab is not None:
            write_vocab(draft, name, fitted.vocab, config.ingest.compression)
    draft.write_json("schema.json", dataset_schema(spec, state, fit.rows, files, groups).to_json())
    draft.write_json("profile.json", make_profile(spec, fit, state).to_json())
    draft.write_json("transforms.json", transforms_json(spec, state))
    rows = sum(fit.rows.values()) + quarantine.rows
    return {
        "rows": rows, "rows_train": fit.rows["train"], "rows_test": fit.rows["test"],
        "rows_quarantined": quarantine.rows, "bytes_in": bytes_in + synthetic_bytes,
        "rows_per_s": round(rows / max(time.monotonic() - started, 1e-9), 1),
    }  # fmt: skip


def _blocks(config: Config, spec: DataSpec) -> tuple[Iterator[RawBlock], int]:
    """The log's blocks and its size in bytes on disk (0 for synthetic logs)."""
    if config.data.format == "synthetic":
        columns = [*synthetic.COLUMNS, "day"]
        require_columns(spec, columns, "the synthetic log", header=False)
        return synthetic.blocks(config), 0
    files = find_files(config.data.path or "")
    return file_blocks(config, spec, files), files.bytes


class _Meter:
    """Reports rows and rows per second about once a second."""

    def __init__(self, progress: Progress, what: str) -> None:
        self.progress = progress
        self.what = what
        self.rows = 0
        self.started = self.reported = time.monotonic()

    def add(self, rows: int) -> None:
        """Count ``rows`` more, and report them about once a second."""
        self.rows += rows
        now = time.monotonic()
        if now - self.reported >= 1.0:
            self.reported = now
            self.progress(f"{self.what}: {self.rows:,} rows, {self.rows / (now - self.started):,.0f} rows/s")


def _first_pass(
    blocks: Iterator[RawBlock], spec: DataSpec, spill: Spill, quarantine: Quarantine, meter: _Meter
) -> tuple[Fit, int]:
    fit, size = Fit(spec), 0
    for block in prefetched(blocks):
        parsed = parse(block.frame, block.lines, spec)
        rejects = sorted([*block.rejects, *parsed.rejects], key=lambda reject: reject.line)
        quarantine.add(block.file, rejects)
        if parsed.frame.height:
            typed = fit.add(parsed.frame)
            spill.write(typed.select(name for name in typed.columns if not name.startswith("id:")))
        size += block.bytes
        meter.add(block.frame.height + len(block.rejects))
    return fit, size


def _check(fit: Fit, quarantine: Quarantine, config: Config) -> None:
    """Raise DataError unless there is something to train on."""
    where = config.data.path or "the synthetic log"
    rows, clicks = fit.rows, fit.positives["train"]
    if not sum(rows.values()):
        if not quarantine.rows:
            raise DataError(f"{where} holds no rows, expected at least one", hint="data.path=<logs that are not empty>")
        kind, count = quarantine.kinds.most_common(1)[0]
        raise DataError(
            f"none of the {quarantine.rows:,} rows of {where} could be used; most common reason ({count:,} rows): "
            f"{kind}; for example {quarantine.examples[kind]}",
            hint=_mend(kind, config),
        )
    if not rows["train"]:
        by_day = config.data.split.by == "day"
        raise DataError(
            f"all {rows['test']:,} rows fall into the test split, expected some train rows"
            + (f" (there are {len(fit.days)} days, the last {config.data.split.test_days} test)" if by_day else ""),
            hint="data.split.by=hash" if by_day else "data.split.test_share=0.2, or more rows",
        )
    if clicks in (0, rows["train"]):
        raise DataError(
            f"the {rows['train']:,} train rows have one class only: every {config.data.label.column} is "
            f"{config.data.label.positive if clicks else config.data.label.negative!r}",
            hint="data.label.positive=<value that counts as a click>, or logs that hold both",
        )


def _mend(kind: str, config: Config) -> str:
    """The override that most likely mends a log of which no row parses for reason ``kind``."""
    if kind == "wrong number of fields":
        return "data.separator=<one character>, or data.columns=[<name of each column, in order>]"
    if kind.startswith(f"{config.data.label.column} is neither"):
        return "data.label.positive=<its value for a click> data.label.negative=<its value for none>"
    if kind.endswith("finite number"):
        return "data.missing=[<strings that stand for a missing value>], or make the feature sparse"
    return "data.format, data.columns and data.separator must describe the file"


def _second_pass(
    config: Config, draft: Draft, spec: DataSpec, fit: Fit, state: State, spill: Spill, meter: _Meter
) -> tuple[dict[str, list[str]], dict[str, list[list[int]]]]:
    """Write the Parquet files; returns their names and their row groups' sizes by split."""

    def transformed() -> Iterator[tuple[pl.DataFrame, pl.Series]]:
        for frame in spill.read():
            yield transform(frame, spec, state), fit.test_mask(frame)

    train, test = PartWriter(draft, "train", config.ingest), PartWriter(draft, "test", config.ingest)
    with train, test:
        for rows, is_test in prefetched(transformed()):
            train.add(rows.filter(~is_test))
            test.add(rows.filter(is_test))
            meter.add(rows.height)
    return {"train": train.files, "test": test.files}, {"train": train.groups, "test": test.groups}
