"""The gate's scores and importances, and a version's tables, are the same bits on any number of threads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.checkpoint.reader import ChainReader
from pipeline.config.compose import compose
from pipeline.ingest.stage import ingest
from pipeline.publishing.served_tables import bits
from pipeline.publishing.table_writer import WrittenTable
from pipeline.records import TableLayout
from pipeline.serving.scorer import run_in_threads
from pipeline.serving.scores import importance, score_dataset
from pipeline.stages.release_ranks import write_tables
from pipeline.store import Draft, Store
from pipeline.training.parquet import SplitReader
from tests.checkpoint import built


class Wide:
    """A model of one wide layer, whose sums depend on the order in which a library adds."""

    description = SimpleNamespace(dense=tuple(f"I{n}" for n in range(1, 14)), sparse=("C1", "C2"), event_columns=())

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.first = torch.randn(15, 300, generator=draw)
        self.second = torch.randn(300, 1, generator=draw)
        self.threads: set[int] = set()

    def score(self, dense, ids):
        self.threads.add(torch.get_num_threads())
        own = np.stack([ids[name].astype(np.float32) / 100 for name in self.description.sparse], axis=1)
        rows = torch.from_numpy(np.concatenate([dense, own], axis=1))
        return ((rows @ self.first).relu() @ self.second).squeeze(1).numpy()


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> SplitReader:
    """Held-out rows in several row groups."""
    made = Store(str(tmp_path_factory.mktemp("rows")))
    world = compose(["data=synthetic", "data.synthetic.rows=20000", "ingest.rows_per_group=1000"])
    with made.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        dataset = draft.commit(ingest(world.data, world.ingest, world.seed, draft))
    reader = SplitReader(made, dataset, "test")
    assert len(reader.groups) > 3
    return reader


def on(threads: int, work):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return work()
    finally:
        assert torch.get_num_threads() == threads, "it is left as it was"
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 4])
def test_the_scores_of_a_dataset_are_the_same_bits(split: SplitReader, threads: int) -> None:
    model, trained = Wide(), {"C1": None, "C2": bits(np.arange(10**6) % 3 == 0)}
    one, several = (on(n, lambda: score_dataset(split, {"m": (model, None)}, trained, ["C1"])) for n in (1, threads))
    assert len(one.logits["m"]) == len(split.groups)
    for each in (one, several):
        assert np.concatenate(each.logits["m"]).tobytes() == np.concatenate(one.logits["m"]).tobytes()
        assert np.concatenate(each.codes["C1"]).tobytes() == np.concatenate(one.codes["C1"]).tobytes()
        assert (each.lookups, each.served) == (one.lookups, one.served)
    assert model.threads == {1}
    assert one.lookups["C1"] == one.lookups["C2"] == split.rows and 0 < one.served["C2"] < one.served["C1"]


@pytest.mark.parametrize("threads", [2, 4])
def test_importances_are_the_same_bits(split: SplitReader, threads: int) -> None:
    groups = {name: [name] for name in ("I1", "C1", "C2", "I2", "C3")}
    one, several = (on(n, lambda: importance(split, Wide(), groups, 2000, 0)) for n in (1, threads))
    assert list(one) == list(several) == list(groups) and one == several and one["C3"].rise == 0 != one["I1"].rise


@pytest.mark.parametrize("coding", ["fp32", "4"])
def test_tables_are_written_with_the_same_bytes(tmp_path, coding: str) -> None:
    """Those of two checkpoints side by side, whatever a reader has open for another table."""
    store = Store(str(tmp_path))
    readers, found = [ChainReader(store, built.put(store, step)) for step in (1, 2)], []
    for threads in (1, 4):
        with store.draft(f"v{threads}", kind="model", key="k", config={}, inputs={}) as draft:
            written = on(threads, lambda draft=draft: write_tables(draft, readers, [*built.ROWS], coding))
            artifact = draft.commit({})
        assert [*written] == [*built.ROWS]
        files = {name: entry.checksum for name, entry in artifact.files.items()}
        found.append((files, [(each.layout, each.not_finite, each.trained.tobytes()) for each in written.values()]))
    assert found[0] == found[1] and len(found[0][0]) == len(built.ROWS)


def test_no_two_tables_are_written_from_one_reader(tmp_path, monkeypatch) -> None:
    """What a reader has open belongs to one thread; that two of them meet there is too rare for a test of the bytes."""
    store, given = Store(str(tmp_path)), []
    readers = [ChainReader(store, built.put(store, step)) for step in (1, 2)]
    layout = TableLayout(file="f", rows=1, dim=1, coding="fp32", record_bytes=4, block_rows=1)

    def write(draft, own, *rest) -> WrittenTable:
        given.append(own)
        return WrittenTable(layout, 0, None)

    monkeypatch.setattr("pipeline.stages.release_ranks.write_table", write)
    write_tables(Draft(store, "v", "model", "k", {}, {}), readers, [*built.ROWS], "fp32")
    every = [id(each._blocks) for own in [readers, *given] for each in own]
    assert len(given) == len(built.ROWS) and len(set(every)) == len(every)


def test_an_error_ends_the_others_and_leaves_the_threads_as_they_were(split: SplitReader) -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("third")
        return number

    def run() -> list[int]:
        found: list[int] = []
        with pytest.raises(ValueError, match="third"):
            found.extend(run_in_threads(work, range(100)))
        return found

    on(4, run)
