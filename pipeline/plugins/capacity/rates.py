"""What a rank reads and writes beside its steps, measured on this machine in a few seconds."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.calibration.trial import DENSE, Trial, make_dataset
from pipeline.config import Config
from pipeline.planning.cost import FLOAT
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.problem import row_bytes
from pipeline.plugins.capacity.scale_record import ScaleFigure
from pipeline.plugins.capacity.worlds import Rates
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.store.removal import remove

SECONDS = 1.0  # duration of each measurement
# The first batches of a reader include its start. The rate covers at least LEAST_BATCHES more, so no single batch
# decides it.
WARM_UP_BATCHES, LEAST_BATCHES = 4, 8
# Bytes of the rows that are written to measure checkpoints, and rows of the drawn dataset that is read.
TABLE_BYTES, DRAWN_ROWS = 32 << 20, 1 << 19
PIECE = 8 << 20
GB = 1e9


def measured_rates(
    config: Config, inputs: PlanInputs, store: Store, dataset: Artifact
) -> tuple[Rates, dict[str, ScaleFigure]]:
    """Return the rates of one rank of ``config`` on this machine, and the figures as they are shown.

    The reader decodes the dataset, or drawn rows if that has none. A checkpoint is written into the store, in a
    folder of its own that is removed.
    """
    if inputs.schema.rows.get("train"):
        rows_per_s, how, how_large = _decoded(store, dataset, inputs), "this dataset, one reader", "in the store"
        size = row_bytes(inputs.schema, inputs.profile)
        stored = [dataset.files[name].bytes for name in _paths(inputs) if name in dataset.files]
        if stored:
            size = sum(stored) / inputs.schema.rows["train"]
        read = _read_gb_per_s(store, dataset, inputs)
    else:
        rows_per_s, size, read = _drawn(inputs)
        how, how_large = "drawn rows of as many columns, by bytes", "by the tables' lookups"
    written = _checkpoint_gb_per_s(config, store)
    rates = Rates(rows_per_s=rows_per_s, row_bytes=size, read_gb_per_s=read, checkpoint_gb_per_s=written)
    figures = {
        "reader": ScaleFigure(value=round(rows_per_s), unit="rows/s", source=how),
        "row": ScaleFigure(value=round(size, 1), unit="bytes", source=how_large),
        "store": ScaleFigure(
            value=round(read, 3), unit="GB/s", source="read by one rank, caches of this machine included"
        ),
        "checkpoint": ScaleFigure(
            value=round(written, 3), unit="GB/s", source="float32 rows with their state, written by one rank"
        ),
    }
    return rates, figures


def _decoded(store: Store, dataset: Artifact, inputs: PlanInputs) -> float:
    """Return the rows/s of a reader alone."""
    from pipeline.training.batches import BatchReader
    from pipeline.training.parquet import SplitReader
    from pipeline.training.sampler import Order, shuffle_key

    train = inputs.train
    order = Order(
        key=shuffle_key(dataset),
        seed=0,
        global_batch=train.batch,
        shuffle=train.shuffle,
        window_groups=train.shuffle_window_groups,
        lanes=train.dealt_lanes,
    )
    # Ask for more epochs than can be read in this time, so that a small dataset starts over as often as needed.
    with BatchReader(SplitReader(store, dataset, "train"), order, epochs=1 << 30) as reader:
        for _ in range(WARM_UP_BATCHES):
            next(reader)
        began, batches = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS or batches < LEAST_BATCHES:
            next(reader)
            batches += 1
        return batches * train.batch / (time.perf_counter() - began)


def _paths(inputs: PlanInputs) -> list[str]:
    # ``SplitReader`` uses the same paths.
    return [file if "/" in file else f"train/{file}" for file in inputs.schema.files["train"]]


def _read_gb_per_s(store: Store, dataset: Artifact, inputs: PlanInputs) -> float:
    """Return the GB/s at which the files of the train rows come from the store, one after the other."""
    began, size = time.perf_counter(), 0
    for name in _paths(inputs):
        with store.open(f"{dataset.path}/{name}") as source:
            while time.perf_counter() - began < SECONDS and (piece := source.read(PIECE)):
                size += len(piece)
    return size / (time.perf_counter() - began) / GB


def _drawn(inputs: PlanInputs) -> tuple[float, float, float]:
    """Return rows/s, bytes of a row and GB/s for a dataset that is only described, from drawn rows."""
    tables = tuple(min(column.rows, 100_000) for column in inputs.schema.sparse)
    batch = min(inputs.batch, DRAWN_ROWS // 16)
    trial = Trial(rows=tables, zipf=1.1, dim=1, bottom=(1,), top=(1,), batch=batch)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        schema, profile = make_dataset(store, trial, DRAWN_ROWS // batch)
        dataset = store.get("datasets/trial", "dataset")
        drawn = replace(inputs, schema=schema, profile=profile, train=replace(inputs.train, global_batch=batch))
        rows_per_s, read = _decoded(store, dataset, drawn), _read_gb_per_s(store, dataset, drawn)
    # Decoding takes time in proportion to the bytes of a row. A drawn row has a label, DENSE numeric features and an id
    # for each table.
    own = row_bytes(inputs.schema, inputs.profile)
    share = FLOAT * (1 + DENSE + len(tables)) / own
    return rows_per_s * share, own, read


def _checkpoint_gb_per_s(config: Config, store: Store) -> float:
    """Return the GB/s of float32 rows with their state that one rank encodes and writes into ``store``."""
    from pipeline.checkpoint.save import write_checkpoint

    # Write to a folder of the store that is removed afterwards.
    path = f"measured/{os.getpid()}-{time.time_ns()}"
    try:
        began, size, number = time.perf_counter(), 0, 0
        while time.perf_counter() - began < SECONDS:
            job = _job(config, f"{path}/{number}")
            for block in job.blocks:
                size += block.weight.nbytes + sum(state.nbytes for state in block.state.values())
            write_checkpoint(store, job, None)
            number += 1
        return size / (time.perf_counter() - began) / GB
    finally:
        remove(store, path, nested=True)
        if not store.names("measured"):
            remove(store, "measured")


def _job(config: Config, path: str) -> Any:
    """Return a checkpoint of one table of the model's width, in the coding of the configuration."""
    import torch

    from pipeline.checkpoint.chunks import RowBlock
    from pipeline.checkpoint.codings import Codings
    from pipeline.checkpoint.save import Job
    from pipeline.core.units import MIB
    from pipeline.embeddings.table_optimizers import table_rules
    from pipeline.records.checkpoint import TableSize

    rules, width = table_rules(config.model, config.train), config.model.embedding_dim
    rows = TABLE_BYTES // (FLOAT * width)
    # Use random values: the speed of a coding may depend on the values, and equal ones would compress to nothing.
    state = {}
    for column in rules.common.columns:
        state[column.name] = torch.rand(rows, width) if column.per_value else torch.rand(rows)
    blocks = [RowBlock("measured", np.arange(rows), 0, torch.randn(rows, width), state)]
    coding = Codings(config.checkpoint, rules).of(blocks, final=False)
    return Job(
        path=path,
        key="measured",
        config={},
        inputs={},
        blocks=blocks,
        coding=coding,
        dense={},
        state={},
        tables={"measured": TableSize(rows=rows, dim=width)},
        summary={},
        chunk_bytes=int(config.checkpoint.chunk_mib * MIB),
    )
