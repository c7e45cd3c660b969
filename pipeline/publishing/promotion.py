"""Which version of a model serves: ``models/<model>/current.json``.

It is replaced as a whole and only while it is still what its writer read (``store/conditional.py``), so whoever reads
it sees the former version or the new one, and of two writers at once neither loses what the other one did. It holds the
line of versions that served, of which the last one serves now: promoting appends, rolling back takes off.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ArtifactError, ConfigError, LaunchError, PassingError
from pipeline.publishing.versions import model_lock, model_path, require_whole, version_path
from pipeline.store import Artifact, Store
from pipeline.store.conditional import Seen, SwappedError, look, swap
from pipeline.store.retrying import explained, passes

CURRENT = "current.json"
FORMAT = 1
_LOG_ENTRIES = 200
_TRIES = 10  # of a promotion beside others that write; each of them lets one through


@dataclass(frozen=True, kw_only=True)
class Current:
    """``current.json``: ``line`` of versions that served, the last one now; ``log`` of what was done, by whom, why."""

    model: str
    line: tuple[str, ...] = ()
    log: tuple[dict[str, Any], ...] = ()

    @property
    def version(self) -> str | None:
        """The version that serves."""
        return self.line[-1] if self.line else None

    @property
    def previous(self) -> str | None:
        """The one that served before it, which a rollback restores."""
        return self.line[-2] if len(self.line) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``version``, ``uri`` (relative to the store) and ``previous`` are for readers."""
        return {
            "format": FORMAT, "model": self.model, "version": self.version, "previous": self.previous,
            "uri": version_path(self.model, self.version) if self.version else None,
            "line": list(self.line), "log": list(self.log[-_LOG_ENTRIES:]),
        }  # fmt: skip


def read_current(store: Store, model: str) -> Current:
    """What serves; an empty line where nothing was published yet. ArtifactError for a damaged file."""
    return _read(store, model)[1]


def _read(store: Store, model: str) -> tuple[Seen, Current]:
    """``current.json`` as it was read, for ``swap``, and what it says."""
    seen = look(store, _current_path(model))
    return seen, _parsed(store, model, seen)


def _parsed(store: Store, model: str, seen: Seen) -> Current:
    if seen.data is None:
        return Current(model=model)
    try:
        record = json.loads(seen.data)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        return Current(model=model, line=tuple(map(str, record["line"])), log=tuple(record["log"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{store.url_of(_current_path(model))} does not say which version serves: {error}",
            hint=f"nightjar models promote {model} <version> --reason '...' after removing that file",
        ) from None


def _current_path(model: str) -> str:
    return f"{model_path(model)}/{CURRENT}"


def incumbent(store: Store, model: str) -> Artifact | None:
    """The version that serves; None where there is none. ArtifactError where ``current.json`` names a missing one."""
    version = read_current(store, model).version
    if version is None:
        return None
    artifact = store.find(version_path(model, version))
    if artifact is None:
        raise ArtifactError(
            f"{model_path(model)}/{CURRENT} names {version}, which does not exist",
            hint=f"nightjar rollback {model}, or nightjar models promote {model} <version> --reason '...'",
        )
    return artifact


def promote(
    store: Store, model: str, version: str, *, by: str, reason: str = "", check: Callable[[], None] | None = None
) -> Current:
    """Let ``version`` serve from now on; nothing changes where it does already.

    ``by``: publish (its tables were scored just now) | promote (they are read again). ``check`` may refuse, while
    nobody else can change what serves. ArtifactError for a version that is not there whole, ConfigError for one that
    the gate held where no ``reason`` is given.
    """
    mine, whole = uuid.uuid4().hex, None
    with model_lock(store, model):
        for _ in range(_TRIES):
            seen, current = _read(store, model)
            if version == current.version or _wrote(current, mine):
                return current
            if check is not None:
                check()
            whole = whole or require_whole(store, model, version, tables=by != "publish")
            if whole.summary.get("verdict") == "HOLD" and not reason.strip():
                raise _needs_reason(model, version)
            try:
                return _swap(store, seen, current, (*current.line, version), _entry(mine, current, by, version, reason))
            except SwappedError:
                continue  # somebody promoted or rolled back since: all of it holds beside that one, or not
        raise _changed(store, model, f"{_TRIES} times")


def _needs_reason(model: str, version: str) -> ConfigError:
    return ConfigError(
        f"the gate held {version} of model {model!r}: publishing it anyway needs a reason, which is recorded",
        hint=f"nightjar models promote {model} {version} --reason 'why it is right'",
    )


def roll_back(store: Store, model: str, reason: str = "") -> Current:
    """Let the version that served before serve again. ConfigError where there is none.

    LaunchError where another process changes what serves meanwhile: the version before that one is another one.
    """
    mine = uuid.uuid4().hex
    with model_lock(store, model):
        seen, current = _read(store, model)
        if current.previous is None:
            known = f"{current.version} is the first serving version" if current.version else "nothing was published"
            raise ConfigError(
                f"model {model!r} has no previous version to roll back to: {known}",
                hint=f"nightjar models ls {model} shows the versions; nightjar models promote {model} <version> "
                "--reason '...' lets one of them serve",
            )
        require_whole(store, model, current.previous, tables=False)
        entry = _entry(mine, current, "rollback", current.previous, reason)
        try:
            return _swap(store, seen, current, current.line[:-1], entry)
        except SwappedError as other:
            now = _parsed(store, model, other.now)
            if _wrote(now, mine):
                return now
            raise _changed(store, model, "meanwhile") from None
        except Exception as error:
            fault = explained(error)
            if fault is None or not passes(error):
                raise
            raise PassingError(
                f"cannot tell whether model {model!r} was rolled back to {current.previous}: {fault.message}",
                hint=f"nightjar models ls {model} says which version serves; if it is {current.previous}, the "
                "rollback is done, and running the same command again would go back one more",
            ) from error


def _entry(mine: str, current: Current, by: str, version: str, reason: str) -> dict[str, Any]:
    """An entry of the log; ``id`` tells its writer whether a write whose answer was lost was done."""
    return {
        "version": version, "instead_of": current.version, "by": by, "reason": reason, "at": time.time(), "id": mine,
    }  # fmt: skip


def _wrote(current: Current, mine: str) -> bool:
    return any(entry.get("id") == mine for entry in current.log)


def _changed(store: Store, model: str, when: str) -> LaunchError:
    now = read_current(store, model).version
    return LaunchError(
        f"another process changed which version of model {model!r} serves {when}: now {now or 'nothing'} serves",
        hint=f"nightjar models ls {model}; then run the same command if it is still right",
    )


def _swap(store: Store, seen: Seen, current: Current, line: tuple[str, ...], entry: dict[str, Any]) -> Current:
    after = Current(model=current.model, line=line, log=(*current.log, entry))
    data = (json.dumps(after.to_json(), indent=1) + "\n").encode()
    swap(store, _current_path(current.model), seen, data)
    return after
