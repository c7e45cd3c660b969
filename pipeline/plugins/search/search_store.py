"""The state of a search under way, kept in the store: after a kill the same search goes on from it, bit for bit."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from pipeline.checkpoint.container import read_tensors, write_tensors
from pipeline.store.artifacts import Store

DIGEST = 16  # bytes of XXH3-128 before the tensors
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """Tensors, and JSON data: floats come back from it with the same bits."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def starting(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix``, by what follows."""
        return {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class SearchStore:
    """A search's state in ``folder`` of ``store``. ``key``: what equal searches have in common."""

    store: Store
    folder: str
    key: str

    @property
    def path(self) -> str:
        """The file."""
        return f"{self.folder}/search.state"

    def write(self, state: SearchState) -> None:
        """Replace what was kept, atomically. The file is put together in memory first."""
        tensors = {name: each.detach() for name, each in state.tensors.items()}
        buffer = io.BytesIO()
        buffer.write(bytes(DIGEST))
        write_tensors(buffer, tensors, {"key": self.key, "values": json.dumps(state.values)})
        with buffer.getbuffer() as whole:
            whole[:DIGEST] = xxhash.xxh3_128(whole[DIGEST:]).digest()
        self.store.write_bytes(self.path, buffer.getvalue())

    def read(self) -> SearchState | None:
        """What was kept; None where there is nothing, or only that of another search, or what is damaged."""
        try:
            data = self.store.fs.cat_file(self.store.full(self.path))
        except FileNotFoundError:
            return None
        where = self.store.url_of(self.path)
        body = memoryview(data)[DIGEST:]
        if xxhash.xxh3_128(body).digest() != bytes(data[:DIGEST]):
            log.warning("%s is damaged: the search begins anew", where)
            return None
        tensors, about = read_tensors(bytearray(body), where)
        if about["key"] != self.key:
            log.info("%s is of a search with other settings: this one begins anew", where)
            return None
        return SearchState(tensors=tensors, values=json.loads(about["values"]))

    def remove(self) -> None:
        """Remove what was kept, if anything was."""
        if self.store.exists(self.path):
            self.store.fs.rm(self.store.full(self.path))
