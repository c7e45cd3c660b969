"""A version that scores rows: tables read in place, dense part, calibrator. Needs neither torchrec nor FBGEMM."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipeline.core.errors import ArtifactError, OtherCodeError
from pipeline.evaluation.calibration_curves import calibrated
from pipeline.publishing.dense import CONFIG, read_dense
from pipeline.publishing.program import PROGRAM, read_program
from pipeline.publishing.served_tables import TableReader, shares
from pipeline.records.model_version import CALIBRATOR, CalibratorRecord
from pipeline.records.record import Record
from pipeline.records.serving import DENSE, SERVING, WEIGHTS, Description
from pipeline.specs.model import MODELS
from pipeline.store.artifacts import Store

# The most rows of a pass.
SCORE_ROWS = 8192
# The most events of a pass: attention among events takes memory for each pair of them.
SCORE_EVENTS = 16_384
NEEDED = (SERVING, DENSE, WEIGHTS, CONFIG, PROGRAM, CALIBRATOR, "tables")


class Lists(Protocol):
    """Ids of a multi-valued feature: row i has ``values[offsets[i]:offsets[i + 1]]``, with ``weights`` or None."""

    offsets: NDArray[np.integer]
    values: NDArray[np.integer]
    weights: NDArray[np.floating] | None


Ids = Mapping[str, NDArray[np.integer] | Lists]  # by feature, [b] for one id, or lists of several ids


R = TypeVar("R", bound=Record)


def _read_record(kind: type[R], path: Path, problem: str) -> R:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} {problem}: {error}", hint=kind.REMEDY) from None
    return kind.from_json(record, str(path))


class ServedModel:
    """A version, opened to score rows.

    Args:
        directory: The version's files.
        memory: The most bytes for table rows.
        calibrate: False: return the program's logits, as training gives them.
        ranks: Processes of this machine that open the version at the same time and share ``memory``.

    Raises:
        ArtifactError: A file is damaged.
        OtherCodeError: The version was made by other code than is installed here.
    """

    def __init__(self, directory: Path, memory: int, *, calibrate: bool = True, ranks: int = 1) -> None:
        self.description = _read_record(Description, directory / SERVING, "does not describe a model")
        tables = self.description.tables
        budget = shares(tables, memory)
        self.tables = {}
        for name, layout in tables.items():
            self.tables[name] = TableReader(directory / layout.file, layout, budget[name], ranks)
        # Versions of earlier releases have only the program. Later versions say that they have weights, so that
        # removing a file cannot make this fall back to the program.
        built = bool(self.description.weights) or (directory / DENSE).exists()
        # The ranking model must come from the package that the version names.
        package, model = self.description.package, self.description.model
        installed = ""
        if package and model in MODELS.names():
            installed = MODELS.package(model)
        if built and installed != package:
            raise OtherCodeError(
                f"{directory} was made by {package}, but {installed or 'no such package'} is installed, which may "
                "compute another model of its weights",
                hint=f"pip install {package.replace(' ', '==')}, or publish again with what is installed",
            )
        self._program = read_dense(directory) if built else read_program(directory / PROGRAM)
        self.calibrator: CalibratorRecord | None = None
        if calibrate and self.description.calibrator is not None:
            self.calibrator = _read_record(
                CalibratorRecord, directory / self.description.calibrator, "is no calibrator"
            )

    @torch.no_grad()
    def score(self, dense: NDArray[np.float32], ids: Ids) -> NDArray[np.float32]:
        """Return logits, calibrated if the version has a calibrator.

        Args:
            dense: Dense features [b, n].
            ids: The ids of every sparse feature and every column of a sequence.

        Returns:
            [b]; of a model of several tasks [b, T]: the main task's, then those of ``description.tasks`` in order.
        """
        sequences = list((self.description.sequences or {}).values())
        parts = []
        for start, stop in self._passes(len(dense), sequences, ids):
            vectors = [self._pooled(name, ids[name], start, stop) for name in self.description.sparse]
            embeddings = torch.stack(vectors, dim=1) if self.description.even else torch.cat(vectors, dim=1)
            events: list[Tensor] = []
            for columns in sequences:
                events += self._events(columns, ids, start, stop)
            parts.append(self._program(torch.from_numpy(dense[start:stop]), embeddings, *events).numpy())
        tasks = self.description.tasks
        empty = np.zeros((0, 1 + len(tasks)) if tasks else 0, np.float32)
        logits = np.concatenate(parts) if parts else empty
        return logits if self.calibrator is None else calibrated(self.calibrator, tasks, logits, ids)

    def _passes(self, rows: int, sequences: Sequence[Sequence[str]], ids: Ids) -> Iterator[tuple[int, int]]:
        # Yield the first and last row of each pass: SCORE_ROWS rows, or as many as have SCORE_EVENTS events.
        events = np.zeros(rows + 1, np.int64)
        for columns in sequences:
            lists: Any = ids[columns[0]]
            events += lists.offsets.astype(np.int64)
        start = 0
        while start < rows:
            stop = min(start + SCORE_ROWS, rows)
            if sequences:
                most = int(np.searchsorted(events, events[start] + SCORE_EVENTS, side="right")) - 1
                # A sample with more events is a pass by itself.
                stop = min(stop, max(most, start + 1))
            yield start, stop
            start = stop

    def _events(self, columns: Sequence[str], ids: Ids, start: int, stop: int) -> tuple[Tensor, Tensor]:
        # Return the embeddings of the events of samples [start, stop), and the sample of each event.
        vectors = []
        for name in columns:
            lists: Any = ids[name]
            low, high = int(lists.offsets[start]), int(lists.offsets[stop])
            vectors.append(self.tables[self.description.table_of(name)].lookup(lists.values[low:high]))
        lengths = np.diff(lists.offsets[start : stop + 1])
        return torch.cat(vectors, dim=1), torch.from_numpy(np.repeat(np.arange(stop - start), lengths))

    def _pooled(self, name: str, ids: Any, start: int, stop: int) -> Tensor:
        # Return the embeddings of samples [start, stop). Several ids are pooled by weighted sum or mean.
        table = self.description.table_of(name)
        if not self.description.sparse[name]:
            return self.tables[table].lookup(ids[start:stop])
        low, high = int(ids.offsets[start]), int(ids.offsets[stop])
        vectors = self.tables[table].lookup(ids.values[low:high])
        offsets = torch.from_numpy((ids.offsets[start:stop] - low).astype(np.int64))
        weights = None
        if ids.weights is not None:
            weights = torch.from_numpy(ids.weights[low:high].astype(np.float32))
        positions = torch.arange(high - low)
        pooled = functional.embedding_bag(positions, vectors, offsets, mode="sum", per_sample_weights=weights)
        if table not in self.description.mean:
            return pooled
        counts = torch.from_numpy(np.diff(ids.offsets[start : stop + 1])).clamp_min(1)
        return pooled / counts[:, None]

    def files_in_memory(self) -> list[str]:
        """Return the table files that are wholly in memory."""
        return [table.layout.file for table in self.tables.values() if not table.on_disk]

    def cache_figures(self) -> dict[str, float]:
        """``hits`` and ``misses`` of the row caches (a row counts once per batch), and ``tables_on_disk``."""
        figures: dict[str, float] = {"tables_on_disk": 0, "hits": 0, "misses": 0}
        for table in self.tables.values():
            figures["tables_on_disk"] += table.on_disk
            # A table in memory needs no cache. A table on disk has none if its part of the memory is below one row.
            if table.cache is not None:
                figures["hits"] += table.cache.hits
                figures["misses"] += table.cache.misses
        return figures


@contextmanager
def local_version(store: Store, path: str, needed: Sequence[str] = NEEDED) -> Iterator[Path]:
    """Yield a local folder with the files ``needed`` of a version, fetched into a temporary one from an object store.

    ``needed``: files, and folders for all files in them.
    """
    if store.is_local:
        yield Path(store.full(path))
        return
    with tempfile.TemporaryDirectory(prefix="nightjar-version-") as folder:
        fetch_version(store, path, folder, needed)
        yield Path(folder)


def fetch_version(store: Store, path: str, folder: str, needed: Sequence[str] = NEEDED) -> None:
    """Copy the files ``needed`` of a version in an object store into ``folder``; as ``local_version``.

    Raises:
        ArtifactError: The name of a file leads out of the version.
    """
    prefix = f"{store.full(path)}/"
    files, targets = [], []
    for needed_name in needed:
        for full in store.fs.find(prefix + needed_name):
            # Some tools mark a folder by an empty key.
            if full.endswith("/"):
                continue
            name = full.removeprefix(prefix)
            # In an object store any key is allowed, but here the file would be written wherever the name points.
            if {"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name:
                raise ArtifactError(
                    f"{path} has a file called {name!r}, which leads out of its folder; nothing of it was copied",
                    hint=f"Nightjar writes no such file: find out who did, and remove it or {path}",
                )
            files.append(full)
            targets.append(f"{folder}/{name}")
    # Copy only now, when all names are known to be safe.
    store.fs.get(files, targets)
