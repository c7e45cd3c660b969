"""Names in ``data.options`` that are Nightjar's own, not those of a library."""

from __future__ import annotations

ANONYMOUS = "anonymous"  # credentials of an emulator
SERVERS = "bootstrap.servers"
CONFIG_FILE, SCHEMA_FILE, REGISTRY = "config.file", "schema.file", "schema.registry.url"
MESSAGES = ("jsonl", "csv", "avro")
