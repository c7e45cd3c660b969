"""What is removed: checkpoints outside retention, remains of killed writers. What is named stays.

A manifest that names a checkpoint's path anywhere under its inputs or summary pins it: those of published models, and
those of finished trainings (their ``final``). ``nightjar ckpt gc`` calls ``collect`` and ``sweep``; a training calls
``remove_uncommitted`` before it starts and ``Pruner`` behind each checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.checkpoint import quarantine
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint
from pipeline.checkpoint.index import NAME, Entry, committed, entry_of, kept, needed, rested_on, step_of
from pipeline.checkpoint.reference import directories, run_of
from pipeline.errors import ArtifactError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact
from pipeline.store.references import pins
from pipeline.store.removal import Removal, age, remove, store_time, written

HELD = "held"  # in a checkpoint's summary: the name of another one that its training may need, or a list of names
WHOLE, ASIDE, REMAINS = "checkpoint", "set aside", "remains"  # kinds of removals


def pinned_names(store: Store, directory: str) -> list[str]:
    """Names of the checkpoints of ``directory`` that are pinned."""
    named = pins(store, run_of(directory))
    return sorted(path.rpartition("/")[2] for path in named if path.rpartition("/")[0] == directory)


def collect(
    store: Store,
    run: str | None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    min_age_seconds: float = 3600.0,
) -> tuple[list[Removal], list[Removal]]:
    """What ``gc`` would remove, and what it keeps with the reason, in all runs or one.

    ``keep_last``/``keep_every``: instead of what the run was configured with. Remains younger than
    ``min_age_seconds`` may be a checkpoint in the making and stay.
    """
    named, now = pins(store), store_time(store)
    going: list[Removal] = []
    staying: list[Removal] = []
    for directory in directories(store, run):
        damaged: dict[str, str] = {}
        artifacts = committed(store, directory, damaged)
        staying += [_kept(path, f"its {MANIFEST} is damaged") for path in damaged]
        stay = _stay(artifacts, directory, named, keep_last, keep_every)
        for artifact in artifacts:
            if artifact.path in stay:
                staying.append(_kept(artifact.path, stay[artifact.path]))
            else:
                size = sum(entry.bytes for entry in artifact.files.values())
                going.append(Removal(path=artifact.path, bytes=size, reason="outside retention", kind=WHOLE))
        for one in quarantine.listed(store, directory):
            removal, reason = _aside(store, one, named, now - min_age_seconds)
            staying += [_kept(one.path, reason)] if reason else []
            going += [] if reason else [removal]
        needs = {f"{directory}/{name}": f"{by} depends on it" for name, by in rested_on(artifacts).items()}
        needs |= {path: f"named by {by}" for path, by in named.items()}
        for each in _remains(store, directory, artifacts, {each.path for each in going}, now, min_age_seconds):
            if each.path in needs:
                staying.append(_kept(each.path, f"{needs[each.path]}, though its manifest is gone"))
            else:
                going.append(each)
    return going, staying


def _kept(path: str, reason: str) -> Removal:
    return Removal(path=path, bytes=None, reason=reason)


def clear(store: Store, directory: str, pinned: Mapping[str, str]) -> list[str]:
    """Remove the checkpoints of ``directory``, each manifest before its files; names of those that stay.

    What ``pinned`` ({path: what names it}) holds stays, with all it rests on, and what was set aside. ArtifactError
    where the store refuses it.
    """
    names = [name for name in store.names(directory) if NAME.fullmatch(name)]
    entries = {entry.name: entry for entry in map(entry_of, committed(store, directory))}
    named = {name for name in names if f"{directory}/{name}" in pinned}
    stay = named | {below for name in named & set(entries) for below in needed(entries[name], entries)}
    for odd in named - set(entries):  # what it rests on is not known
        stay |= {name for name in names if step_of(name) < step_of(odd)}
    theirs = quarantine.in_place(store, directory)
    for name in sorted(set(names) - stay - theirs, key=step_of, reverse=True):
        remove(store, f"{directory}/{name}")
    if not store.names(directory) and store.exists(directory):
        remove(store, directory)
    return sorted(stay & set(names))


def _aside(store: Store, each: quarantine.SetAside, named: dict[str, str], young: float) -> tuple[Removal, str]:
    """The removal of a checkpoint that a training set aside, and why it stays ("": it goes).

    What something names stays until a whole checkpoint lies in its place again. So does what was set aside after
    ``young``, by the clock of the store.
    """
    removal = Removal(path=each.path, bytes=quarantine.size(store, each), reason=f"{ASIDE}: {each.why}", kind=ASIDE)
    if each.former in named and not store.exists(f"{each.former}/{MANIFEST}"):
        return removal, f"{ASIDE}, but {named[each.former]} names {each.former}"
    if each.created is None:
        return removal, ""
    since = each.created if store.is_local else written(store, store.full(f"{each.path}/{quarantine.RECORD}"))
    return removal, f"{ASIDE} only now" if since > young else ""


def _stay(
    artifacts: list[Artifact], directory: str, named: dict[str, str], keep_last: int | None, keep_every: int | None
) -> dict[str, str]:
    """Paths that stay, with the reason. The newest checkpoint's own configuration says how many."""
    if not artifacts:
        return {}
    settings = artifacts[-1].config.get("checkpoint", {})
    last = keep_last if keep_last is not None else int(settings.get("keep_last", 2))
    every = keep_every if keep_every is not None else settings.get("keep_every")
    entries = [entry_of(artifact) for artifact in artifacts]
    pinned = {path.rpartition("/")[2] for path in named if path.startswith(f"{directory}/")}
    if artifacts[-1].path not in named:  # a finished training names its own
        held = artifacts[-1].summary.get(HELD, [])
        pinned |= {held} if isinstance(held, str) else set(held)
    stay = {
        f"{directory}/{name}": "a kept one depends on it, or keep_every" for name in kept(entries, last, every, pinned)
    }
    stay |= {f"{directory}/{entry.name}": f"one of the newest {last}" for entry in entries[-last:]}
    return {path: f"named by {named[path]}" if path in named else reason for path, reason in stay.items()}


def _remains(
    store: Store, directory: str, artifacts: list[Artifact], going: set[str], now: float, min_age: float
) -> list[Removal]:
    """Directories without a manifest, and files that their checkpoint's manifest does not name."""
    remains = []
    known = {each.path: each for each in artifacts}
    theirs = quarantine.in_place(store, directory)
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if path in going or not name.startswith("step-") or name in theirs:
            continue
        files = {full: store.fs.info(full) for full in store.fs.find(store.full(path))}
        if path in known:
            named = {store.full(f"{path}/{file}") for file in (*known[path].files, MANIFEST)}
            extra = {full: info for full, info in files.items() if full not in named}
            if extra and min(age(store, full, now) for full in extra) >= min_age:
                reason = "not in the manifest: left by a killed compaction"
                remains += [_remain(full[len(store.root) + 1 :], info["size"], reason) for full, info in extra.items()]
        elif store.exists(f"{path}/{MANIFEST}"):
            continue  # it does not parse: it stays, and ``collect`` says so
        elif min((age(store, full, now) for full in files), default=min_age) >= min_age:
            remains.append(_remain(path, sum(info["size"] for info in files.values()), "never committed"))
    return remains


def _remain(path: str, size: int, reason: str) -> Removal:
    return Removal(path=path, bytes=size, reason=reason, kind=REMAINS)


def sweep(store: Store, going: list[Removal]) -> None:
    """Remove what ``collect`` found, checkpoints that rest on others first. ArtifactError where the store refuses."""
    whole = [each.path for each in going if each.kind == WHOLE]
    for path in sorted(whole, key=step_of, reverse=True):
        if store.exists(f"{path}/{MANIFEST}"):
            remove(store, path)
    for each in going:
        if each.kind == ASIDE:
            for one in quarantine.listed(store, each.path.rsplit("/", 2)[0]):
                if one.path == each.path:
                    quarantine.remove(store, one)
        elif each.kind == REMAINS:
            remove(store, each.path)


def remove_uncommitted(
    store: Store, directory: str, pinned: Iterable[str] = (), aside: Container[str] = ()
) -> list[str]:
    """Remove what writers and pruners that were killed left, checkpoints without a manifest; says in lines what.

    One that a committed checkpoint rests on or that is ``pinned`` (names) stays: it lost its manifest. What was set
    ``aside`` (names) stays without a word.
    """
    stay = set(pinned) | set(rested_on(committed(store, directory)))
    lines = []
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if not name.startswith("step-") or name in aside or store.exists(f"{path}/{MANIFEST}"):
            continue
        if name in stay:
            lines.append(f"{path} has no manifest, but something depends on it, so it is kept")
        else:
            remove(store, path)
            lines.append(f"removed {path}, which has no manifest: it was never committed")
    return lines


@dataclass
class Pruner:
    """Called on rank 0, in the writer's thread, once for each checkpoint that is committed.

    ``keep_last``, ``keep_every`` as in the configuration. What something outside names is read once a call.
    """

    store: Store
    directory: str
    keep_last: int
    keep_every: int | None
    on_point: OnPoint
    _late: list[Entry] = field(default_factory=list)  # should be gone, but the store refused it

    def prune(self, before: list[Entry], held: Collection[str], newest: Entry) -> tuple[list[str], str]:
        """Remove what is not needed of those ``before`` (oldest step first), now that ``newest`` is committed.

        ``held``: names that the training itself needs. Returns names that stay, and what went wrong ("").
        """
        entries = [*before, newest]
        names = [entry.name for entry in entries]
        if not self._late and len(kept(entries, self.keep_last, self.keep_every)) == len(entries):
            return names, ""
        try:
            pins = [*pinned_names(self.store, self.directory), *held]
        except ArtifactError as error:
            why = "a manifest that may name them cannot be read"
            return names, f"old checkpoints are kept, because {why}: {error.message}"
        stay = kept(entries, self.keep_last, self.keep_every, pins)
        self._late += [entry for entry in entries if entry.name not in stay]
        going = [entry for entry in self._late if entry.name not in pins]
        try:
            for entry in sorted(going, key=lambda entry: -entry.step):  # the ones that rest on others first
                remove(self.store, f"{self.directory}/{entry.name}", lambda: self.on_point(FaultPoint.PRUNE))
            self._late = []
        except ArtifactError as error:
            message = f"old checkpoints are kept until the next one: {error.message}"
            return [name for name in names if name in stay], message
        return [name for name in names if name in stay], ""
