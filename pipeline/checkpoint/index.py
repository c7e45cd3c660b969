"""The checkpoints of one training run: which are committed, what each rests on, when the next one is a baseline.

A delta *rests on* its *parents*, the checkpoints that are applied before it. What rests on a checkpoint are its
*dependents*.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.core.errors import DamagedError
from pipeline.records.record import Record
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact

# The files of a checkpoint besides those with rows.
INDEX, STATE, DENSE = "index.json", "state.json", "dense.safetensors"
NAME = re.compile(r"step-(\d{8,})")
BASELINE = "baseline"
# Manifests have recorded this word for a delta since the first release.
DELTA = "difference"


def name_of(step: int) -> str:
    """Return the name of the checkpoint taken after ``step`` steps."""
    return f"step-{step:08d}"


def step_of(path: str) -> int:
    """Return the step of a checkpoint from its name or path."""
    return int(path.rpartition("step-")[2])


def in_store(store: Store) -> str:
    """Return the flag of ``nightjar ckpt`` that names ``store``, as it is typed."""
    return f"--store {shlex.quote(store.url)}"


def damage_hint(store: Store, name: str) -> str:
    """Return the command that names all damage of checkpoint ``name`` (as ``nightjar ckpt`` takes it), as typed."""
    where = in_store(store)
    return f"nightjar ckpt verify {name} {where} lists all damage; nightjar ckpt ls {where} lists the checkpoints"


@dataclass(frozen=True)
class Entry(Record):
    """What listing and retention need of a checkpoint. ``bytes``: the size of its files; ``created``: Unix seconds.

    ``rested`` is what a baseline compacted from a chain rested on before: a training that continues may still write
    deltas on top of those.
    """

    name: str
    step: int
    type: str
    parents: tuple[str, ...]
    bytes: int
    created: float
    rested: tuple[str, ...] = ()


def entry_of(artifact: Artifact) -> Entry:
    """Return the entry of a committed checkpoint."""
    summary = artifact.summary
    return Entry(
        name=artifact.name,
        step=summary["step"],
        type=summary["type"],
        parents=tuple(summary["parents"]),
        bytes=artifact.total_bytes,
        created=artifact.created,
        rested=tuple(summary.get("compacted", ())),
    )


def committed(store: Store, directory: str, damaged: dict[str, str] | None = None) -> list[Artifact]:
    """Find all committed checkpoints of ``directory``, oldest step first.

    Args:
        damaged: Filled with those that are left out because their manifest is damaged: {path: what is wrong with it}.
    """
    paths = [f"{directory}/{name}" for name in store.names(directory) if NAME.fullmatch(name)]
    # Sort by number, because as text a step of nine digits would sort before steps of eight.
    return sorted(readable(store, paths, damaged), key=lambda artifact: artifact.summary["step"])


def readable(store: Store, paths: Iterable[str], damaged: dict[str, str] | None = None) -> list[Artifact]:
    """Find the committed checkpoints among ``paths``; ``damaged`` as in ``committed``."""
    artifacts = []
    for path in paths:
        try:
            artifact = store.find(path)
            if artifact is not None:
                _check_summary(store, artifact)
                artifacts.append(artifact)
        except DamagedError as error:
            # The prefix is removed because callers print the path themselves.
            if damaged is not None:
                damaged[path] = error.message.removeprefix(f"{store.url_of(path)}/{MANIFEST} ")
    return artifacts


def _check_summary(store: Store, artifact: Artifact) -> None:
    # The manifest's checksum is right, but another program may have written it. Parents must be earlier checkpoints
    # beside it.
    summary, name = artifact.summary, artifact.name
    step, kind, parents = summary.get("step"), summary.get("type"), summary.get("parents")
    sound = (
        isinstance(step, int)
        and name == name_of(step)
        and kind in (BASELINE, DELTA)
        and isinstance(parents, list)
        # A parent is an earlier checkpoint, so chains have no cycles.
        and all(isinstance(p, str) and NAME.fullmatch(p) and step_of(p) < step for p in parents)
    )
    if not sound:
        message = f"step {step!r}, type {kind!r}, parents {parents!r}"
        raise DamagedError(f"{store.url_of(artifact.path)}/{MANIFEST} is not that of a checkpoint {name}: {message}")


def restore_order(store: Store, artifact: Artifact) -> list[Artifact]:
    """Return ``artifact`` and what it rests on, in the order in which they are applied (baseline first).

    Raises:
        DamagedError: A parent, which it names, is damaged or missing.
    """
    directory = artifact.path.rsplit("/", 1)[0]
    order: list[Artifact] = []
    for name in reversed(artifact.summary["parents"]):
        path = f"{directory}/{name}"
        damaged: dict[str, str] = {}
        found = readable(store, [path], damaged)
        if not found and not damaged:
            # If it is gone, the checkpoints that rest on it are lost, so look a second time, past the cache.
            store.fs.invalidate_cache(store.full(path))
            found = readable(store, [path], damaged)
        if not found:
            problem = "which is missing"
            if damaged:
                problem = f"whose {MANIFEST} {damaged[path]}"
            raise DamagedError(
                f"checkpoint {artifact.path} depends on {name}, {problem}",
                hint=damage_hint(store, artifact.path),
                file=f"{path}/{MANIFEST}",
            )
        order.insert(0, found[0])
        # It was compacted since, so it holds everything that lies before it.
        if found[0].summary["type"] == BASELINE:
            break
    return [*order, artifact]


@dataclass(frozen=True)
class CheckpointChain:
    """The checkpoints since the newest baseline: its name and those of the deltas after it, oldest first.

    ``shares`` has the size of each delta as a share of the baseline's.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...] = ()


def newest_chain(entries: list[Entry]) -> CheckpointChain | None:
    """Return the chain that the next delta would extend, from the newest baseline on; None if there is none.

    ``entries`` are in order, oldest step first.
    """
    starts = [place for place, entry in enumerate(entries) if entry.type == BASELINE]
    if not starts:
        return None
    baseline, *deltas = entries[starts[-1] :]
    size = max(1, baseline.bytes)
    names = (baseline.name, *(delta.name for delta in deltas))
    return CheckpointChain(names, shares=tuple(delta.bytes / size for delta in deltas))


def wants_baseline(policy: str, chain: CheckpointChain | None, longest: int) -> bool:
    """Whether the next checkpoint is a baseline (Check-N-Run, NSDI'22, section 4.1), by the ``policy``.

    Sizes are shares of a full checkpoint. *one_shot*: each delta holds all rows changed since the baseline.
    *consecutive*: each holds the rows changed since the checkpoint before it, and needs all of them to be restored.
    *intermittent*: one-shot deltas, and a new baseline as soon as that is predicted to write less. *full*: baselines
    only. ``longest``: deltas a chain may hold.
    """
    if chain is None or policy == "full" or len(chain.names) > longest:
        return True
    return policy == "intermittent" and rebase_pays(chain.shares)


def rebase_pays(shares: tuple[float, ...]) -> bool:
    """Whether a new baseline pays after deltas S_1..S_i (``shares``): if 1 + S_1 + ... + S_i <= (i + 1) * S_i."""
    # This is the paper's rule. The left side is what the last i + 1 checkpoints cost on average times i + 1 if the
    # chain began anew; the right side is what continuing the chain costs, because a one-shot delta never shrinks.
    return bool(shares) and 1.0 + sum(shares) <= (len(shares) + 1) * shares[-1]


def parents(policy: str, chain: CheckpointChain) -> tuple[str, ...]:
    """Return what a delta after ``chain`` is restored on top of: the whole chain if consecutive, else the baseline."""
    if policy == "consecutive":
        return chain.names
    # A one-shot delta holds everything that changed since the baseline, including the rows of earlier deltas.
    return chain.names[:1]


def names_to_keep(entries: list[Entry], keep_last: int, keep_every: int | None, pinned: Iterable[str] = ()) -> set[str]:
    """Select the names that stay: the newest ``keep_last``, one every ``keep_every`` steps, ``pinned``, their parents.

    ``pinned`` has the names that something outside, such as a published model, refers to.
    """
    keep = {entry.name for entry in entries[-keep_last:]} | set(pinned)
    if keep_every:
        slots: dict[int, str] = {}
        for entry in entries:
            slots.setdefault(entry.step // keep_every, entry.name)
        # The first slot begins with step 0, which has no checkpoint.
        slots.pop(0, None)
        keep |= set(slots.values())
    # The next delta will rest on the newest baseline, so it stays whatever else is kept.
    chain = newest_chain(entries)
    if chain is not None:
        keep.add(chain.names[0])
    if entries:
        keep |= set(entries[-1].rested)
    by_name = {entry.name: entry for entry in entries}
    for name in list(keep):
        if name in by_name:
            keep |= required_parents(by_name[name], by_name)
    return keep & set(by_name)


def required_parents(entry: Entry, entries: Mapping[str, Entry]) -> set[str]:
    """Return the names that ``entry`` rests on: its parents from the last baseline among them on."""
    names: set[str] = set()
    for parent in reversed(entry.parents):
        names.add(parent)
        if parent in entries and entries[parent].type == BASELINE:
            break
    return names


def dependents(artifacts: Iterable[Artifact]) -> dict[str, str]:
    """Map the parents that checkpoints name, with or without a manifest, to the path of one that rests on it."""
    found: dict[str, str] = {}
    for artifact in artifacts:
        for parent in artifact.summary["parents"]:
            found[parent] = artifact.path
    return found
