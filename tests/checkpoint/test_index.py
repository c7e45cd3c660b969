"""Listing, chains and retention of checkpoints."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.checkpoint.index import (
    Entry,
    committed,
    entry_of,
    name_of,
    names_to_keep,
    newest_chain,
    restore_order,
)
from pipeline.checkpoint.retention import remove_uncommitted
from pipeline.core.errors import ArtifactError
from pipeline.store import MANIFEST, Store
from pipeline.store.removal import remove


def entry(step: int, *parents: int) -> Entry:
    kind = "difference" if parents else "baseline"
    return Entry(name_of(step), step, kind, tuple(name_of(p) for p in parents), 100 if not parents else 30, float(step))


ENTRIES = [entry(10), entry(20, 10), entry(30, 10), entry(40), entry(50, 40), entry(60, 40)]


def write(store: Store, step: int, *parents: int) -> None:
    names = [name_of(p) for p in parents]
    with store.draft(f"ck/{name_of(step)}", kind="checkpoint", key="k", config={}, inputs={}) as draft:
        draft.write_json("state.json", {"step": step})
        draft.commit({"step": step, "type": "difference" if parents else "baseline", "parents": names})


def test_the_newest_chain_begins_at_the_newest_baseline() -> None:
    chain = newest_chain(ENTRIES)
    assert chain is not None
    assert chain.names == (name_of(40), name_of(50), name_of(60))
    assert chain.shares == (0.3, 0.3)
    assert newest_chain([]) is None


def test_nothing_that_a_kept_checkpoint_needs_may_go() -> None:
    assert names_to_keep(ENTRIES, 1, None) == {name_of(60), name_of(40)}
    assert names_to_keep(ENTRIES, 1, None, pinned=[name_of(30)]) == {name_of(s) for s in (10, 30, 40, 60)}
    assert names_to_keep(ENTRIES[:3], 1, None) == {name_of(30), name_of(10)}


def test_one_in_every_so_many_steps_stays() -> None:
    assert names_to_keep(ENTRIES, 1, 25) == {name_of(s) for s in (30, 10, 60, 40, 50)}


def test_a_new_baseline_frees_the_old_chain() -> None:
    assert names_to_keep([*ENTRIES, entry(70)], 1, None) == {name_of(70)}


def test_only_committed_checkpoints_are_listed_and_parents_are_found(tmp_path) -> None:
    store = Store(str(tmp_path))
    write(store, 10)
    write(store, 20, 10)
    (tmp_path / "ck" / name_of(30)).mkdir()
    listed = committed(store, "ck")
    assert [entry_of(a).step for a in listed] == [10, 20]
    assert [a.summary["step"] for a in restore_order(store, listed[1])] == [10, 20]


def test_a_deleted_parent_is_named(tmp_path) -> None:
    store = Store(str(tmp_path))
    write(store, 10)
    write(store, 20, 10)
    remove(store, f"ck/{name_of(10)}")
    with pytest.raises(ArtifactError, match="depends on step-00000010, which is missing"):
        restore_order(store, committed(store, "ck")[0])
    assert not (tmp_path / "ck" / name_of(10)).exists()


class Listing(MemoryFileSystem):
    """A file system that answers from listings it has kept: what is new to them is not there until they are dropped."""

    protocol = "listing"
    store, pseudo_dirs = {}, [""]  # its own, not those of memory://
    unlisted: set[str] = set()

    def cat_file(self, path, *args, **more):
        if path in self.unlisted:
            raise FileNotFoundError(path)
        return super().cat_file(path, *args, **more)

    def invalidate_cache(self, path=None):
        self.unlisted.clear()


fsspec.register_implementation("listing", Listing, clobber=True)


def test_a_parent_that_an_old_listing_lacks_is_found_at_the_second_look() -> None:
    store = Store("listing://checkpoints")
    write(store, 10)
    write(store, 20, 10)
    last = committed(store, "ck")[-1]
    Listing.unlisted.add(store.full(f"ck/{name_of(10)}/{MANIFEST}"))
    assert store.find(f"ck/{name_of(10)}") is None
    assert [artifact.summary["step"] for artifact in restore_order(store, last)] == [10, 20]


def test_a_sweep_says_what_it_removes_and_leaves_what_is_rested_on_or_pinned(tmp_path) -> None:
    store = Store(str(tmp_path))
    for step, parents in ((10, ()), (20, (10,)), (30, ()), (40, ())):
        write(store, step, *parents)
    for step in (10, 30, 40):
        (tmp_path / "ck" / name_of(step) / "manifest.json").unlink()
    lines = remove_uncommitted(store, "ck", pinned=[name_of(30)])
    assert store.names("ck") == [name_of(10), name_of(20), name_of(30)]
    assert [line.split()[0] for line in lines] == [f"ck/{name_of(10)}", f"ck/{name_of(30)}", "removed"]
    assert name_of(40) in lines[2]
