"""Versions of a model, and which of them serves: ``models/<model>/<version>/`` and ``models/<model>/current.json``.

``current.json`` is replaced as a whole and only while it is still what its writer read (``swapping``), so whoever reads
it sees the former version or the new one, and of two writers at once neither loses what the other one did. It holds the
line of versions that served, of which the last one serves now: promoting appends, rolling back takes off.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import ArtifactError, ConfigError, LaunchError, PassingError, UnreachableError
from pipeline.store import Artifact, Store
from pipeline.store.conditional import Seen, SwappedError, look, swap
from pipeline.store.refusals import taken
from pipeline.store.removal import age, forget, remove, written
from pipeline.store.retrying import explained, passes

CURRENT = "current.json"
FORMAT = 1
KIND = "model"
_TABLES = "tables/"  # begins the names of a version's large files
NAME = re.compile(r"v(\d{5,})-[0-9a-f]{8}")
UNFINISHED = "not finished: it is being written, or its writer was killed (models gc removes it then)"
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


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A version as ``nightjar models ls`` shows it; ``problem``: why it cannot be used ("": nothing)."""

    version: str
    serves: bool
    previous: bool
    created: float | None
    bytes: int | None
    summary: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def damaged(self) -> bool:
        """Whether something is wrong with it: one that is not finished may be in the making."""
        return self.problem not in ("", UNFINISHED)


def model_path(model: str) -> str:
    """Where a model's versions lie, relative to the store."""
    return f"models/{model}"


def version_path(model: str, version: str) -> str:
    """Where a version lies, relative to the store."""
    return f"{model_path(model)}/{version}"


def new_version(store: Store, model: str, key: str) -> str:
    """A name for the version made by key ``key``: numbers rise, the key keeps two writers apart."""
    numbers = [int(found[1]) for name in store.names(model_path(model)) if (found := NAME.fullmatch(name))]
    return f"v{max(numbers, default=0) + 1:05d}-{key[:8]}"


def made_by(store: Store, model: str, key: str) -> Artifact | None:
    """The newest committed version with artifact key ``key``, if there is one."""
    for name in reversed(store.names(model_path(model))):
        if NAME.fullmatch(name) and name.endswith(key[:8]):
            found = store.find(version_path(model, name))
            if found is not None and found.key == key:
                return found
    return None


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
    found = store.find(version_path(model, version))
    if found is None:
        raise ArtifactError(
            f"{model_path(model)}/{CURRENT} names {version}, which is not there",
            hint=f"nightjar rollback {model}, or nightjar models promote {model} <version> --reason '...'",
        )
    return found


def promote(
    store: Store, model: str, version: str, *, by: str, reason: str = "", check: Callable[[], None] | None = None
) -> Current:
    """Let ``version`` serve from now on; nothing changes where it does already.

    ``by``: publish (its tables were scored just now) | promote (they are read again). ``check`` may refuse, while
    nobody else can change what serves. ArtifactError for a version that is not there whole, ConfigError for one that
    the gate held where no ``reason`` is given.
    """
    mine, whole = uuid.uuid4().hex, None
    with _held(store, model):
        for _ in range(_TRIES):
            seen, current = _read(store, model)
            if version == current.version or _wrote(current, mine):
                return current
            if check is not None:
                check()
            whole = whole or _require_whole(store, model, version, tables=by != "publish")
            if whole.summary.get("verdict") == "HOLD" and not reason.strip():
                raise _needs_reason(model, version)
            try:
                return _swap(store, seen, current, (*current.line, version), _entry(mine, current, by, version, reason))
            except SwappedError:
                continue  # somebody promoted or rolled back since: all of it holds beside that one, or not
        raise _changed(store, model, f"{_TRIES} times")


def _needs_reason(model: str, version: str) -> ConfigError:
    return ConfigError(
        f"the gate held {version} of model {model!r}: publishing it all the same needs a reason, which is kept",
        hint=f"nightjar models promote {model} {version} --reason 'why it is right'",
    )


def roll_back(store: Store, model: str, reason: str = "") -> Current:
    """Let the version that served before serve again. ConfigError where there is none.

    LaunchError where another process changes what serves meanwhile: the version before that one is another one.
    """
    mine = uuid.uuid4().hex
    with _held(store, model):
        seen, current = _read(store, model)
        if current.previous is None:
            known = f"{current.version} is the first one that serves" if current.version else "nothing was published"
            raise ConfigError(
                f"model {model!r} has no former version to go back to: {known}",
                hint=f"nightjar models ls {model} shows the versions; nightjar models promote {model} <version> "
                "--reason '...' lets one of them serve",
            )
        _require_whole(store, model, current.previous, tables=False)
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
                f"it is not known whether model {model!r} was rolled back to {current.previous}: {fault.message}",
                hint=f"nightjar models ls {model} says which version serves; where that is {current.previous}, it is "
                "done, and the same command again would go back one more",
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
        hint=f"nightjar models ls {model}; then the same command, if it is still right",
    )


def _swap(store: Store, seen: Seen, current: Current, line: tuple[str, ...], entry: dict[str, Any]) -> Current:
    after = Current(model=current.model, line=line, log=(*current.log, entry))
    data = (json.dumps(after.to_json(), indent=1) + "\n").encode()
    swap(store, _current_path(current.model), seen, data)
    return after


def find_version(store: Store, model: str, version: str) -> Artifact:
    """The committed ``version`` of ``model``; ArtifactError naming those there are where it is none."""
    artifact = store.find(version_path(model, version)) if NAME.fullmatch(version) else None
    if artifact is None:
        known = ", ".join(name for name in store.names(model_path(model)) if NAME.fullmatch(name)) or "none"
        raise ArtifactError(
            f"model {model!r} has no version {version!r} in store {store.url}; there are: {known}",
            hint=f"nightjar models ls {model}",
        )
    return artifact


def small_files(artifact: Artifact) -> list[str]:
    """The files of a version but its tables."""
    return [name for name in artifact.files if not name.startswith(_TABLES)]


def require_intact(store: Store, model: str, artifact: Artifact, names: Iterable[str]) -> None:
    """Read the files ``names`` of a version; ArtifactError naming the first that is not what was written."""
    try:
        for name in names:
            store.verify(artifact, name)
    except UnreachableError:
        raise
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=_other(model)) from None


def _other(model: str) -> str:
    return f"another version: nightjar models ls {model}"


def _require_whole(store: Store, model: str, version: str, *, tables: bool) -> Artifact:
    """The version; ArtifactError unless it is committed and its files are as written.

    Of tables only the sizes are looked at where not ``tables``: a rollback takes no longer for larger ones.
    """
    artifact, path = find_version(store, model, version), version_path(model, version)
    for name, entry in artifact.files.items():
        file = f"{path}/{name}"
        size = store.fs.info(store.full(file))["size"] if store.exists(file) else None
        if size != entry.bytes:
            state = "missing" if size is None else f"{size} bytes"
            raise ArtifactError(f"{store.url_of(file)} is {state}, expected {entry.bytes} bytes", hint=_other(model))
    require_intact(store, model, artifact, artifact.files if tables else small_files(artifact))
    return artifact


def _held(store: Store, model: str) -> AbstractContextManager[None]:
    """One writer of ``current.json`` at a time on this file system; object stores have no locks (``swap`` decides)."""
    path = store.full(model_path(model))
    if store.is_local and not store.fs.isdir(path):
        return nullcontext()  # no such model: whoever asks says so
    busy = taken(
        f"model {model!r} is being changed already", "another process", path, "the same command again in a moment"
    )
    return store.locked(model_path(model), busy)


def models(store: Store) -> list[str]:
    """Names of the models in the store."""
    return store.names("models")


def listing(store: Store, model: str) -> list[Listing]:
    """Every version of ``model``, oldest first, with those that are not finished and the one that serves, be it gone.

    ConfigError where the model is unknown.
    """
    if model not in models(store):
        known = ", ".join(models(store)) or "none"
        raise ConfigError(f"no model {model!r} in store {store.url}; there are: {known}", hint="--store <its store>")
    current, found = read_current(store, model), []
    named = {current.version} if current.version else set()
    for name in sorted(named.union(filter(NAME.fullmatch, store.names(model_path(model))))):
        artifact, problem = None, f"it has no manifest, but {CURRENT} names it" if name in named else UNFINISHED
        try:
            artifact = store.find(version_path(model, name))
        except UnreachableError:
            raise
        except ArtifactError as error:
            problem = error.message
        size = sum(entry.bytes for entry in artifact.files.values()) if artifact else None
        found.append(
            Listing(
                version=name, serves=name == current.version, previous=name == current.previous,
                created=artifact.created if artifact else None, bytes=size,
                summary=artifact.summary if artifact else {}, problem="" if artifact else problem,
            )
        )  # fmt: skip
    return found


def collect(store: Store, model: str, keep: int, min_age_seconds: float, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove all but the newest ``keep`` versions; what went (or would go) and why.

    The version that serves and the one before it always stay, so does what is younger than ``min_age_seconds``: it may
    be in the making. A version's manifest goes first: half a version never looks whole.
    """
    with _held(store, model):
        entries = listing(store, model)
        whole = [each for each in entries if not each.problem]
        stay = {each.version for each in whole[-keep:]} if keep else set()
        stay |= {each.version for each in entries if each.serves or each.previous}
        gone = []
        for each in entries:
            path = version_path(model, each.version)
            if each.version in stay or time.time() - _touched(store, path, each) < min_age_seconds:
                continue
            problem = "never finished" if each.problem == UNFINISHED else each.problem
            gone.append(
                {"version": each.version, "bytes": each.bytes, "reason": problem or f"not among the newest {keep}"}
            )
            if not dry_run:
                forget(store, path)
        for name in store.names(model_path(model)):
            full = store.full(f"{model_path(model)}/{name}")
            if name.startswith(".write-") and not dry_run and age(store, full) >= min_age_seconds:
                store.fs.rm_file(full)
    for entry in () if dry_run else gone:  # after the lock: a night that publishes does not wait for large files to go
        remove(store, version_path(model, str(entry["version"])))
    return gone


def _touched(store: Store, path: str, each: Listing) -> float:
    """When a version was last written, seconds since 1970; one that is not finished by its newest file."""
    if each.created is not None:
        return each.created
    full = store.full(path)
    return max(written(store, file) for file in store.fs.find(full) or [full])
