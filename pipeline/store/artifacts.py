"""Artifacts that stages exchange, on any fsspec URL.

An artifact is a folder whose ``manifest.json`` is written last and atomically; without it the artifact does not exist.
The manifest has the kind, schema version, key, stage configuration, input keys, files with sizes and checksums
(XXH3-128), and a summary.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from pipeline.core.errors import ArtifactError, DamagedError, LaunchError, PassingError, UnreachableError
from pipeline.core.retrying import retried
from pipeline.store.cache import CachedFile, PartCache
from pipeline.store.errors import disk_errors, taken
from pipeline.store.files import Files
from pipeline.store.manifest import MANIFEST, SCHEMA_VERSION, Artifact, FileEntry, parsed, sealed
from pipeline.store.removal import forget, remove

# Bytes read at a time.
_BLOCK = 4 << 20
# Maximum number of reads of a manifest that does not parse; two equal reads prove damage.
_READS = 4


class _HashingFile(io.RawIOBase):
    """A binary sink that counts and hashes what is written. ``guarded``: context that explains a failing write."""

    def __init__(self, inner: BinaryIO, guarded: Callable[[], AbstractContextManager[None]]) -> None:
        self.inner = inner
        self.guarded = guarded
        self.count = 0
        self.hash = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # xxHash needs contiguous bytes, and a slice of an array may not be contiguous.
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


@dataclass
class Draft:
    """An artifact in the making: write its files, then ``commit``. ``discard`` removes everything."""

    store: Store
    path: str
    kind: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open file ``name`` (relative, slashes allowed) for writing; records its size and checksum.

        Raises ArtifactError if the disk is full.
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
            # The first error is the one to report.
            with suppress(Exception):
                inner.close()
            raise
        # Closing writes what is left in the buffer, for which the disk may have no space.
        with guarded():
            inner.close()
        self.files[name] = FileEntry(sink.count, f"xxh3_128:{sink.hash.hexdigest()}")

    def write_json(self, name: str, value: Any) -> None:
        """Write ``value`` as indented JSON to file ``name``."""
        # Small enough to retry as a whole, unlike files that are written while their content is computed.
        data = (json.dumps(value, indent=1) + "\n").encode()

        def write() -> None:
            with self.open(name) as sink:
                sink.write(data)

        retried(write, f"writing {self.store.url_of(self.path)}/{name}")

    def commit(self, summary: dict[str, Any]) -> Artifact:
        """Write the manifest, which creates the artifact. LaunchError if another writer removed files of it."""
        if not self.store.is_local:
            # An object store has no locks: a second writer of the same key removes the files of the first.
            full = self.store.full(self.path)
            self.store.fs.invalidate_cache()
            sizes = {name: info["size"] for name, info in self.store.fs.find(full, detail=True).items()}
            for name, entry in self.files.items():
                if sizes.get(f"{full}/{name}") != entry.bytes:
                    raise LaunchError(
                        f"{self.path}/{name} was removed or replaced before it was committed: another process also "
                        f"writes {self.path}",
                        hint="run the same command again once that one has ended; it uses the finished artifact",
                    )
        artifact = Artifact(
            path=self.path,
            kind=self.kind,
            key=self.key,
            schema_version=SCHEMA_VERSION,
            config=self.config,
            inputs=self.inputs,
            files=dict(sorted(self.files.items())),
            summary=summary,
            created=time.time(),
        )
        self.store.write_manifest(artifact)
        return artifact

    def clear(self) -> None:
        """Remove everything in the folder."""
        # A manifest goes first, so that half an artifact never looks committed.
        forget(self.store, self.path)
        for name in self.store.names(self.path):
            self.store.fs.rm(self.store.full(f"{self.path}/{name}"), recursive=True)

    def discard_uncommitted(self) -> None:
        """Remove the draft unless it was committed."""
        # Ask the store, because a commit whose answer was lost may have succeeded.
        if not self.store.exists(f"{self.path}/{MANIFEST}"):
            self.discard()

    def discard(self) -> None:
        """Remove the artifact and its folder."""
        remove(self.store, self.path)


class Store(Files):
    """The fsspec URL that holds datasets, plans, runs and models.

    ``option``: how the user gave the URL, for hints: ``store=``, or ``--store `` for commands that do not compose.
    ``cache``: keeps parts of artifacts' files on this host; None: nothing does.
    """

    cache: PartCache | None = None

    def caching(self, folder: str | None, limit: int) -> Store:
        """Return this store with a cache of ``limit`` bytes in ``folder``; itself without a folder or on a disk."""
        if folder is None or self.is_local:
            return self
        # A copy with the same connections, so that only those who asked for the cache use it.
        other = copy(self)
        other.cache = PartCache(Path(folder), limit)
        return other

    def open_parts(self, artifact: Artifact, name: str) -> Any:
        """Open a file of ``artifact`` to read parts of it, which come from the cache where it has them."""
        path, entry = f"{artifact.path}/{name}", artifact.files.get(name)
        if self.cache is None or entry is None:
            return self.open(path, parts=True)

        # The cache keeps parts for good, as those of ``entry``. The artifact may be written again while somebody reads
        # it by an earlier manifest, and then its parts are not those of that entry.
        def open_listed() -> Any:
            source = self.open(path, parts=True)
            size = source.seek(0, os.SEEK_END)
            if size != entry.bytes:
                source.close()
                raise PassingError(
                    f"{self.url_of(path)} has {size} bytes, expected {entry.bytes}: it was written again meanwhile",
                    hint="run the same command again",
                )
            return source

        return CachedFile(self.cache, entry.checksum, entry.bytes, open_listed)

    def write_manifest(self, artifact: Artifact) -> None:
        """Write the sealed manifest of ``artifact`` atomically, which makes it the artifact at its path."""
        self.write_bytes(f"{artifact.path}/{MANIFEST}", sealed(artifact.to_json()))

    def find(self, path: str) -> Artifact | None:
        """Return the artifact at ``path``, or None. DamagedError if the manifest does not parse in two equal reads."""
        former = None
        where = f"{self.url_of(path)}/{MANIFEST}"
        # A bit that flips during a transfer differs from read to read. It must not count as damage, because a damaged
        # artifact may be overwritten.
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
        """Return the artifact at ``path``.

        Raises:
            ArtifactError: There is none; it names the ``stage`` that makes it.
        """
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
        """Write an artifact at ``path``, after removing leftovers of an earlier attempt.

        The caller must ``commit``. An exception, or leaving without a commit, discards the draft. Raises LaunchError if
        another process writes the same path.
        """
        # Lock before clearing: what looks like leftovers may be files that another process is writing.
        draft = Draft(self, path, kind, key, config, inputs)
        hint = "run the same command again once that one has ended; it uses the finished artifact"
        with self.locked(path, taken(f"{path} is already being written", "another process", self.full(path), hint)):
            draft.clear()
            try:
                with disk_errors(path, self.option):
                    yield draft
            except BaseException:
                # The first error is the one to report; the next attempt cleans up.
                with suppress(Exception):
                    draft.discard_uncommitted()
                raise
            draft.discard_uncommitted()

    def verify(self, artifact: Artifact, only: str = "") -> None:
        """Check size and checksum of every file of ``artifact``, or of ``only`` one; else DamagedError."""
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
        """Read the file at ``path``; returns its size and checksum."""
        digest, count = xxhash.xxh3_128(), 0
        with self.open(path) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                count += len(block)
        return FileEntry(count, f"xxh3_128:{digest.hexdigest()}")
