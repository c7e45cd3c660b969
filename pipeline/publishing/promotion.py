"""Which version of a model serves: ``models/<model>/current.json``.

The file is replaced as a whole, and only if it is unchanged since its writer read it (``store/conditional.py``).
Readers see the old version or the new one, and two writers at once lose nothing. The file holds the line of versions
that served; the last one serves now. Promoting appends a version, rolling back removes the last one.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from pipeline.core.errors import (
    ArtifactError,
    ConfigError,
    DamagedError,
    LaunchError,
    NightjarError,
    PassingError,
    UnreachableError,
)
from pipeline.core.retrying import explained, passes
from pipeline.publishing.versions import NAME, model_lock, model_path, number_of, require_whole, version_path
from pipeline.records.gate import GATE, HOLD, GateRecord
from pipeline.records.model_version import Promotion
from pipeline.records.record import read
from pipeline.records.serving import WEIGHTS
from pipeline.store.artifacts import Store
from pipeline.store.conditional import Seen, SwappedError, read_marked, swap
from pipeline.store.manifest import Artifact

CURRENT = "current.json"
FORMAT = 1
_LOG_ENTRIES = 200
# Tries of a promotion beside other writers, one of which succeeds at each try.
_TRIES = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Current:
    """``current.json``: the ``line`` of versions that served, the serving one last, and the ``log`` of changes."""

    model: str
    line: tuple[str, ...] = ()
    log: tuple[Promotion, ...] = ()

    @property
    def version(self) -> str | None:
        """The serving version."""
        return self.line[-1] if self.line else None

    @property
    def previous(self) -> str | None:
        """The version before it, which a rollback restores."""
        return self.line[-2] if len(self.line) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``version``, ``uri`` (relative to the store) and ``previous`` are for readers."""
        uri = version_path(self.model, self.version) if self.version else None
        return {
            "format": FORMAT,
            "model": self.model,
            "version": self.version,
            "previous": self.previous,
            "uri": uri,
            "line": list(self.line),
            # The file is rewritten at each change, so its log keeps only the newest entries.
            "log": list(map(Promotion.to_json, self.log[-_LOG_ENTRIES:])),
        }


def read_current(store: Store, model: str) -> Current:
    """Read what serves; an empty line if nothing was published yet. ArtifactError for a damaged file."""
    return _read(store, model)[1]


def _read(store: Store, model: str) -> tuple[Seen, Current]:
    # Return the bytes of current.json, which swap needs, and their content.
    seen = read_marked(store, _current_path(model))
    return seen, _parsed(store, model, seen)


def _parsed(store: Store, model: str, seen: Seen) -> Current:
    if seen.data is None:
        return Current(model=model)
    try:
        record = json.loads(seen.data)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r}, expected {FORMAT}")
        log = tuple(Promotion.from_json(entry, "log") for entry in record["log"])
        return Current(model=model, line=tuple(map(str, record["line"])), log=log)
    except (KeyError, TypeError, ValueError, RecursionError, ArtifactError) as error:
        raise ArtifactError(
            f"{store.url_of(_current_path(model))} does not say which version serves: {error}",
            hint=f"nightjar models promote {model} <version> --reason '...' after removing that file",
        ) from None


def _current_path(model: str) -> str:
    return f"{model_path(model)}/{CURRENT}"


def incumbent(store: Store, model: str) -> Artifact | None:
    """Return the serving version; None if there is none. ArtifactError if ``current.json`` names a missing version."""
    current = read_current(store, model)
    if current.version is None:
        return None
    artifact = store.find(version_path(model, current.version))
    if artifact is None:
        raise ArtifactError(
            f"{model_path(model)}/{CURRENT} names {current.version}, which does not exist",
            hint=_hint_without_incumbent(store, current),
        )
    return artifact


def _hint_without_incumbent(store: Store, current: Current) -> str:
    # Proposes only commands that find a version to let serve.
    left = list[str]()
    for name in filter(NAME.fullmatch, store.names(model_path(current.model))):
        with suppress(DamagedError):
            if store.find(version_path(current.model, name)) is not None:
                left.append(name)
    if not left:
        file = store.url_of(_current_path(current.model))
        return f"restore it from a copy; or move {file} away, and the next version is judged as a first one"
    hint = f"nightjar models promote {current.model} {left[-1]} --reason '...'"
    if current.previous in left:
        return f"nightjar rollback {current.model}, or {hint}"
    return hint


@dataclass(frozen=True)
class Training:
    """What a version was made from: the ``key`` of its training, its ``weights``, and its ``content``.

    ``weights`` names the checkpoints by key and step. That key does not cover the plan, since the same training may go
    on under another plan: on a machine that was measured again, or with other ranks, only its ``key`` differs.
    ``content`` is a checksum of tables and dense part: settings that change nothing here also make the same model.
    """

    key: str | None = None
    weights: str | None = None
    content: str | None = None

    @staticmethod
    def of(version: Artifact) -> Training:
        """Return the training that the manifest of ``version`` names."""
        summary = version.summary
        weights = []
        for path in (summary.get("checkpoint"), *summary.get("members", ())):
            if path:
                directory, _, step = path.rpartition("/")
                # A forced training has a numbered directory, <key>.2.
                key = directory.rpartition("/")[2].partition(".")[0]
                weights.append(f"{key}/{step}")
        checksums = {}
        for name, entry in version.files.items():
            if name == WEIGHTS or name.startswith("tables/"):
                checksums[name] = entry.checksum
        content = None
        if WEIGHTS in checksums:
            content = xxhash.xxh3_128_hexdigest(json.dumps(checksums, sort_keys=True).encode())
        return Training(key=version.inputs.get("train"), weights=",".join(weights) or None, content=content)

    def is_same(self, other: Training) -> bool:
        """Return whether both are the same training."""
        # None is unknown, and two unknown values prove nothing.
        pairs = ((self.key, other.key), (self.weights, other.weights), (self.content, other.content))
        return any(one is not None and one == another for one, another in pairs)


def withdrawal(
    store: Store,
    current: Current,
    version: str,
    training: Training,
    read: dict[str, Training | None] | None = None,
) -> Promotion | None:
    """Return what took ``version``, or another version of the same training, out of service.

    Args:
        store: The store of the versions.
        current: What serves, with the log of changes.
        version: The version that a stage wants to promote.
        training: What it was made from.
        read: The trainings of versions whose manifests were read, to which those read here are added.

    Returns:
        The latest rollback, or promotion of an earlier version by hand, that ended the service of one of them. None if
        there was none, or if somebody let one of them serve again since.
    """
    if read is None:
        read = {}
    logged = {}
    for entry in current.log:
        if entry.training:
            logged[entry.version] = Training(entry.training, entry.weights, entry.content)

    def is_same_training(other: str) -> bool:
        known = logged.get(other)
        # Entries that an earlier release logged lack some fields.
        if known is None or known.weights is None or known.content is None:
            if other not in read:
                artifact = None
                with suppress(DamagedError):
                    artifact = store.find(version_path(current.model, other))
                # A version that is gone or damaged tells nothing.
                read[other] = None if artifact is None else Training.of(artifact)
            known = read[other] or known
        return known is not None and known.is_same(training)

    for entry in reversed(current.log):
        if entry.version == version:
            return None
        # A stage neither takes a version back nor lets a withdrawn one serve again.
        if entry.by == "publish":
            continue
        former = entry.instead_of
        if former:
            goes_back = entry.by == "rollback" or number_of(entry.version) < number_of(former)
            if goes_back and (former == version or is_same_training(former)):
                return entry
        if is_same_training(entry.version):
            return None
    return None


def needed_to_go_back(store: Store, current: Current) -> set[str]:
    """Return the versions that rollbacks need: the serving one, and those before it down to another model.

    After nights that were forced, several versions in a row are of one training. A version that is gone or damaged is
    none to go back to.
    """
    needed: set[str] = set()
    serving: Training | None = None
    for entry in current.log:
        if entry.version == current.version and entry.training:
            serving = Training(entry.training, entry.weights, entry.content)
    for name in reversed(current.line):
        needed.add(name)
        artifact = None
        with suppress(DamagedError):
            artifact = store.find(version_path(current.model, name))
        if artifact is None:
            continue
        training = Training.of(artifact)
        if name == current.version:
            serving = training
        elif serving is None or not training.is_same(serving):
            break
    return needed


def withdrawal_text(undone: Promotion, version: str) -> str:
    """Say how the training of ``version`` was taken out of service: by ``undone``, of ``withdrawal``."""
    served = f"{undone.instead_of}, of the same training,"
    if undone.instead_of == version:
        served = "it"
    how = f"was replaced by {undone.version}"
    if undone.by == "rollback":
        how = "was rolled back"
    text = f"{served} served and {how} on {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(undone.at))}"
    if undone.reason:
        text += f" ({undone.reason})"
    return text


def promote(
    store: Store, model: str, version: str, *, by: str, reason: str = "", check: Callable[[], None] | None = None
) -> Current:
    """Make ``version`` the serving version, unless it serves already.

    Args:
        by: publish (its tables were just scored) or promote (they are read again).
        check: May raise to refuse, while nobody else can change what serves.

    Raises:
        ArtifactError: The version is incomplete.
        ConfigError: The gate held it, and there is no ``reason``.
        LaunchError: Other processes change what serves all the time.
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
            if whole.summary.get("verdict") == HOLD and not reason.strip():
                raise ConfigError(
                    f"the gate held {version} of model {model!r}; to publish it anyway, give a reason, which is "
                    "recorded",
                    hint=f"nightjar models promote {model} {version} --reason 'why it is right'",
                )
            try:
                entry = _entry(mine, current, by, whole, reason)
                return _swap(store, seen, current, (*current.line, version), entry)
            except SwappedError:
                # Another process promoted or rolled back: check everything again.
                continue
        raise _changed(store, model, f"{_TRIES} times")


def roll_back(store: Store, model: str, reason: str = "") -> Current:
    """Make the previous version serve again; a warning says so if it is of the same training as the one that served.

    Raises:
        ConfigError: There is no previous version.
        LaunchError: Another process changes what serves meanwhile: the previous version is then another.
        PassingError: It is unknown whether it serves.
    """
    mine = uuid.uuid4().hex
    with model_lock(store, model):
        seen, current = _read(store, model)
        if current.previous is None:
            known = "nothing was published"
            if current.version:
                known = f"{current.version} is the first serving version"
            raise ConfigError(
                f"model {model!r} has no previous version to roll back to: {known}",
                hint=f"nightjar models ls {model} shows the versions; nightjar models promote {model} <version> "
                "--reason '...' lets one of them serve",
            )
        previous = require_whole(store, model, current.previous, tables=False)
        entry = _entry(mine, current, "rollback", previous, reason)
        try:
            now = _swap(store, seen, current, current.line[:-1], entry)
        except SwappedError as other:
            now = _parsed(store, model, other.now)
            if not _wrote(now, mine):
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
        _warn_of_same_training(store, current, previous)
        return now


def _warn_of_same_training(store: Store, current: Current, previous: Artifact) -> None:
    # Whoever takes a bad model back should know that a run with force=true had published it twice.
    version, same = str(current.version), False
    # The rollback is done, whether or not the records of what served can be read.
    with suppress(NightjarError, OSError):
        served = store.find(version_path(current.model, version))
        same = served is not None and Training.of(served).is_same(Training.of(previous))
    if not same:
        return
    further = ""
    if len(current.line) > 2:
        further = f"; nightjar rollback {current.model} once more goes back to {current.line[-3]}"
    log.warning("%s is of the same training as %s, so it is the same model%s", current.previous, version, further)


def _entry(mine: str, current: Current, by: str, served: Artifact, reason: str) -> Promotion:
    training = Training.of(served)
    return Promotion(
        version=served.path.rpartition("/")[2],
        instead_of=current.version,
        by=by,
        reason=reason,
        at=time.time(),
        id=mine,
        training=training.key,
        weights=training.weights,
        content=training.content,
    )


def _wrote(current: Current, mine: str) -> bool:
    return any(entry.id == mine for entry in current.log)


def _changed(store: Store, model: str, when: str) -> LaunchError:
    now = read_current(store, model).version
    return LaunchError(
        f"another process changed which version of model {model!r} serves {when}: now {now or 'nothing'} serves",
        hint=f"nightjar models ls {model}; then run the same command if it is still right",
    )


def _swap(store: Store, seen: Seen, current: Current, line: tuple[str, ...], entry: Promotion) -> Current:
    after = Current(model=current.model, line=line, log=(*current.log, entry))
    data = (json.dumps(after.to_json(), indent=1) + "\n").encode()
    # This fails if another process has changed the file since it was read.
    swap(store, _current_path(current.model), seen, data)
    return after


def better_by_record(store: Store, model: str, incumbent: str, count: int) -> list[str]:
    """Return those of the last ``count`` versions up to ``incumbent`` that scored better than it, best first.

    Versions that were rolled back are left out.
    """
    # Each gate record holds the paired change of NE from the version before it, on rows that both scored. Sums of these
    # changes compare versions of different days fairly; the NE of each version on its own day would compare the days.
    served = set(read_current(store, model).line)
    levels = dict[str, float]()
    version, level, seen = incumbent, 0.0, 0
    while seen < count:
        if version in served or version == incumbent:
            levels[version] = level
            seen += 1
        try:
            record = read(GateRecord, store, f"{version_path(model, version)}/{GATE}")
        except UnreachableError:
            raise
        except ArtifactError:
            # The gate record is missing or damaged.
            break
        # If a version was forced through the gate, its loss was accepted.
        if record.incumbent_version is None or record.change is None or record.forced or record.verdict == HOLD:
            break
        level -= math.log1p(record.change.ne.point)
        version = record.incumbent_version
    better = [name for name in levels if levels[name] < 0]
    return sorted(better, key=lambda name: levels[name])
