"""Tables of a version: what is read is what was written within the coding's error, from memory and from the disk."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.quantise import Coding, decode, encode
from pipeline.checkpoint.reader import ChainReader
from pipeline.core.errors import ArtifactError
from pipeline.publishing.served_tables import RowCache, TableReader, is_set, record_bytes, shares
from pipeline.publishing.table_writer import write_table
from pipeline.records import TableLayout
from pipeline.store import Store
from tests.checkpoint import built
from tests.publishing import made


def written(folder: Path, coding: str, window_bytes: int = 16 << 20, table: str = "long"):
    """The layout of a written table, its file and its exact rows."""
    store = built.new_store(folder)
    reader = ChainReader(store, built.put(store, 1))
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        found = write_table(draft, [reader], table, coding, window_bytes)
        draft.commit({})
    return found, Path(store.full(f"v/{found.layout.file}")), made.tables()[table]


@pytest.mark.parametrize("coding", ["8", "4", "fp16", "fp32"])
@pytest.mark.parametrize("memory", [1 << 30, 5000, 0])
def test_rows_come_back_whatever_is_in_memory(tmp_path: Path, coding: str, memory: int) -> None:
    found, path, exact = written(tmp_path, coding, window_bytes=100 * 4 * built.DIM)
    table = TableReader(path, found.layout, memory)
    numbers = np.random.default_rng(0).integers(0, 900, 3000)
    values = table.lookup(numbers)
    assert torch.equal(table.lookup(numbers), values), "a second read, now partly from the cache"
    wanted = exact[torch.from_numpy(numbers)]
    if coding in ("fp32", "fp16"):
        assert torch.equal(values, wanted if coding == "fp32" else wanted.half().float())
        return
    spans = wanted.amax(1) - wanted.amin(1)
    limit = spans / (2 ** int(coding) - 1) * (0.51 if coding == "8" else 1.0) + 1e-3 * spans
    assert bool(((values - wanted).abs().amax(1) <= limit).all())
    assert path.stat().st_size == 900 * record_bytes(built.DIM, coding) == 900 * (built.DIM * int(coding) // 8 + 4)


def test_a_table_of_one_block_is_what_the_checkpoints_quantiser_gives(tmp_path: Path) -> None:
    found, path, exact = written(tmp_path, "8")
    values = TableReader(path, found.layout, 0).lookup(np.arange(900))
    assert torch.equal(values, decode(encode(exact, Coding(8))))


@pytest.mark.parametrize(("coding", "told"), [("8", 1), ("4", 1), ("fp16", 2), ("fp32", 0)])
def test_what_a_coding_cannot_hold_is_told_and_never_served_as_infinite(tmp_path: Path, coding: str, told: int) -> None:
    store = built.new_store(tmp_path)
    reader = ChainReader(store, built.put(store, 1))
    real = reader.windows

    def with_large_values(table, window_bytes):
        for window in real(table, window_bytes):
            window.weight[3, 2], window.weight[4, 0] = 3e38, -70_000.0
            yield window

    reader.windows = with_large_values
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        found = write_table(draft, [reader], "a", coding)
        draft.commit({})
    assert found.not_finite == told
    values = TableReader(Path(store.full(f"v/{found.layout.file}")), found.layout, 1 << 20).lookup(np.arange(50))
    assert torch.isfinite(values).all()


def test_what_training_moved_and_what_is_not_finite_is_told(tmp_path: Path) -> None:
    store = built.new_store(tmp_path)
    weight, sums = built.values(1)["a"]
    artifact = built.put(store, 1)
    reader = ChainReader(store, artifact)
    real = reader.windows

    def spoilt(table, window_bytes):
        for window in real(table, window_bytes):
            window.weight[3, 2], window.weight[4, 0] = float("inf"), float("-inf")
            window.state["adagrad_sum"][:10] = 0
            yield window

    reader.windows = spoilt
    with store.draft("v", kind="model", key="k", config={}, inputs={}) as draft:
        found = write_table(draft, [reader], "a", "8")
        draft.commit({})
    assert found.not_finite == 2
    trained = is_set(found.trained, np.arange(len(weight)))
    assert not trained[:10].any() and trained[10:].all()
    values = TableReader(Path(store.full(f"v/{found.layout.file}")), found.layout, 1 << 20).lookup(np.arange(50))
    assert torch.isfinite(values).all()


def test_hot_rows_stay_in_the_cache_while_cold_ones_pass_through() -> None:
    stored = np.arange(1000 * 8, dtype=np.int64).astype(np.uint8).reshape(1000, 8)
    cache, hot = RowCache(100, 8), np.arange(50)
    for cold in range(100, 1000, 50):
        asked = np.concatenate([hot, np.arange(cold, cold + 50)])
        assert (cache.read(asked, lambda rows: stored[rows]) == stored[asked]).all()
    before = cache.hits
    cache.read(hot, lambda rows: pytest.fail(f"rows {rows} had to be fetched"))
    assert cache.hits == before + 50
    assert cache.misses < 50 + 18 * 50 + 1


def test_small_tables_are_read_whole_and_the_rest_is_shared_by_size() -> None:
    def layout(rows: int) -> TableLayout:
        return TableLayout(file="f", rows=rows, dim=4, coding="8", record_bytes=8, block_rows=1)

    found = shares({"large": layout(1000), "small": layout(10), "mid": layout(500)}, 80 + 6000)
    assert found == {"small": 80, "mid": 2000, "large": 4000}
    assert shares({"large": layout(1000), "mid": layout(500)}, 13_000) == {"mid": 4000, "large": 8000}
    assert shares({"large": layout(1000), "mid": layout(500)}, 3000) == {"large": 2000, "mid": 1000}


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    found, path, _ = written(tmp_path, "8")
    with pytest.raises(ArtifactError, match="expected 14416 bytes"):
        TableReader(path, dataclasses.replace(found.layout, rows=901), 0)
    path.unlink()
    with pytest.raises(ArtifactError, match="is missing, expected"):
        TableReader(path, found.layout, 0)


def test_names_of_tables_may_hold_anything(tmp_path: Path) -> None:
    found, path, exact = written(tmp_path, "fp32", table="b/c")
    assert found.layout.file == "tables/b%2Fc.rows"
    assert torch.equal(TableReader(path, found.layout, 0).lookup(np.arange(37)), exact)


def test_a_store_holds_the_version_under_its_path(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    assert made.write_version(store, "8") == "models/clicks/v00001-00000000"
    store.verify(store.get("models/clicks/v00001-00000000", "publish"))


def test_threads_that_share_a_cache_get_the_rows_they_asked_for() -> None:
    """Four threads, more rows than places: a place changes hands while others read it."""
    stored = np.random.default_rng(0).integers(0, 256, (4000, 64), np.uint8)
    cache = RowCache(97, 64)

    def read(seed: int) -> int:
        rng, wrong = np.random.default_rng(seed), 0
        for _ in range(1000):
            rows = np.unique(rng.geometric(0.004, 200).clip(1, 3999))
            wrong += int((cache.read(rows, lambda missing: stored[missing]) != stored[rows]).any())
        return wrong

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the interpreter changes threads as often as it can
    try:
        with ThreadPoolExecutor(4) as pool:
            wrong = sum(pool.map(read, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert wrong == 0, f"{wrong} of 4,000 reads brought another row's values"
    assert cache.hits > 0 and cache.misses > 0
