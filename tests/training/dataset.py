"""Small datasets written straight in the layout of ``records.DatasetSchema``, for the tests of this room."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.records import DatasetSchema, SequenceGroup, SparseColumn, TaskColumn, task_column
from pipeline.store import Artifact, Store

KEY = "0123456789abcdef0123456789abcdef"


def write_dataset(
    root: Path,
    *,
    train: int = 1000,
    test: int = 300,
    validation: int = 0,
    group: int = 64,
    groups_per_file: int = 4,
    dense: int = 2,
    sparse: tuple[SparseColumn, ...] = (SparseColumn(name="a", rows=50), SparseColumn(name="b", rows=7)),
    seed: int = 0,
    spoil=None,
    profile: bool = False,
    tasks: tuple[TaskColumn, ...] = (),
    row_weights: bool = False,
    sampled: str = "",
    sequences: tuple[SequenceGroup, ...] = (),
) -> tuple[Store, Artifact]:
    """A committed dataset under ``root``: a planted logistic truth, dense column ``d0`` numbers the rows.

    ``spoil(split, columns)`` may change the columns (a dict of arrays) before they are written. ``profile``: with the
    label rates, as ingestion writes them. ``tasks``: labels that depend on the same ids, a fifth of them missing.
    ``validation``: rows of that split; 0: the dataset has none.
    """
    store, rng, rates = Store(str(root)), np.random.default_rng(seed), {}
    effects = {c.name: rng.normal(0, 1.0, c.rows) for c in sparse}
    schema = DatasetSchema(
        dense=tuple(f"d{i}" for i in range(dense)),
        sparse=sparse,
        rows=(rows := {"train": train, "test": test, **({"validation": validation} if validation else {})}),
        files={split: [] for split in rows},
        groups={split: [] for split in rows},
        true_probability=True,
        tasks=tasks,
        row_weights=row_weights,
        sampled=sampled,
        sequences=sequences,
    )
    with store.draft(f"datasets/t/{KEY}", kind="dataset", key=KEY, config={}, inputs={}) as draft:
        for split, rows in schema.rows.items():
            columns = _columns(split, rows, dense, sparse, effects, rng)
            columns |= _labels(columns, tasks, np.random.default_rng([seed, rows]))
            columns |= _events(sequences, rows, np.random.default_rng([seed, 2, rows]))
            if row_weights:
                columns["row_weight"] = np.random.default_rng([seed, 1, rows]).integers(0, 4, rows).astype(np.float32)
            if sampled:
                columns["negative_rate"] = rng.choice([0.25, 0.5, 1.0], rows).astype(np.float32)
            if spoil:
                spoil(split, columns)
            rates[split] = float(columns["label"].mean()) if rows else None
            table = pa.table(columns)
            step = group * groups_per_file
            for number, start in enumerate(range(0, rows, step)):
                name = f"{split}/part-{number:05d}.parquet"
                part = table.slice(start, step)
                with draft.open(name) as sink:
                    pq.write_table(part, sink, row_group_size=group)
                schema.files[split].append(name)
                sizes = [min(group, part.num_rows - at) for at in range(0, part.num_rows, group)]
                schema.groups[split].append(sizes)
        draft.write_json("schema.json", schema.to_json())
        if profile:
            draft.write_json("profile.json", {"rows": schema.rows, "label_rate": rates, "dense": {}, "sparse": {}})
        artifact = draft.commit({"rows": train + test})
    return store, artifact


def _labels(columns, tasks, rng):
    """Further labels: positive with the label's odds, of that many events, or a number near that."""
    made, rate = {}, columns["true_probability"]
    for task in tasks:
        values = {"binary": rng.random(len(rate)) < rate, "count": rng.poisson(2 * rate), "value": rng.normal(rate)}
        each = values[task.kind].astype(np.float32)
        each[rng.random(len(rate)) < 0.2] = np.nan
        if task.given:
            each = np.where(columns["label"] == 0, np.float32(0), each)
        made[task_column(task.name)] = each
    return made


def _events(sequences, rows, rng):
    """Columns of sequences: lists of random rows, of one length in every row of the dataset."""
    made = {}
    for sequence in sequences:
        lengths = rng.integers(1, sequence.max_length + 1, rows)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        for column in sequence.columns:
            values = rng.integers(0, column.rows, lengths.sum()).astype(np.int32)
            made[column.name] = pa.ListArray.from_arrays(offsets, pa.array(values))
    return made


def _columns(split, rows, dense, sparse, effects, rng):
    columns, logit = {}, np.full(rows, -0.5)
    for i in range(dense):
        columns[f"d{i}"] = rng.normal(0, 1, rows).astype(np.float32)
        logit += 0.3 * columns[f"d{i}"]
    if dense and rows:
        columns["d0"] = np.arange(rows, dtype=np.float32) / max(rows, 1)
    for c in sparse:
        if not c.multi:
            columns[c.name] = rng.integers(0, c.rows, rows).astype(np.int32)
            logit += effects[c.name][columns[c.name]]
            continue
        lengths = rng.integers(0, 4, rows)
        values = rng.integers(0, c.rows, lengths.sum()).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns[c.name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        if c.weighted:
            weights = rng.uniform(0.5, 1.5, lengths.sum()).astype(np.float32)
            columns[f"{c.name}__weight"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(weights))
    probability = 1 / (1 + np.exp(-logit))
    labels = (rng.random(rows) < probability).astype(np.float32)
    return {"label": labels, **columns, "true_probability": probability.astype(np.float32)}
