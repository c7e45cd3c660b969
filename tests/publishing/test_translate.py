"""Rows of today's dataset as the incumbent would have got them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.artifacts import Store
from pipeline.publishing.translate import NotComparableError, translation


def dense(transform="log1p_standardise", mean=1.0, std=2.0, column="x"):
    return {"column": column, "transform": transform, "mean": mean, "std": std, "missing": 0.0}


def sparse(mapping="vocab", rows=5, **more):
    vocab = "vocab/a.parquet" if mapping == "vocab" else None
    made = {"mapping": mapping, "rows": rows, "vocab": vocab, "seed": 7, "separator": None, "weight_separator": None}
    return made | more


def put(store: Store, path: str, x=None, a=None, hashes=(11, 22, 33), features=None, rows=None):
    store.write_json(
        f"{path}/transforms.json", features or {"dense": {"x": x or dense()}, "sparse": {"a": a or sparse()}}
    )
    folder = Path(store.full(f"{path}/vocab"))
    folder.mkdir(parents=True)
    numbers = pa.array(rows or range(2, 2 + len(hashes)), pa.int32())
    counts = pa.array(range(len(hashes), 0, -1), pa.int64())
    table = pa.table({"hash": pa.array(hashes, pa.uint64()), "row": numbers, "count": counts})
    pq.write_table(table, folder / "a.parquet")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_the_same_transforms_change_nothing(store: Store) -> None:
    put(store, "now")
    put(store, "then", x=dense(column="renamed"))
    found = translation(store, "now", "then")
    assert found.dense == {"x": None} and found.sparse == {"a": None}


def test_ids_keep_their_identity_not_their_row(store: Store) -> None:
    put(store, "now", hashes=(11, 22, 33))
    put(store, "then", hashes=(33, 44, 11, 55), a=sparse(rows=6))
    found = translation(store, "now", "then")
    assert found.rows("a", np.array([0, 1, 2, 3, 4])).tolist() == [0, 1, 4, 1, 2]


def test_of_ids_that_share_a_row_the_most_frequent_one_speaks(store: Store) -> None:
    spread = {"a": sparse(rows=6, spread=[4, 2])}
    put(store, "now", hashes=(11, 22, 33), rows=(2, 2, 3), **spread)
    put(store, "then", hashes=(33, 44, 11), rows=(2, 2, 3), **spread)
    assert translation(store, "now", "then").rows("a", np.arange(6)).tolist() == [0, 1, 3, 2, 4, 5]
    put(store, "other", hashes=(33, 44, 11), rows=(2, 2, 3), a=sparse(rows=6, spread=[4, 1]))
    assert translation(store, "now", "other").rows("a", np.arange(6)).tolist() == [0, 1, 3, 2, 1, 1]


def test_ids_may_go_from_a_vocabulary_to_a_hash(store: Store) -> None:
    put(store, "now", hashes=(11, 22, 33))
    put(store, "then", a=sparse("hash", rows=12))
    assert translation(store, "now", "then").rows("a", np.arange(5)).tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("now", "then"),
    [
        (dense(), dense(mean=-1.0, std=0.5)),
        (dense("standardise"), dense("log1p", 0.0, 1.0)),
        (dense("log1p", 0, 1), dense("none", 0, 1)),
    ],
)
def test_dense_values_change_their_scale(store: Store, now: dict, then: dict) -> None:
    raw = np.array([0.5, 3.0, -2.0, 7.0])

    def scaled(record: dict) -> np.ndarray:
        value = np.sign(raw) * np.log1p(np.abs(raw)) if record["transform"].startswith("log1p") else raw
        return ((value - record["mean"]) / record["std"]).astype(np.float32)

    put(store, "now", x=now)
    put(store, "then", x=then)
    found = translation(store, "now", "then")
    assert np.allclose(found.values("x", scaled(now)), scaled(then), atol=1e-5)
    assert found.values("x", np.zeros(2, np.float32)).tolist() == [0.0, 0.0], "missing stays missing"


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        (
            {"features": {"dense": {}, "sparse": {"a": sparse()}}},
            {},
            "it needs feature 'x', which the dataset does not",
        ),
        ({"features": {"dense": {"x": dense()}, "sparse": {}}}, {}, "it needs feature 'a'"),
        (
            {"a": sparse("hash", 9)},
            {"a": sparse("hash", 12)},
            "mapped by hash into 9 rows in the dataset, for it by hash",
        ),
        ({"a": sparse("hash", 5)}, {}, "for it by vocab into 5"),
        ({"a": sparse(seed=8)}, {}, "seed of feature 'a' is 8 in the dataset, 7 for it"),
        ({"a": sparse(separator="|")}, {}, "separator of feature 'a'"),
        ({"x": dense("percentile")}, {}, "feature 'x' cannot be brought from scale 'percentile'"),
    ],
)
def test_what_cannot_be_translated_is_said_by_feature(store: Store, now: dict, then: dict, words: str) -> None:
    put(store, "now", **now)
    put(store, "then", **then)
    with pytest.raises(NotComparableError, match=words):
        translation(store, "now", "then")
