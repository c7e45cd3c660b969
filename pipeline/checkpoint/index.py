"""The checkpoints of one training run: which are committed, what each rests on, when the next one is a baseline."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.errors import DamagedError
from pipeline.records.record import Record
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact

INDEX, STATE, DENSE = "index.json", "state.json", "dense.safetensors"  # its files, the rows apart
NAME = re.compile(r"step-(\d{8,})")
BASELINE = "baseline"
DELTA = "difference"  # as manifests have recorded it from the first release on


def name_of(step: int) -> str:
    """Name of the checkpoint taken after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(path: str) -> int:
    """The step that a checkpoint's name, or path, is of."""
    return int(path.rpartition("step-")[2])


def in_store(store: Store) -> str:
    """The flag of ``nightjar ckpt`` that names ``store``, as it is typed."""
    return f"--store {shlex.quote(store.url)}"


def damage_hint(store: Store, name: str) -> str:
    """The command that names all damage of checkpoint ``name`` (as ``nightjar ckpt`` takes it), as it is typed."""
    where = in_store(store)
    return f"nightjar ckpt verify {name} {where} lists all damage; nightjar ckpt ls {where} lists the checkpoints"


@dataclass(frozen=True)
class Entry(Record):
    """What listing and retention need of a checkpoint. ``bytes``: of its own files, ``created``: Unix seconds.

    ``rested``: what a baseline that was compacted from a chain rested on before: a training that goes on may still
    write deltas on top of those.
    """

    name: str
    step: int
    type: str
    parents: tuple[str, ...]
    bytes: int
    created: float
    rested: tuple[str, ...] = ()


def entry_of(artifact: Artifact) -> Entry:
    """The entry of a committed checkpoint."""
    summary = artifact.summary
    size = sum(file.bytes for file in artifact.files.values())
    name = artifact.path.rsplit("/", 1)[-1]
    parents, rested = tuple(summary["parents"]), tuple(summary.get("compacted", ()))
    return Entry(name, summary["step"], summary["type"], parents, size, artifact.created, rested)


def committed(store: Store, directory: str, damaged: dict[str, str] | None = None) -> list[Artifact]:
    """All committed checkpoints of ``directory``, oldest step first.

    One whose manifest is damaged is left out and added to ``damaged``: {path: what is wrong with its manifest}.
    """
    paths = [f"{directory}/{name}" for name in store.names(directory) if NAME.fullmatch(name)]
    return sorted(readable(store, paths, damaged), key=lambda artifact: artifact.summary["step"])


def readable(store: Store, paths: Iterable[str], damaged: dict[str, str] | None = None) -> list[Artifact]:
    """Those of ``paths`` that are committed; ``damaged`` as in ``committed``."""
    artifacts = []
    for path in paths:
        try:
            artifact = store.find(path)
            if artifact is not None:
                _check_summary(store, artifact)
        except DamagedError as error:
            if damaged is not None:
                damaged[path] = error.message.removeprefix(f"{store.url_of(path)}/{MANIFEST} ")
            continue
        if artifact is not None:
            artifacts.append(artifact)
    return artifacts


def _check_summary(store: Store, artifact: Artifact) -> None:
    """DamagedError for a sealed manifest whose summary is not a checkpoint's: parents are earlier ones beside it."""
    summary, name = artifact.summary, artifact.path.rpartition("/")[2]
    step, parents = summary.get("step"), summary.get("parents")
    sound = (
        isinstance(step, int)
        and name == name_of(step)
        and summary.get("type") in (BASELINE, DELTA)
        and isinstance(parents, list)
        and all(isinstance(p, str) and NAME.fullmatch(p) and step_of(p) < step for p in parents)
    )
    if not sound:
        message = f"step {step!r}, type {summary.get('type')!r}, parents {parents!r}"
        raise DamagedError(f"{store.url_of(artifact.path)}/{MANIFEST} is not that of a checkpoint {name}: {message}")


def restore_order(store: Store, artifact: Artifact) -> list[Artifact]:
    """``artifact`` and what it rests on, in the order in which they are applied (baseline first).

    Raises DamagedError naming a parent that is damaged or not there any more.
    """
    directory = artifact.path.rsplit("/", 1)[0]
    order: list[Artifact] = []
    for name in reversed(artifact.summary["parents"]):
        damaged: dict[str, str] = {}
        path = f"{directory}/{name}"
        parent = next(iter(readable(store, [path], damaged)), None)
        if parent is None and not damaged:  # a second look: if it is gone, what rests on it is lost
            store.fs.invalidate_cache(store.full(path))
            parent = next(iter(readable(store, [path], damaged)), None)
        if parent is None:
            wrong = [f"whose {MANIFEST} {problem}" for problem in damaged.values()] or ["which is missing"]
            raise DamagedError(
                f"checkpoint {artifact.path} depends on {name}, {wrong[0]}",
                hint=damage_hint(store, artifact.path),
                file=f"{path}/{MANIFEST}",
            )
        order.insert(0, parent)
        if parent.summary["type"] == BASELINE:  # compacted since: it holds all that lies before it
            break
    return [*order, artifact]


def newest_chain(entries: list[Entry]) -> CheckpointChain | None:
    """The chain that the next delta would extend: from the newest baseline on; None where there is none.

    ``entries``: oldest step first.
    """
    starts = [i for i, entry in enumerate(entries) if entry.type == BASELINE]
    if not starts:
        return None
    base, *rest = entries[starts[-1] :]
    shares = tuple(entry.bytes / max(1, base.bytes) for entry in rest)
    return CheckpointChain((base.name, *(entry.name for entry in rest)), shares)


def kept(entries: list[Entry], keep_last: int, keep_every: int | None, pinned: Iterable[str] = ()) -> set[str]:
    """Names that stay: the newest ``keep_last``, one every ``keep_every`` steps, ``pinned`` ones, all their parents.

    ``pinned``: names that something outside (a published model) refers to.
    """
    wanted = {entry.name for entry in entries[-keep_last:]} | set(pinned)
    if keep_every:
        slots: dict[int, str] = {}
        for entry in entries:
            slots.setdefault(entry.step // keep_every, entry.name)
        wanted |= {name for slot, name in slots.items() if slot > 0}
    # The next delta will rest on the newest baseline, whatever else is kept.
    chain = newest_chain(entries)
    growing = set(chain.paths[:1]) if chain else set()
    growing |= set(entries[-1].rested) if entries else set()
    by_name = {entry.name: entry for entry in entries}
    parents = {name for each in wanted | growing if each in by_name for name in needed(by_name[each], by_name)}
    return (wanted | parents | growing) & set(by_name)


def needed(entry: Entry, entries: Mapping[str, Entry]) -> set[str]:
    """Names of what ``entry`` rests on: its parents from the last baseline among them on."""
    names: set[str] = set()
    for parent in reversed(entry.parents):
        names.add(parent)
        if parent in entries and entries[parent].type == BASELINE:
            break
    return names


def rested_on(artifacts: Iterable[Artifact]) -> dict[str, str]:
    """What checkpoints name as their parents, with or without a manifest: {name: path of one that rests on it}."""
    return {parent: each.path for each in artifacts for parent in each.summary["parents"]}


@dataclass(frozen=True)
class CheckpointChain:
    """The checkpoints since the newest baseline: its path and those of the deltas after it, oldest first.

    ``shares``: bytes of each delta as a share of the baseline's.
    """

    paths: tuple[str, ...]
    shares: tuple[float, ...] = ()


def wants_baseline(policy: str, chain: CheckpointChain | None, longest: int) -> bool:
    """Whether the next checkpoint is a baseline (Check-N-Run, NSDI'22, section 4.1), by the ``policy``.

    Sizes are shares of a full checkpoint. *one_shot*: each delta holds all rows changed since the baseline.
    *consecutive*: each holds the rows changed since the checkpoint before it, and needs all of them to be restored.
    *intermittent*: one-shot deltas, and a new baseline as soon as that is predicted to write less. *full*: baselines
    only. ``longest``: deltas a chain may hold.
    """
    if chain is None or policy == "full" or len(chain.paths) > longest:
        return True
    return policy == "intermittent" and rebase_pays(chain.shares)


def rebase_pays(shares: tuple[float, ...]) -> bool:
    """The paper's rule: with deltas S_1..S_i written, rebase when 1 + S_1 + ... + S_i <= (i + 1) * S_i.

    The left side is what the last i + 1 checkpoints cost on average times i + 1 if the chain began anew; the right
    side is what going on costs, because a one-shot delta never shrinks.
    """
    return bool(shares) and 1.0 + sum(shares) <= (len(shares) + 1) * shares[-1]


def parents(policy: str, chain: CheckpointChain) -> tuple[str, ...]:
    """What a delta after ``chain`` is restored on top of: the whole chain if consecutive, else the baseline."""
    return chain.paths if policy == "consecutive" else chain.paths[:1]
