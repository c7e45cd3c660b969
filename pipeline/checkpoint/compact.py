"""Compaction: a delta and what it rests on become one baseline of the same step, in the same place.

Rows keep their codes: each row is taken from the newest checkpoint of the chain that holds it and written again in
the coding it has, so a restore gives the same bits as before and a 4-bit chain stays 4 bits. The new files lie beside
the old ones under other names; the manifest, replaced atomically, is the swap. A process killed at any moment leaves
the delta or the baseline, whole, and files that no manifest names, which ``gc`` removes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.chunks import Chunk, RowBlock, TableCoding, open_chunk, write_block, write_part
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import BASELINE, DENSE, INDEX, STATE, damage_hint, in_store, restore_order
from pipeline.checkpoint.integrity import read_verified
from pipeline.checkpoint.reader import read_index
from pipeline.embeddings.row_access import columns_of
from pipeline.errors import ArtifactError, DamagedError
from pipeline.records.checkpoint import Extent, Index
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.removal import remove

ROWS, NEW_ROWS, NEW_INDEX = "rows", "compacted", "index-compacted.json"


def compact(
    store: Store,
    artifact: Artifact,
    on_point: OnPoint = ignore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Turn the delta ``artifact`` into a baseline; a baseline is returned as it is.

    Memory: one chunk and a byte for each row of the largest table. ``progress`` gets files done and in all. What the
    delta rested on stays: other checkpoints may rest on it too, ``gc`` decides.
    Raises ArtifactError for a damaged chain (nothing is changed then) and where the checkpoint is removed meanwhile.
    """
    if artifact.summary["type"] == BASELINE:
        return artifact
    chain = restore_order(store, artifact)
    indices = [read_index(store, each) for each in chain]
    draft = Draft(store, artifact.path, artifact.kind, artifact.key, artifact.config, artifact.inputs)
    remove(store, f"{artifact.path}/{NEW_ROWS}")
    merge = _Merge(store, chain, indices, draft, on_point, progress)
    extents = merge.run()
    tables = indices[-1].tables
    draft.write_json(NEW_INDEX, Index(tables=tables, files=extents).to_json())
    on_point(FaultPoint.BEFORE_SWAP)
    done = _swap(store, artifact, draft, extents, chain)
    on_point(FaultPoint.AFTER_SWAP)
    remove(store, f"{artifact.path}/{ROWS}")
    remove(store, f"{artifact.path}/{INDEX}")
    return done


@dataclass
class _Merge:
    """Writes every row of a chain once, from the newest checkpoint that holds it."""

    store: Store
    chain: list[Artifact]
    indices: list[Index]
    draft: Draft
    on_point: OnPoint
    progress: Callable[[int, int], None]
    extents: list[Extent] = field(default_factory=list)
    read: int = 0

    def run(self) -> list[Extent]:
        """All tables; the index entries of the files written."""
        for table, size in self.indices[-1].tables.items():
            self._table(table, size.rows, size.dim)
        return self.extents

    def _table(self, table: str, rows: int, dim: int) -> None:
        mine = [[extent for extent in index.files if extent.table == table] for index in self.indices]
        edges = {edge for extents in mine for e in extents for edge in (e.column, e.column + e.columns)}
        cuts = sorted(edges | {0, dim})
        taken = np.zeros((len(cuts) - 1, rows), np.bool_)
        for artifact, extents in zip(reversed(self.chain), reversed(mine), strict=True):
            for extent in extents:
                where = f"{artifact.path}/{extent.file}"
                chunk = open_chunk(read_verified(self.store, artifact, extent.file), self.store.url_of(where))
                self._take(chunk, taken, cuts)
                self.read += 1
                self.progress(self.read, sum(len(index.files) for index in self.indices))
        if not taken.all():
            missing = int((~taken.all(0)).sum())
            raise DamagedError(
                f"checkpoint {self.chain[-1].path} and the checkpoints it depends on lack {missing} rows "
                f"of table {table!r}",
                hint=damage_hint(self.store, self.chain[-1].path),
            )

    def _take(self, chunk: Chunk, taken: NDArray[np.bool_], cuts: list[int]) -> None:
        """Write the rows of ``chunk`` that no newer checkpoint holds."""
        first = cuts.index(chunk.column)
        spans = range(first, cuts.index(chunk.column + chunk.columns))
        held = taken[spans.start : spans.stop][:, chunk.ids]
        newer: NDArray[np.bool_] = np.any(held, axis=0)
        self._write(chunk.ids, chunk, ~newer)
        # A row that is newer in some columns only (the chain changed its column shards) is cut, so it is decoded.
        for span in spans if (newer & ~held.all(0)).any() else ():
            rows = newer & ~held[span - first]
            if rows.any():
                self._write_columns(chunk.rows(), rows, cuts[span], cuts[span + 1])
        taken[spans.start : spans.stop, chunk.ids] = True

    def _write(self, ids: NDArray[np.int64], chunk: Chunk, keep: NDArray[np.bool_]) -> None:
        if keep.any():
            with self.draft.open(self._name(chunk.table)) as sink:
                write_part(sink, chunk, keep)
                self.on_point(FaultPoint.COMPACT)
            self._note(chunk.table, ids[keep], chunk.column, chunk.columns, chunk.metadata["weight"])

    def _write_columns(self, block: RowBlock, keep: NDArray[np.bool_], left: int, right: int) -> None:
        part = slice(left - block.column, right - block.column)
        weight = block.weight[keep][:, part].contiguous()
        state = columns_of({name: value[keep] for name, value in block.state.items()}, part)
        with self.draft.open(self._name(block.table)) as sink:
            write_block(sink, RowBlock(block.table, block.ids[keep], left, weight, state), TableCoding("fp32"))
        self._note(block.table, block.ids[keep], left, right - left, "fp32")

    def _name(self, table: str) -> str:
        return f"{NEW_ROWS}/{quote(table, safe='')}/{len(self.extents):06d}.safetensors"

    def _note(self, table: str, ids: NDArray[np.int64], column: int, columns: int, coding: str) -> None:
        self.extents.append(
            Extent(
                file=self._name(table),
                table=table,
                first=int(ids[0]),
                last=int(ids[-1]),
                rows=len(ids),
                column=column,
                columns=columns,
                coding=coding,
            )
        )


def changed_since(store: Store, artifact: Artifact) -> bool:
    """Whether ``artifact`` is no longer what is committed at its path."""
    now = store.find(artifact.path)
    return now is None or now.to_json() != artifact.to_json()


def _swap(store: Store, artifact: Artifact, draft: Draft, extents: list[Extent], chain: list[Artifact]) -> Artifact:
    """Replace the manifest by one that names the new files: from now on it is a baseline."""
    files = {name: artifact.files[name] for name in (DENSE, STATE)} | draft.files
    size = sum(entry.bytes for entry in files.values())
    new = replace(
        artifact,
        files=dict(sorted(files.items())),
        summary={
            **artifact.summary,
            "type": BASELINE,
            "parents": [],
            "index": NEW_INDEX,
            "bytes": size,
            "rows": sum(extent.rows for extent in extents),
            "codings": sorted({extent.coding for extent in extents}),
            "compacted": [each.path.rsplit("/", 1)[-1] for each in chain[:-1]],
        },
    )
    gone = ArtifactError(
        f"checkpoint {artifact.path} was removed or replaced while it was compacted",
        hint=f"nightjar ckpt ls {in_store(store)} lists the checkpoints",
    )
    if changed_since(store, artifact):
        raise gone
    store.write_manifest(new)
    if not all(store.exists(f"{artifact.path}/{name}") for name in files):
        remove(store, f"{artifact.path}/{MANIFEST}")
        raise gone
    return new
