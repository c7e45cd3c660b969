"""Compaction keeps every bit, in every coding, and a kill at any point leaves a checkpoint that restores."""

import pytest

from pipeline.checkpoint.compact import compact
from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.index import committed, entry_of, names_to_keep
from pipeline.checkpoint.reader import ChainReader
from pipeline.checkpoint.retention import collect, sweep
from pipeline.core.errors import ArtifactError
from pipeline.store import Store
from tests.checkpoint.built import CODINGS, DIM, DIRECTORY, FP32, new_store, put, restored, same


@pytest.mark.parametrize("name", CODINGS)
def test_a_compacted_chain_restores_the_same_bits_in_its_own_coding(tmp_path, name):
    store, coding = new_store(tmp_path), CODINGS[name]
    put(store, 1, coding=coding)
    put(store, 2, [1], 0.2, coding)
    last = put(store, 3, [1, 2], 0.3, FP32)
    before = restored(store, last)
    done = compact(store, last)
    assert (done.summary["type"], done.summary["parents"]) == ("baseline", [])
    assert done.summary["codings"] == sorted({*name.split("+"), "fp32"})
    assert store.get(last.path, "train") == done
    same(before, restored(store, done))
    on_disk = {path.name for path in (tmp_path / "store" / last.path).iterdir()}
    index = done.summary["index"]
    folder = index.removeprefix("index-").removesuffix(".json")
    assert on_disk == {"manifest.json", index, folder, "dense.safetensors", "state.json"}
    store.verify(done)
    assert compact(store, done) is done


@pytest.mark.parametrize("cuts", [(0, DIM), (0, 6, DIM), (0, 3, 6, 9, DIM)])
def test_a_chain_that_changed_its_column_shards_restores_the_same_bits(tmp_path, cuts):
    store = new_store(tmp_path)
    put(store, 1, cuts=(0, 6, DIM), coding=CODINGS["q4"])
    put(store, 2, [1], 0.4, cuts=(0, DIM), coding=CODINGS["q8"])
    last = put(store, 3, [1, 2], 0.4, cuts=(0, 3, 6, 9, DIM))
    before = restored(store, last, cuts)
    same(before, restored(store, compact(store, last), cuts))


def test_what_rests_on_a_compacted_one_still_restores_without_what_lay_before(tmp_path):
    store = new_store(tmp_path)
    put(store, 1)
    middle = put(store, 2, [1], 0.3)
    last = put(store, 3, [1, 2], 0.3)
    before = restored(store, last)
    compact(store, middle)
    same(before, restored(store, last))
    entries = [entry_of(each) for each in committed(store, DIRECTORY)]
    assert names_to_keep(entries, 1, None) == {"step-00000002", "step-00000003"}
    sweep(store, collect(store, None, keep_last=1, min_age_seconds=0)[0])
    assert store.names(DIRECTORY) == ["step-00000002", "step-00000003"]
    same(before, restored(store, last))


def test_a_training_that_goes_on_may_still_rest_on_the_former_baseline(tmp_path):
    store = new_store(tmp_path)
    put(store, 1)
    compact(store, put(store, 2, [1], 0.3))
    entries = [entry_of(each) for each in committed(store, DIRECTORY)]
    assert names_to_keep(entries, 1, None) == {"step-00000001", "step-00000002"}


class Killed(BaseException):
    pass


def killer(point, after):
    count = [0]

    def on_point(name):
        count[0] += name == point
        if name == point and count[0] > after:
            raise Killed

    return on_point


@pytest.mark.parametrize(
    ("point", "after", "kind"),
    [
        (FaultPoint.COMPACT, 0, "difference"),
        (FaultPoint.COMPACT, 5, "difference"),
        (FaultPoint.BEFORE_SWAP, 0, "difference"),
        (FaultPoint.AFTER_SWAP, 0, "baseline"),
    ],
)
def test_a_killed_compaction_leaves_a_whole_checkpoint_and_gc_clears_up(tmp_path, point, after, kind):
    store = new_store(tmp_path)
    put(store, 1)
    last = put(store, 2, [1], 0.3)
    before = restored(store, last)
    with pytest.raises(Killed):
        compact(store, last, killer(point, after))
    found = store.get(last.path, "train")
    assert found.summary["type"] == kind
    same(before, restored(store, found))
    going, _ = collect(store, None, keep_last=5, min_age_seconds=0)
    assert going
    assert {each.reason for each in going} == {"not in the manifest: left by a killed compaction"}
    assert collect(store, None, keep_last=5)[0] == []  # young remains may be a compaction under way
    sweep(store, going)
    same(before, restored(store, found))
    same(before, restored(store, compact(store, found)))


def test_a_checkpoint_removed_while_it_is_compacted_stays_removed(tmp_path):
    store = new_store(tmp_path)
    put(store, 1)
    last = put(store, 2, [1], 0.3)

    def prune(point):
        if point == FaultPoint.BEFORE_SWAP:
            store.fs.rm(store.full(last.path), recursive=True)

    with pytest.raises(ArtifactError, match="was removed or replaced while it was compacted"):
        compact(store, last, prune)
    assert store.find(last.path) is None


def test_two_compactions_at_once_lose_nothing(tmp_path):
    store = new_store(tmp_path)
    put(store, 1)
    last = put(store, 2, [1], 0.3)
    before = restored(store, last)

    def begin_another(point):
        if point == FaultPoint.BEFORE_SWAP:
            with pytest.raises(Killed):
                compact(store, last, killer(FaultPoint.COMPACT, 1))

    done = compact(store, last, begin_another)
    store.verify(done)
    same(before, restored(store, store.get(last.path, "train")))


def test_of_two_compactions_the_later_one_is_told_and_leaves_no_files(tmp_path):
    store = new_store(tmp_path)
    put(store, 1)
    last = put(store, 2, [1], 0.3)
    before = restored(store, last)

    def end_another(point):
        if point == FaultPoint.BEFORE_SWAP:
            compact(store, last)

    with pytest.raises(ArtifactError, match="was removed or replaced while it was compacted"):
        compact(store, last, end_another)
    same(before, restored(store, store.get(last.path, "train")))
    assert collect(store, None, keep_last=2, min_age_seconds=0)[0] == []


def test_a_damaged_chain_is_not_compacted(tmp_path):
    store = new_store(tmp_path)
    base = put(store, 1)
    last = put(store, 2, [1], 0.3)
    file = tmp_path / "store" / base.path / next(name for name in base.files if name.startswith("rows/"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="corrupt"):
        compact(store, last)
    assert store.get(last.path, "train") == last
    # The rows of the delta had been written by then.
    assert set(store.names(last.path)) == {"dense.safetensors", "index.json", "manifest.json", "rows", "state.json"}


def test_rows_are_read_in_order_in_windows_of_any_size(tmp_path):
    store = new_store(tmp_path)
    put(store, 1, cuts=(0, 6, DIM))
    last = put(store, 2, [1], 0.3)
    whole = {name: (weight, sums) for name, _, weight, sums in restored(store, last)}
    reader = ChainReader(store, last)
    for name, (weight, sums) in whole.items():
        first = 0
        for window in reader.windows(name, 500):
            count = len(window.weight)
            assert window.row == first
            assert (window.weight == weight[first : first + count]).all()
            assert (window.state["adagrad_sum"] == sums[first : first + count]).all()
            first += count
        assert first == len(weight)


def test_compaction_and_clearing_up_work_on_a_store_without_rename():
    store = Store("memory://compact-test")
    put(store, 1)
    last = put(store, 2, [1], 0.3)
    before = restored(store, last)
    with pytest.raises(Killed):
        compact(store, last, killer(FaultPoint.BEFORE_SWAP, 0))
    done = compact(store, last)
    same(before, restored(store, done))
    store.write_bytes(f"{DIRECTORY}/step-00000007/rows/a/x", b"1")
    store.write_bytes(f"{DIRECTORY}/step-00000002/rows/a/x", b"1")
    store.write_json("models/m/1/manifest.json", {"summary": {"checkpoint": f"{DIRECTORY}/step-00000001"}})
    put(store, 3)
    going, staying = collect(store, None, keep_last=1, min_age_seconds=0)
    assert [each.path for each in going] == [f"{DIRECTORY}/step-00000002", f"{DIRECTORY}/step-00000007"]
    assert {each.path[-1] for each in staying} == {"1", "3"}
    sweep(store, going)
    assert store.names(DIRECTORY) == ["step-00000001", "step-00000003"]
