"""Of every setting of the data that can change what a model sees, a night that changes it: none is a free pass."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.records import GateRecord, read
from pipeline.store import Store

from .test_narrowed import HELD, JUDGED_AS_IT_SERVES, RUN

pytestmark = pytest.mark.slow

# Besides those of RUN: a feature of every kind, so that every setting has something to change.
FEATURES = [
    "data.timestamp=at", "+data.dense.place={width: 2, separator: ';', transform: none}",
    "+data.sparse.kinds={separator: ' ', weight_separator: ':'}", "+data.sparse.twin={table: site}",
    "+data.sparse.words={holds: list, separator: ' ', weights: heard}", "+data.sparse.pair={cross: [site, level]}",
    "+data.sparse.amount={bins: 20}", "data.sequences.seen.time=when", "train.epochs=4",
]  # fmt: skip
CURRENT = "models/m/current.json"
TAGS, SITE, SEEN = "data.sparse.tags", "data.sparse.site", "data.sequences.seen"
# What a night changes of each setting, and the exit code: 0 or 6 where it trains (see the test), else of its error.
NIGHTS = {
    "dense_transform": (["data.dense.price.transform=null", "data.dense_transform=percentile"], 0),
    "dense.*.transform": (["data.dense.price.transform=log1p"], 0),
    "dense.*.clip": (["data.dense.price.clip=[0.5,0.6]"], 0),
    "dense.*.bins": (["data.dense.price.transform=percentile", "data.dense.price.bins=2"], 0),
    "dense.*.width": (["data.dense.place.width=1"], 3),
    "dense.*.separator": (["data.dense.place.separator=','"], 3),
    "sparse.*.max_ids": ([f"{TAGS}.max_ids=2"], 0),
    "sparse.*.rows": ([f"{TAGS}.rows=4"], 0),
    "sparse.*.min_count": ([f"{TAGS}.min_count=740"], 0),
    "sparse.*.when_full": ([f"{TAGS}.rows=4", f"{TAGS}.when_full=keep"], 0),
    "sparse.*.evict_after_days": ([f"{TAGS}.evict_after_days=1"], 0),  # nothing: of a log by the day alone
    "sparse.*.mapping": ([f"{TAGS}.mapping=hash", f"{TAGS}.rows=5"], 0),
    "sparse.*.separator": ([f"{TAGS}.separator=null"], 0),
    "sparse.*.weight_separator": (["data.sparse.kinds.weight_separator=null"], 0),
    "sparse.*.weights": (["data.sparse.words.weights=null"], 0),
    "sparse.*.holds": ([f"data.sparse.words.{each}" for each in ("separator=null", "weights=null", "holds=one")], 0),
    "sparse.*.cross": (["data.sparse.pair.cross=[site,day]"], 0),
    "sparse.*.cross_bins": (["+data.sparse.pair.cross_bins={level: [2]}"], 0),
    "sparse.*.bins": (["data.sparse.amount.bins=2"], 0),
    "sparse.*.bins_by": (["data.sparse.amount.bins_by=mdl"], 0),
    "sparse.*.integer": ([f"{SITE}.integer=true"], 3),
    "sparse.*.table": (["data.sparse.twin.table=null"], 0),
    "sparse_defaults.rows": (["data.sparse_defaults.rows=4"], 0),
    "sparse_defaults.min_count": (["data.sparse_defaults.min_count=740"], 0),
    "sparse_defaults.when_full": (["data.sparse_defaults.rows=4", "data.sparse_defaults.when_full=keep"], 0),
    "sparse_defaults.evict_after_days": (["data.sparse_defaults.evict_after_days=1"], 0),
    "sparse_defaults.mapping": (["data.sparse_defaults.mapping=hash", "data.sparse_defaults.rows=5"], 0),
    "sparse_defaults.separator": (["data.sparse_defaults.separator='1'"], 0),
    "sparse_defaults.weight_separator": (["data.sparse_defaults.weight_separator=t"], 0),
    "missing": (["data.missing=['',s1]"], 0),
    "strip": (["data.strip=true"], 0),
    "decimal": (["data.decimal=','"], 3),
    "sequences.*.max_length": ([f"{SEEN}.max_length=2"], 0),
    "sequences.*.time": ([f"{SEEN}.time=null"], 0),
    "sequences.*.age_bins": ([f"{SEEN}.age_bins=2"], 0),
    "sequences.*.separator": ([f"{SEEN}.separator=','"], 3),
    "sequences.*.features.*.table": ([f"{SEEN}.features.item.table=site"], 0),
    "sequences.*.features.*.rows": ([f"{SEEN}.features.item.rows=4"], 0),
    "sequences.*.features.*.min_count": ([f"{SEEN}.features.item.min_count=1140"], 0),
}
# Of sequences that are built from the log, which this one holds: tests/publishing/test_translate.py.
BUILT = {f"sequences.*.history.{name}" for name in ("by", "days", "where", "lag_minutes")}


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Rows whose every column matters, two days of them."""
    rng, rows = np.random.default_rng(0), 3000
    weight = np.array([1.0, -1.0, 0.7, -0.7, 0.5, -0.5, 0.2, -0.2])
    tags, seen = (rng.integers(0, 8, (rows, width)) for width in (4, 6))
    kinds, words = rng.integers(0, 8, (rows, 2)), rng.integers(0, 8, (rows, 2))
    heavy, heard = rng.choice([0.5, 1.0, 2.0], (rows, 2)), rng.choice([0.5, 1.0, 2.0], (rows, 2))
    price, amount, place = rng.random(rows), rng.random(rows), rng.random((rows, 2))
    site, twin, level = (rng.integers(0, 4, rows) for _ in range(3))
    odds = weight[tags].sum(1) + 0.4 * weight[seen].sum(1) + 4 * (price - 0.5)
    odds += (weight[kinds] * heavy).sum(1) + (weight[words] * heard).sum(1) + 2 * (place[:, 0] - place[:, 1])
    odds += 0.3 * site - 0.3 * twin + weight[(site + level) % 8] + 3 * (amount - 0.5) ** 2
    at = 1_760_000_000 + 60 * np.arange(rows)
    ages = np.sort(rng.integers(60, 90_000, (rows, 6)))[:, ::-1]

    def joined(name: str, values: np.ndarray) -> list[str]:
        return [" ".join(f"{name}{each}" for each in row) for row in values]

    frame = pl.DataFrame({
        "click": (rng.random(rows) < 1 / (1 + np.exp(-odds / 2))).astype(int), "price": price, "amount": amount,
        "place": [";".join(f"{each:.4f}" for each in row) for row in place], "tags": joined("t", tags),
        "kinds": [
            " ".join(f"k{kind}:{share}" for kind, share in zip(*row, strict=True))
            for row in zip(kinds, heavy, strict=True)
        ],
        "words": joined("w", words), "heard": joined("", heard), "site": [f"s{each}" for each in site],
        "twin": [f"s{each}" for each in twin], "level": level, "shown": joined("i", seen),
        "when": joined("", at[:, None] - ages), "at": at, "day": np.arange(rows) // (rows // 2),
    })  # fmt: skip
    frame.write_csv(path := tmp_path_factory.mktemp("narrowings") / "log.csv")
    return path


def run(log: Path, store: Store, name: str, *more: str) -> tuple[int, GateRecord | None]:
    """A night; its exit code, and the gate's record where it came to a verdict."""
    code = main(["run", *RUN, *FEATURES, f"data.path={log}", f"store={store.url}", f"run={name}", *more])
    if code not in (0, 6):
        return code, None
    artifact = store.read_json(f"runs/{name}/result.json")["stages"]["publish"]["artifact"]
    return code, read(GateRecord, store, f"{artifact}/gate.json")


@pytest.fixture(scope="module")
def store(log: Path, tmp_path_factory) -> Store:
    """A store with a version that sees everything."""
    place = Store(str(tmp_path_factory.mktemp("store")))
    code, gate = run(log, place, "first")
    assert code == 0 and gate is not None and gate.candidate is not None
    assert gate.candidate.ne.point < 0.95, "it learned nothing that a night could lose"
    return place


def test_there_is_a_night_for_every_setting() -> None:
    named = {*JUDGED_AS_IT_SERVES.split(), *HELD.split()}
    assert set(NIGHTS) == named - BUILT and named >= BUILT


@pytest.mark.parametrize("setting", NIGHTS)
def test_the_version_is_judged_as_it_serves_or_the_night_is_held(log: Path, store: Store, setting: str) -> None:
    """Where its NE can be told, it is the one it was published with, which the same held-out rows gave."""
    before = store.read_json(CURRENT)
    published = read(GateRecord, store, f"models/m/{before['version']}/gate.json").candidate
    assert published is not None
    overrides, code = NIGHTS[setting]
    ended, gate = run(log, store, f"night{list(NIGHTS).index(setting)}", *overrides, "gate.max_ne_increase=0")
    try:
        if code:
            assert ended == code
            return
        assert ended in (0, 6) and gate is not None
        if gate.incumbent is None:
            assert ended == 6 and gate.not_comparable
        else:
            assert gate.incumbent.ne.point == pytest.approx(published.ne.point, abs=1e-6)
    finally:
        store.write_json(CURRENT, before)
