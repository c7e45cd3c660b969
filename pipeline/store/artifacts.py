"""Content-keyed artifacts over fsspec: what stages hand each other.

An artifact is a directory whose ``manifest.json`` is written last and atomically; without it the
artifact does not exist. The manifest names kind, schema version, key, stage configuration, inputs by
key, files with bytes and checksum (XXH3-128), and a summary. Works on any fsspec URL, object stores
without rename included.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, cast

import xxhash

from pipeline.errors import ArtifactError, DamagedError, LaunchError, UnreachableError
from pipeline.store.files import Files
from pipeline.store.manifest import MANIFEST, SCHEMA_VERSION, Artifact, FileEntry, parsed, sealed
from pipeline.store.refusals import disk_errors, taken
from pipeline.store.removal import forget, remove
from pipeline.store.retrying import retried

_BLOCK = 4 << 20  # bytes read at a time
_READS = 4  # of a file whose bytes are wrong: two that agree are proof


class _HashingFile(io.RawIOBase):
    """A binary sink that counts and hashes what passes through it; ``guarded`` names it where a write fails."""

    def __init__(self, inner: BinaryIO, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self.inner = inner
        self.guarded = guarded
        self.count = 0
        self.hash = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.c_contiguous:
            view = memoryview(bytes(view))
        with self.guarded():
            self.inner.write(view)
        self.hash.update(view)
        self.count += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.count

    def flush(self) -> None:
        if not self.inner.closed:
            with self.guarded():
                self.inner.flush()

    def entry(self) -> FileEntry:
        """Size and checksum of what has passed so far."""
        return FileEntry(self.count, f"xxh3_128:{self.hash.hexdigest()}")


@dataclass
class Draft:
    """An artifact being written: files first, ``commit`` last. ``discard`` leaves nothing behind."""

    store: Store
    path: str
    kind: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open file ``name`` (relative, may hold slashes) for writing; its size and checksum are recorded.

        ArtifactError for a full disk. It names this file only for what this file met: others may be open meanwhile.
        """
        full = self.store.full(f"{self.path}/{name}")
        guarded = partial(disk_errors, f"{self.path}/{name}", self.store.option)
        with guarded():
            self.store.fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            inner = self.store.fs.open(full, "wb")
        sink = _HashingFile(inner, guarded)
        try:
            yield cast(BinaryIO, sink)
            sink.flush()
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is told
                inner.close()
            raise
        with guarded():
            inner.close()
        self.files[name] = sink.entry()

    def write_json(self, name: str, value: Any) -> None:
        """Write ``value`` as indented JSON into file ``name``."""
        data = (json.dumps(value, indent=1) + "\n").encode()

        def write() -> None:
            with self.open(name) as sink:
                sink.write(data)

        retried(write, f"writing {self.store.url_of(self.path)}/{name}")

    def commit(self, summary: dict[str, Any]) -> Artifact:
        """Write the manifest: from now on the artifact exists. LaunchError where another writer took files away."""
        if not self.store.is_local:
            self._require_files()
        artifact = Artifact(
            path=self.path, kind=self.kind, key=self.key, schema_version=SCHEMA_VERSION, config=self.config,
            inputs=self.inputs, files=dict(sorted(self.files.items())), summary=summary, created=time.time(),
        )  # fmt: skip
        self.store.write_manifest(artifact)
        return artifact

    def _require_files(self) -> None:
        """An object store has no locks: a second writer of the same key begins by removing what lies there."""
        full = self.store.full(self.path)
        self.store.fs.invalidate_cache()
        there = {name: info["size"] for name, info in self.store.fs.find(full, detail=True).items()}
        for name, entry in self.files.items():
            if there.get(f"{full}/{name}") != entry.bytes:
                raise LaunchError(
                    f"{self.path}/{name} was removed or replaced before it was committed: another process writes "
                    f"{self.path} as well",
                    hint="run the same command again once that one has ended; it uses what was made",
                )

    def clear(self) -> None:
        """Remove everything written so far; a manifest goes first, so that no half of an artifact looks committed."""
        forget(self.store, self.path)
        for name in self.store.names(self.path):
            self.store.fs.rm(self.store.full(f"{self.path}/{name}"), recursive=True)

    def discard_uncommitted(self) -> None:
        """Remove what was written, unless it was committed: a process may die before it learns of its commit."""
        if not self.store.exists(f"{self.path}/{MANIFEST}"):
            self.discard()

    def discard(self) -> None:
        """Remove the artifact, as ``clear``, and its folder."""
        remove(self.store, self.path)


class Store(Files):
    """The one place (an fsspec URL) that holds datasets, plans, runs and models.

    ``option``: how the user gave the URL, for hints; commands that do not compose take ``--store ``.
    """

    def write_manifest(self, artifact: Artifact) -> None:
        """Write ``artifact``'s manifest, atomically and sealed: from now on it is what lies at its path."""
        self.write_bytes(f"{artifact.path}/{MANIFEST}", sealed(artifact.to_json()))

    def find(self, path: str) -> Artifact | None:
        """The artifact committed at ``path``, or None. DamagedError for a manifest that does not parse, read twice."""
        former, where = None, f"{self.url_of(path)}/{MANIFEST}"
        for _ in range(_READS):
            try:
                data = self.fs.cat_file(self.full(f"{path}/{MANIFEST}"))
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                return parsed(path, data)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                if data == former:
                    raise DamagedError(
                        f"{where} is not a manifest of schema version {SCHEMA_VERSION}: {error}",
                        hint="force=true writes the artifact again",
                        file=f"{path}/{MANIFEST}",
                    ) from None
                former = data
        raise UnreachableError(
            f"{where} gives different bytes at every read", hint="run the same command again; check the disk"
        )

    def get(self, path: str, stage: str) -> Artifact:
        """The artifact committed at ``path``; ArtifactError naming the ``stage`` that makes it where there is none."""
        artifact = self.find(path)
        if artifact is None:
            raise ArtifactError(
                f"no committed artifact at {self.url_of(path)}",
                hint=f"nightjar {stage} with the same overrides makes it",
            )
        return artifact

    @contextmanager
    def draft(
        self, path: str, *, kind: str, key: str, config: dict[str, Any], inputs: dict[str, str]
    ) -> Iterator[Draft]:
        """Write an artifact at ``path``: remains of an earlier try go first, an exception discards the new one.

        The caller must ``commit``; leaving without it discards too. LaunchError where another process writes it.
        """
        draft = Draft(self, path, kind, key, config, inputs)
        hint = "run the same command again once that one has ended; it uses what was made"
        with self.locked(path, taken(f"{path} is already being written", "another process", self.full(path), hint)):
            draft.clear()
            try:
                with disk_errors(path, self.option):
                    yield draft
            except BaseException:
                with suppress(Exception):  # what went wrong first is what is told; the next try clears up
                    draft.discard_uncommitted()
                raise
            draft.discard_uncommitted()

    def verify(self, artifact: Artifact, only: str = "") -> None:
        """Read every file of ``artifact``, or ``only`` this one, and compare size and checksum.

        DamagedError names the first that differs.
        """
        for name, entry in artifact.files.items():
            if only and name != only:
                continue
            path = f"{artifact.path}/{name}"
            if not self.exists(path):
                raise DamagedError(f"{self.url_of(path)} is missing from its artifact", hint="force=true")
            read = self.measure(path)
            if read != entry:
                raise DamagedError(
                    f"{self.url_of(path)} is corrupt: {read.bytes} bytes and checksum {read.checksum}, "
                    f"expected {entry.bytes} and {entry.checksum}",
                    hint="force=true writes the artifact again",
                )

    def measure(self, path: str) -> FileEntry:
        """Size and checksum of the file at ``path``, read through."""
        digest, count = xxhash.xxh3_128(), 0
        with self.open(path) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                count += len(block)
        return FileEntry(count, f"xxh3_128:{digest.hexdigest()}")
