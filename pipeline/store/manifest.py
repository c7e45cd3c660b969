"""The manifest of an artifact: its content, its seal, and the key of the artifact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of an artifact: its size and its checksum, ``xxh3_128:<hex>``."""

    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A committed artifact. ``path`` is relative to the store. ``summary`` becomes its part of ``result.json``."""

    path: str
    kind: str
    key: str
    schema_version: int
    config: dict[str, Any]
    inputs: dict[str, str]
    files: dict[str, FileEntry]
    summary: dict[str, Any]
    created: float

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def total_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain data, without the path."""
        # Leave out the path, so that a folder may be copied or moved as it is.
        record = asdict(self)
        del record["path"]
        return record

    @classmethod
    def from_json(cls, path: str, record: dict[str, Any]) -> Artifact:
        """Restore the artifact at ``path`` from what ``to_json`` returned."""
        files = {name: FileEntry(**entry) for name, entry in record.pop("files").items()}
        return cls(path=path, files=files, **record)


def artifact_key(stage: str, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Hash the stage, its configuration, the keys of its inputs and the schema version to 32 hex digits."""
    # The hash is part of artifacts' paths: if these bytes changed, no existing artifact would be found any more.
    record = {"stage": stage, "config": config, "inputs": inputs, "schema_version": SCHEMA_VERSION}
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_SEAL = b',\n "seal": "'


def sealed(record: dict[str, Any]) -> bytes:
    """Write ``record`` as JSON whose last entry ``seal`` is the checksum of all bytes before it."""
    # Append the seal as text: the checksum is of the exact bytes before it, and does not depend on how JSON is written.
    body = json.dumps(record, indent=1).encode().removesuffix(b"\n}")
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the record that ``sealed`` wrote; ValueError if a single bit differs."""
    # Search from the end, because a text in the summary may look like a seal.
    body, _, seal = data.rpartition(_SEAL)
    if seal != xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n':
        raise ValueError("its content and its seal (a checksum of it) differ")
    try:
        record: dict[str, Any] = json.loads(body + b"}")
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return record


def parsed(path: str, data: bytes) -> Artifact:
    """Parse the manifest ``data`` of the artifact at ``path``."""
    return Artifact.from_json(path, unsealed(data))
