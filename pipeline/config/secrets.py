"""No setting holds a secret: records, manifests and pages show all settings of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError

WEBHOOK = "nightly.webhook"  # may be secret: it is recorded nowhere, and a schedule takes it from the environment
# Names of variables whose value is a secret.
SECRETIVE = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIAL|PRIVATE_KEY|ACCESS_KEY|WEBHOOK|CONN(ECTION)?_?STR(ING)?"
    r"|(^|_)(API)?KEY$|(^|_)AUTH(ORIZATION)?(_|$)|(^|_)(PASS|PAT|PWD|DSN|SAS|COOKIE|SIGNATURE)$",
    re.IGNORECASE,
)
_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
# What signs a URL, or is a password in a connection string.
_SIGNED = re.compile(
    r"[?&;](sig|signature|x-amz-signature|x-goog-signature|(access_?)?token|api_?key|key|password|pwd|secret|accountkey"
    r"|sharedaccesskey|sharedaccesssignature)=[^&;\s]",
    re.IGNORECASE,
)
_WEBHOOKS = re.compile(r"https?://[^/\s]*(hooks\.slack\.|webhook)|/api/webhooks/")


def is_secret(text: str) -> bool:
    """Whether ``text`` is a URL with a password or a signature, or a connection string with a key."""
    return bool(_WITH_PASSWORD.search(text) or _SIGNED.search(text))


def check_secrets(config: Config) -> None:
    """Raise ConfigError for a setting of any launcher that holds a secret; its value is in no message."""
    for path, value in _texts("", asdict(config)):
        if path != WEBHOOK and is_secret(value):
            raise ConfigError(
                f"{path} holds a password or a signature, which manifests and the run's records would show",
                hint="leave it out of the setting: clients of stores find credentials in the environment and in their "
                "own files; launch.pods.secret_env and launch.pods.env_from give them to pods",
            )
    for name, value in config.launch.pods.env.items():
        if SECRETIVE.search(name) or _WEBHOOKS.search(value):
            raise ConfigError(
                f"launch.pods.env sets {name}, whose value manifests and the run's records would show",
                hint=f"~launch.pods.env.{name} launch.pods.secret_env={{{name}:<secret>/<key>}}",
            )


def check_overrides_of_schedule(overrides: list[str]) -> None:
    """Raise ConfigError where an override of a schedule, which its manifest shows, spells a webhook out."""
    for text in overrides:
        name, _, value = text.lstrip("+").partition("=")
        if name == WEBHOOK and value not in ("", "null") and "${" not in value:
            raise ConfigError(
                f"{WEBHOOK} is given as it is, and the schedule's manifest would show it",
                hint="'nightly.webhook=${oc.env:NIGHTJAR_WEBHOOK}' launch.pods.secret_env={NIGHTJAR_WEBHOOK:"
                "<secret>/<key>}",
            )


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """All strings below ``value`` with their paths."""
    if isinstance(value, str):
        yield path, value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in entries:
        yield from _texts(f"{path}.{name}".lstrip("."), each)
