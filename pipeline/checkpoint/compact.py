"""Compaction: turns a delta and what it rests on into one baseline of the same step, in the same place.

Rows keep their codes: each row is taken from the newest checkpoint of the chain that holds it and written again in
the coding it has, so a restore gives the same bits as before and a 4-bit chain stays 4 bits. The new files lie beside
the old ones under names that no other compaction uses; the manifest, replaced atomically, is the swap. A process killed
at any moment leaves the delta or the baseline, whole, and files that no manifest names, which ``gc`` removes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint.chunks import Chunk, RowBlock, TableCoding, open_chunk, write_block, write_part
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import BASELINE, DENSE, INDEX, STATE, damage_hint, in_store, restore_order
from pipeline.checkpoint.integrity import read_verified
from pipeline.checkpoint.reader import read_index
from pipeline.checkpoint.save import summarize
from pipeline.core.errors import ArtifactError, DamagedError
from pipeline.embeddings.row_access import columns_of
from pipeline.records.checkpoint import Extent, Index
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.removal import remove


def compact(
    store: Store,
    artifact: Artifact,
    on_point: OnPoint = ignore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Turn the delta ``artifact`` into a baseline; a baseline is returned as it is.

    It needs memory for one chunk and a byte for each row of the largest table. ``progress`` gets the files done and
    their total. What the delta rested on stays, since other checkpoints may rest on it too; ``gc`` decides.

    Raises:
        ArtifactError: The chain is damaged (nothing is changed then), or the checkpoint was removed meanwhile.
    """
    if artifact.summary["type"] == BASELINE:
        return artifact

    # 1. Read the chain's indices.
    chain = restore_order(store, artifact)
    indices = [read_index(store, checkpoint) for checkpoint in chain]
    draft = Draft(store, artifact.path, artifact.kind, artifact.key, artifact.config, artifact.inputs)

    # 2. Write every row once, beside the old files, under names of its own: another compaction may be under way.
    merge = _ChainMerge(store, chain, indices, draft, f"compacted-{uuid.uuid4().hex[:8]}", on_point, progress)
    tables = indices[-1].tables
    try:
        for table, size in tables.items():
            merge.merge_table(table, size.rows, size.dim)
        draft.write_json(merge.index_file, Index(tables=tables, files=merge.extents).to_json())

        # 3. Swap: from now on the manifest names the new files.
        on_point(FaultPoint.BEFORE_SWAP)
        compacted = _swap_manifest(store, artifact, draft, merge, chain)
    except Exception:
        # A full disk would stay full. A store that fails here too must not hide the first error.
        with suppress(Exception):
            _discard(store, merge, artifact.path)
        raise
    on_point(FaultPoint.AFTER_SWAP)

    # 4. Remove the old files, which nothing names any more.
    remove(store, f"{artifact.path}/rows")
    remove(store, f"{artifact.path}/{INDEX}")
    return compacted


def _discard(store: Store, merge: _ChainMerge, path: str) -> None:
    # Ask the store first, because a swap whose answer was lost may have succeeded.
    current = store.find(path)
    if current is None or merge.index_file not in current.files:
        remove(store, f"{path}/{merge.folder}")
        remove(store, f"{path}/{merge.index_file}")


@dataclass
class _ChainMerge:
    # Writes every row of a chain once, from the newest checkpoint that holds it, into ``folder`` of the checkpoint.

    store: Store
    chain: list[Artifact]
    indices: list[Index]
    draft: Draft
    folder: str
    on_point: OnPoint
    progress: Callable[[int, int], None]
    extents: list[Extent] = field(default_factory=list)
    files_read: int = 0

    @property
    def index_file(self) -> str:
        """The name of the index of the new files."""
        return f"index-{self.folder}.json"

    def merge_table(self, table: str, rows: int, dim: int) -> None:
        """Write all rows of ``table``; DamagedError if the chain does not hold them."""
        # 1. Checkpoints of the chain may have different column shards. No shard begins or ends between two neighbouring
        #    cuts, so a chunk has either all of the columns between them or none.
        edges = {0, dim}
        files = 0
        for index in self.indices:
            files += len(index.files)
            for extent in index.files:
                if extent.table == table:
                    edges |= {extent.column, extent.column + extent.columns}
        cuts = sorted(edges)

        # 2. Go from the newest checkpoint back to the baseline: values already taken are newer than those of a chunk.
        taken = np.zeros((len(cuts) - 1, rows), np.bool_)
        for artifact, index in zip(reversed(self.chain), reversed(self.indices), strict=True):
            for extent in index.files:
                if extent.table != table:
                    continue
                where = f"{artifact.path}/{extent.file}"
                chunk = open_chunk(read_verified(self.store, artifact, extent.file), self.store.url_of(where))
                self._take_rows(chunk, taken, cuts)
                self.files_read += 1
                self.progress(self.files_read, files)
        if not taken.all():
            missing = int((~taken.all(0)).sum())
            raise DamagedError(
                f"checkpoint {self.chain[-1].path} and the checkpoints it depends on lack {missing} rows "
                f"of table {table!r}",
                hint=damage_hint(self.store, self.chain[-1].path),
            )

    def _take_rows(self, chunk: Chunk, taken: NDArray[np.bool_], cuts: list[int]) -> None:
        first = cuts.index(chunk.column)
        spans = range(first, cuts.index(chunk.column + chunk.columns))
        held = taken[spans.start : spans.stop][:, chunk.ids]
        newer: NDArray[np.bool_] = np.any(held, axis=0)
        # Rows that no newer checkpoint holds keep their codes.
        keep = ~newer
        if keep.any():
            with self.draft.open(self._next_file(chunk.table)) as sink:
                write_part(sink, chunk, keep)
                self.on_point(FaultPoint.COMPACT)
            self._add_extent(chunk.table, chunk.ids[keep], chunk.column, chunk.columns, chunk.metadata["weight"])
        # Where the chain changed its column shards, only some columns of a row may be needed. The row has to be
        # decoded, because codes are packed over all columns. Writing it as fp32 keeps its values.
        if (newer & ~held.all(0)).any():
            block = chunk.rows()
            for span in spans:
                rows = newer & ~held[span - first]
                if not rows.any():
                    continue
                left, right = cuts[span], cuts[span + 1]
                columns = slice(left - chunk.column, right - chunk.column)
                weight = block.weight[rows][:, columns].contiguous()
                state = columns_of({name: value[rows] for name, value in block.state.items()}, columns)
                with self.draft.open(self._next_file(chunk.table)) as sink:
                    part = RowBlock(chunk.table, chunk.ids[rows], left, weight, state)
                    write_block(sink, part, TableCoding("fp32"))
                self._add_extent(chunk.table, chunk.ids[rows], left, right - left, "fp32")
        taken[spans.start : spans.stop, chunk.ids] = True

    def _next_file(self, table: str) -> str:
        return f"{self.folder}/{quote(table, safe='')}/{len(self.extents):06d}.safetensors"

    def _add_extent(self, table: str, ids: NDArray[np.int64], column: int, columns: int, coding: str) -> None:
        self.extents.append(
            Extent(
                file=self._next_file(table),
                table=table,
                first=int(ids[0]),
                last=int(ids[-1]),
                rows=len(ids),
                column=column,
                columns=columns,
                coding=coding,
            )
        )


def _swap_manifest(
    store: Store, artifact: Artifact, draft: Draft, merge: _ChainMerge, chain: list[Artifact]
) -> Artifact:
    # Keep the files that hold no rows.
    files = {DENSE: artifact.files[DENSE], STATE: artifact.files[STATE], **draft.files}
    new = replace(
        artifact,
        files=dict(sorted(files.items())),
        summary={
            **artifact.summary,
            "type": BASELINE,
            "parents": [],
            "index": merge.index_file,
            **summarize(files, merge.extents),
            "compacted": [checkpoint.name for checkpoint in chain[:-1]],
        },
    )
    gone = ArtifactError(
        f"checkpoint {artifact.path} was removed or replaced while it was compacted",
        hint=f"nightjar ckpt ls {in_store(store)} lists the checkpoints",
    )
    current = store.find(artifact.path)
    if current is None or current.to_json() != artifact.to_json():
        raise gone
    store.write_manifest(new)
    # If the checkpoint was removed between the check and the write, its manifest must not stay behind alone.
    if not all(store.exists(f"{artifact.path}/{name}") for name in files):
        remove(store, f"{artifact.path}/{MANIFEST}")
        raise gone
    return new
