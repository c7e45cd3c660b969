"""The publish stage on all ranks, which share tables, checks of bytes and scores; rank 0 gets the whole."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from pipeline.checkpoint.collectives import (
    Parcel,
    all_gather_parcels,
    gather_parcels,
    run_on_all_ranks,
    run_on_rank0,
    this_rank,
    world_size,
)
from pipeline.config import Config
from pipeline.publishing.served import ServedModel, fetch_version, local_version
from pipeline.publishing.table_writer import WrittenTable, write_table
from pipeline.records.gate import Importance
from pipeline.records.serving import TableLayout
from pipeline.serving.incumbent_features import NotComparableError, Translation, translation
from pipeline.serving.scorer import run_in_threads
from pipeline.serving.scores import DatasetScores, importance, score_dataset
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import FileEntry
from pipeline.training.distributed import connect

if TYPE_CHECKING:
    from pipeline.checkpoint.reader import ChainReader
    from pipeline.training.parquet import SplitReader


def join_ranks(config: Config) -> None:
    """Join the process group of the stage's ranks, which work on CPUs whatever they train on."""
    hardware = dataclasses.replace(config.hardware, device="cpu", embedding_hosts=0)
    connect(hardware, config.train.threads_per_rank, one_machine=config.launch.name == "local")


def names_for_this_rank(costs: Mapping[str, float]) -> list[str]:
    """Return the names for this rank: the most expensive first, each to the rank with the least so far."""
    loads, local = [0.0] * world_size(), list[str]()
    # Sort by cost and then by name, so that all ranks get the same division without communication.
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += costs[name]
        if rank == this_rank():
            local.append(name)
    return local


@contextlib.contextmanager
def turns(names: Sequence[str], what: str) -> Iterator[Iterator[str]]:
    """Yield an iterator over ``names``, each of which goes to one rank only: the next that no rank has begun.

    After an error on one rank, no rank gets any more.

    Args:
        what: Identifies this queue among others of the same ranks.
    """
    if world_size() == 1:
        yield iter(names)
        return
    counter = PrefixStore("nightjar/turns", dist.distributed_c10d._get_default_store())

    def next_names() -> Iterator[str]:
        while (turn := counter.add(what, 1)) <= len(names):
            yield names[turn - 1]

    try:
        yield next_names()
    except BaseException:
        counter.add(what, len(names))
        raise


@contextlib.contextmanager
def shared_draft(store: Store, path: str, **about: Any) -> Iterator[Draft]:
    """Begin a draft to which all ranks write files. Rank 0 holds it and may commit it.

    Args:
        about: Arguments for ``Store.draft``.

    Raises:
        LaunchError: On all ranks, if another process writes the same path.
    """
    with contextlib.ExitStack() as stack:
        drafts = [Draft(store, path, **about)]

        def begin() -> None:
            drafts[0] = stack.enter_context(store.draft(path, **about))

        run_on_rank0(f"beginning {path}", begin)
        yield drafts[0]


def write_tables(
    draft: Draft,
    readers: Sequence[ChainReader],
    tables: Sequence[str],
    coding: str,
    first: Callable[[], None] = lambda: None,
) -> dict[str, WrittenTable]:
    """Write ``tables``: each by the next free rank, several per rank at a time in its torch threads.

    Each thread holds a window of a table in memory.

    Args:
        draft: The draft, which knows the files of all ranks on rank 0 afterwards.
        readers: Readers of the checkpoints whose rows are concatenated.
        first: What rank 0 does before its tables, while the others begin.

    Returns:
        The result for each table, by name, in order.
    """

    def write(table: str) -> WrittenTable:
        # Each thread needs its own readers, since a reader holds the files that it reads.
        return write_table(draft, [reader.reopened() for reader in readers], table, coding)

    # Write the largest first, so that no rank is still busy with a large table when all others are done.
    dearest = sorted(tables, key=lambda name: -sum(each.tables[name].rows * each.tables[name].dim for each in readers))
    local = dict[str, WrittenTable]()

    def write_local() -> None:
        with turns(dearest, f"tables of {draft.path}") as names:
            if this_rank() == 0:
                first()
            begun, names = itertools.tee(names)
            local.update(zip(begun, run_in_threads(write, names), strict=True))

    # An error on one rank is raised once none writes any more.
    run_on_all_ranks("writing tables", write_local)
    # The arrays of a parcel have no names, so they go in the order of the tables that have one.
    files = {}
    for name, entry in draft.files.items():
        files[name] = [entry.bytes, entry.checksum]
    about, trained = {}, []
    for name, table in local.items():
        about[name] = [table.layout.to_json(), table.not_finite, table.trained is not None]
        if table.trained is not None:
            trained.append(table.trained)
    written = dict[str, WrittenTable]()
    for parcel in all_gather_parcels(Parcel([files, about], trained)):
        files_of_rank, tables_of_rank = parcel.record
        bits = iter(parcel.arrays)
        for name, entry in files_of_rank.items():
            draft.files[name] = FileEntry(*entry)
        for name, (layout, not_finite, known) in tables_of_rank.items():
            moved = next(bits) if known else None
            written[name] = WrittenTable(TableLayout.from_json(layout), not_finite, moved)
    return {name: written[name] for name in tables}


def require_sound(store: Store, path: str) -> None:
    """Read every byte of the version at ``path``, each file on one rank; ArtifactError names the first damage."""

    def read() -> None:
        artifact = store.get(path, "publish")
        sizes = {name: entry.bytes for name, entry in artifact.files.items()}
        for name in names_for_this_rank(sizes):
            store.verify(artifact, name)

    run_on_all_ranks(f"reading {path}", read)


@contextlib.contextmanager
def open_version(store: Store, path: str, memory: int, *, calibrate: bool = True) -> Iterator[ServedModel]:
    """Open the version at ``path``; the ranks of a host have ``memory`` bytes for its rows together."""
    # torchrun sets LOCAL_WORLD_SIZE.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Open it in a collective, so that an error on one rank is raised on all of them.
    with _version_folder(store, path) as folder:
        opened = list[ServedModel]()
        run_on_all_ranks(
            f"opening {path}", lambda: opened.append(ServedModel(folder, memory, calibrate=calibrate, ranks=ranks))
        )
        yield opened[0]


@contextlib.contextmanager
def _version_folder(store: Store, path: str) -> Iterator[Path]:
    # Yields a folder of this host with the files of a version; one rank of each host fetches them from an object store.
    if store.is_local or world_size() == 1:
        with local_version(store, path) as folder:
            yield folder
        return
    # torchrun numbers the hosts, and the ranks on each host.
    host, leads = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    with tempfile.TemporaryDirectory(prefix="nightjar-version-") as local:

        def fetch() -> list[str] | None:
            if not leads:
                return None
            fetch_version(store, path, local)
            return [host, local]

        folders = dict(filter(None, run_on_all_ranks(f"fetching {path}", fetch)))
        yield Path(folders[host])


def translated(store: Store, dataset: str, version: str, allow: Collection[str] = ()) -> Translation:
    """Return ``translation``; NotComparableError on all ranks if one of them finds a reason."""
    made = list[Translation]()

    def read() -> str | None:
        try:
            made.append(translation(store, dataset, version, allow))
        except NotComparableError as error:
            return str(error)
        return None

    for problem in run_on_all_ranks(f"reading how {version} reads rows", read):
        if problem:
            raise NotComparableError(problem)
    return made[0]


def score_on_ranks(
    split: SplitReader,
    models: Mapping[str, tuple[ServedModel, Translation | None]],
    trained: Mapping[str, Any],
    slices: list[str],
) -> DatasetScores | None:
    """Run ``score_dataset``, every row group on one rank; all scores in row order on rank 0, None elsewhere."""
    ranks, names = world_size(), [*models]
    local = score_dataset(split, models, trained, slices, split.groups[this_rank() :: ranks])
    arrays: list[Any] = []
    for name in names:
        arrays += local.logits[name]
    for name in slices:
        arrays += local.codes[name]
    parcels = gather_parcels(Parcel([local.lookups, local.served], arrays))
    if not parcels:
        return None
    scores = DatasetScores({name: [] for name in names}, {name: [] for name in slices})
    for group in range(len(split.groups)):
        # A parcel has the parts of its rank column by column, and for each column those of the rank's groups in order.
        rank, place = group % ranks, group // ranks
        count = len(range(rank, len(split.groups), ranks))
        parts = [[part] for part in parcels[rank].arrays[place::count]]
        logits = dict(zip(names, parts, strict=False))
        codes = dict(zip(slices, parts[len(names) :], strict=True))
        scores.add(DatasetScores(logits, codes))
    for parcel in parcels:
        scores.add(DatasetScores({}, {}, *parcel.record))
    return scores


def importance_on_ranks(
    split: SplitReader, model: ServedModel, groups: Mapping[str, Sequence[str]], rows: int, seed: int
) -> dict[str, Importance]:
    """Run ``importance``, every group on one rank; all of them in their order on rank 0, empty elsewhere."""
    local_groups = dict([*groups.items()][this_rank() :: world_size()])
    local = importance(split, model, local_groups, rows, seed)
    gathered = dict[str, Importance]()
    for parcel in gather_parcels(Parcel({name: each.to_json() for name, each in local.items()})):
        for name, each in parcel.record.items():
            gathered[name] = Importance.from_json(each)
    return {name: gathered[name] for name in groups if name in gathered}
