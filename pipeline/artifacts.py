"""Content-keyed artifacts over fsspec: what stages hand each other.

An artifact is a directory whose ``manifest.json`` is written last and atomically; without it the
artifact does not exist. The manifest names kind, schema version, key, stage configuration, inputs by
key, files with bytes and checksum (XXH3-128), and a summary. Works on any fsspec URL, object stores
without rename included.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import ArtifactError, ConfigError, DamagedError, LaunchError, NightjarError, UnreachableError
from pipeline.retrying import retried
from pipeline.steady import Steady

SCHEMA_VERSION = 2
_READS = 4  # of a file whose bytes are wrong: two that agree are proof
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact: size in bytes and ``xxh3_128:<hex>`` checksum."""

    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A committed artifact. ``path`` is relative to its store; ``summary`` is its part of ``result.json``."""

    path: str
    kind: str
    key: str
    schema_version: int
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, FileEntry]
    summary: dict[str, Any]
    created: float

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain data (the path is where it lies, so it is left out)."""
        record = asdict(self)
        del record["path"]
        return record


def artifact_key(stage: str, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Hash (32 hex digits) of stage, its resolved configuration, the keys of its inputs and the schema version."""
    record = {"stage": stage, "config": config, "inputs": inputs, "schema_version": SCHEMA_VERSION}
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_SEAL = b',\n "seal": "'


def _sealed(record: dict[str, Any]) -> bytes:
    """``record`` as JSON whose last entry ``seal`` is the checksum of all bytes before it."""
    body = json.dumps(record, indent=1).encode().removesuffix(b"\n}")
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def _unsealed(data: bytes) -> dict[str, Any]:
    """What ``_sealed`` was given; ValueError if a single bit differs."""
    body, _, seal = data.rpartition(_SEAL)
    if seal != xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n':
        raise ValueError("its content and its seal (a checksum of it) differ")
    record: dict[str, Any] = json.loads(body + b"}")
    return record


def _parsed(path: str, data: bytes) -> Artifact:
    """The artifact whose manifest is ``data``."""
    record = _unsealed(data)
    files = {name: FileEntry(**entry) for name, entry in record.pop("files").items()}
    return Artifact(path=path, files=files, **record)


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


_REFUSALS = (errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def disk_errors(what: str, option: str = "store=", *, doing: str = "writing") -> Iterator[None]:
    """Turn a full disk or a refusal while writing (or ``doing`` else with) ``what`` into an ArtifactError.

    ``option``: how the user names another place, for the hint; "" where no other place would do.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise ArtifactError(
                f"no space left on the store's disk while {doing} {what}",
                hint=f"free space there, or {option}<another fsspec URL>; nothing half-written was kept",
            ) from error
        if isinstance(error, PermissionError) or error.errno in _REFUSALS:  # object stores set no errno
            reason = os.strerror(error.errno) if error.errno else str(error)
            other = "the same command as a user who may write there"
            hint = f"{option}<an fsspec URL you may write to>" if option else other
            raise ArtifactError(f"the store refuses {doing} {what}: {reason}", hint=hint) from error
        raise


def _flock(handle: int, busy: NightjarError | None) -> None:
    """Lock an open folder, waiting for it; where ``busy`` is given, raise that instead of waiting."""
    with suppress(OSError):  # a file system without locks
        if busy is None:
            fcntl.flock(handle, fcntl.LOCK_EX)
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None


@contextmanager
def reachable(where: str) -> Iterator[None]:
    """Turn an error of the store itself into UnreachableError: not a missing file, a bad sector or one of the family.

    Clients of object stores raise their own classes for a cut connection or a timeout, so any class counts.
    """
    try:
        yield
    except (NightjarError, FileNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        raise UnreachableError(
            f"{where} cannot be read: {type(error).__name__}: {error}",
            hint="the same command again once the store answers; nothing was changed",
        ) from error


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
                    hint="the same command again once that one has ended: it takes what was made",
                )

    def clear(self) -> None:
        """Remove everything written so far; a manifest goes first, so that no half of an artifact looks committed."""
        full = self.store.full(self.path)
        if self.store.exists(f"{self.path}/{MANIFEST}"):
            self.store.fs.rm_file(f"{full}/{MANIFEST}")
        for name in self.store.names(self.path):
            self.store.fs.rm(f"{full}/{name}", recursive=True)

    def discard_uncommitted(self) -> None:
        """Remove what was written, unless it was committed."""
        if not self.store.exists(f"{self.path}/{MANIFEST}"):
            self.discard()

    def discard(self) -> None:
        """Remove the artifact, as ``clear``, and its folder."""
        self.clear()
        if self.store.exists(self.path):
            self.store.fs.rm(self.store.full(self.path), recursive=True)


class Store:
    """The one place (an fsspec URL) that holds datasets, plans, runs and models.

    ``option``: how the user gave the URL, for hints; commands that do not compose take ``--store ``.
    """

    def __init__(self, url: str, option: str = "store=") -> None:
        if not url.strip():
            name = option.rstrip(" =")
            raise ConfigError(f"{name} is empty, expected a folder or an fsspec URL", hint=f"{option}<an fsspec URL>")
        self.option = option
        self.url = url.rstrip("/") or "/"
        self.fs: AbstractFileSystem
        try:
            inner, self.root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{option}{url} cannot be opened: {error}", hint=f"{option}<an fsspec URL>") from None
        self.root = self.root.rstrip("/")
        self.is_local = isinstance(inner, LocalFileSystem)
        self.fs = cast(AbstractFileSystem, Steady(inner))

    def full(self, path: str) -> str:
        """The file system's own path for a ``path`` relative to the store."""
        return f"{self.root}/{path}"

    def url_of(self, path: str) -> str:
        """The URL of a ``path`` relative to the store, as another process can open it."""
        return self.full(path) if self.is_local else self.fs.unstrip_protocol(self.full(path))

    def answers(self) -> bool:
        """Whether the store is there: a folder; UnreachableError where it does not answer."""
        with reachable(self.url):
            return bool(self.fs.exists(self.root or "/")) and not self.fs.isfile(self.root or "/")

    def exists(self, path: str) -> bool:
        """Whether a file or directory lies at ``path``. The store's own error where it cannot tell.

        fsspec's ``exists`` answers "no" to a connection that broke or a disk that failed, and what is taken for absent
        is written or removed. Nor is an earlier listing asked: another process may have written since, or this one may
        have without an answer.
        """
        full = self.full(path)
        self.fs.invalidate_cache(full)
        try:
            self.fs.info(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open(self, path: str, mode: str = "rb") -> Any:
        """Open a file for reading."""
        return self.fs.open(self.full(path), mode)

    def read_json(self, path: str) -> Any:
        """The parsed JSON file at ``path``; ArtifactError if it is missing or does not parse."""
        try:
            with self.open(path) as source:
                return json.load(source)
        except FileNotFoundError:
            raise ArtifactError(f"{self.url_of(path)} does not exist", hint="run the stage that writes it") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{self.url_of(path)} is not valid JSON: {error}", hint="force=true") from None

    def write_json(self, path: str, value: Any) -> None:
        """Write ``value`` as JSON, atomically: a reader sees the former file or the whole new one."""
        self.write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a small file atomically (rename on a local disk, one put on an object store)."""
        with disk_errors(path, self.option):
            retried(lambda: self._write_whole(self.full(path), data), f"writing {self.url_of(path)}")

    def _write_whole(self, full: str, data: bytes) -> None:
        self.fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
        if not self.is_local:
            self.fs.pipe_file(full, data)
            return
        handle, temporary = tempfile.mkstemp(dir=Path(full).parent, prefix=".write-")
        try:
            with os.fdopen(handle, "wb") as sink:
                sink.write(data)
                sink.flush()
                os.fsync(sink.fileno())
            Path(temporary).replace(full)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what is told
                Path(temporary).unlink(missing_ok=True)
            raise

    @contextmanager
    def locked(self, path: str, busy: NightjarError | None = None) -> Iterator[None]:
        """Hold the folder ``path`` against other processes of this file system; wait for it, or raise ``busy`` at once.

        An advisory lock: it leaves nothing behind but the folder and ends with the process, however that ends. Object
        stores, and file systems without locks, have none.
        """
        if not self.is_local:
            yield
            return

        def opened() -> int:
            self.fs.makedirs(self.full(path), exist_ok=True)
            return os.open(self.full(path), os.O_RDONLY)

        with disk_errors(path, self.option):
            handle = retried(opened, f"locking {self.url_of(path)}")
        try:
            _flock(handle, busy)
            yield
        finally:
            os.close(handle)

    def write_manifest(self, artifact: Artifact) -> None:
        """Write ``artifact``'s manifest, atomically and sealed: from now on it is what lies at its path."""
        self.write_bytes(f"{artifact.path}/{MANIFEST}", _sealed(artifact.to_json()))

    def names(self, path: str) -> list[str]:
        """Sorted names directly under ``path``; empty where it does not exist."""
        full = self.full(path)
        self.fs.invalidate_cache(full)
        if not self.exists(path):
            return []
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in self.fs.ls(full, detail=False))

    def find(self, path: str) -> Artifact | None:
        """The artifact committed at ``path``, or None. DamagedError for a manifest that does not parse, read twice."""
        former, where = None, f"{self.url_of(path)}/{MANIFEST}"
        for _ in range(_READS):
            try:
                data = self.fs.cat_file(self.full(f"{path}/{MANIFEST}"))
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                return _parsed(path, data)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                if data == former:
                    raise DamagedError(
                        f"{where} is not a manifest of schema version {SCHEMA_VERSION}: {error}",
                        hint="force=true writes the artifact again",
                        file=f"{path}/{MANIFEST}",
                    ) from None
                former = data
        raise UnreachableError(f"{where} reads differently every time", hint="the same command again; check the disk")

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
        hint = "the same command again once that one has ended: it takes what was made"
        with self.locked(path, LaunchError(f"{path} is being written by another process", hint=hint)):
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
            digest, count = xxhash.xxh3_128(), 0
            with self.open(path) as source:
                while block := source.read(1 << 22):
                    digest.update(block)
                    count += len(block)
            found = FileEntry(count, f"xxh3_128:{digest.hexdigest()}")
            if found != entry:
                raise DamagedError(
                    f"{self.url_of(path)} is corrupt: {found.bytes} bytes and checksum {found.checksum}, "
                    f"expected {entry.bytes} and {entry.checksum}",
                    hint="force=true writes the artifact again",
                )
