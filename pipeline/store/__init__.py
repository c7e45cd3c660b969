"""The store: artifacts, conditional writes, leases, and a file system with retries."""

from pipeline.store.artifacts import Draft, Store
from pipeline.store.errors import disk_errors, reachable
from pipeline.store.files import Files
from pipeline.store.manifest import MANIFEST, SCHEMA_VERSION, Artifact, FileEntry, artifact_key

__all__ = [
    "MANIFEST",
    "SCHEMA_VERSION",
    "Artifact",
    "Draft",
    "FileEntry",
    "Files",
    "Store",
    "artifact_key",
    "disk_errors",
    "reachable",
]
