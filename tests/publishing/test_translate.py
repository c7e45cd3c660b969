"""Rows of today's dataset as the incumbent would have got them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.compose import compose
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.stage import ingest
from pipeline.records import LABEL
from pipeline.serving.incumbent_features import FeatureScale, NotComparableError, translation
from pipeline.store import Store
from pipeline.training.parquet import Ragged, SplitReader


def dense(transform="log1p_standardise", mean=1.0, std=2.0, column="x", bounds=None):
    plain = {"column": column, "transform": transform, "mean": mean, "std": std, "missing": 0.0}
    return {**plain, "clip": [], "bins": 100, "bounds": bounds}


def sparse(mapping="vocab", rows=5, **more):
    vocab = "vocab/a.parquet" if mapping == "vocab" else None
    made = {"mapping": mapping, "rows": rows, "vocab": vocab, "seed": 7, "separator": None, "weight_separator": None}
    return made | more


def put(store: Store, path: str, x=None, a=None, hashes=(11, 22, 33), features=None, rows=None, **reading):
    features = features or {"dense": {"x": x or dense()}, "sparse": {"a": a or sparse()}}
    store.write_json(f"{path}/transforms.json", features | reading)
    folder = Path(store.full(f"{path}/vocab"))
    folder.mkdir(parents=True)
    numbers = pa.array(rows or range(2, 2 + len(hashes)), pa.int32())
    counts = pa.array(range(len(hashes), 0, -1), pa.int64())
    table = pa.table({"hash": pa.array(hashes, pa.uint64()), "row": numbers, "count": counts})
    pq.write_table(table, folder / "a.parquet")


BUILT = {"by": "user", "days": 30, "where": None, "lag_minutes": 0.0}


def with_sequence(**changes):
    group = {"columns": {}, "time": {"column": "history", "field": "at"}, "max_length": 20, "age_bins": 64}
    return {"dense": {}, "sparse": {}, "sequences": {"groups": {"history": {**group, **changes}}}}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_the_same_transforms_change_nothing(store: Store) -> None:
    put(store, "now")
    put(store, "then", x=dense(column="renamed"))
    change = translation(store, "now", "then", ["data.dense.x.column"])
    assert change.dense == {"x": None} and change.sparse == {"a": None}


def with_columns(group: str, name: str, column: str) -> dict:
    """Features of which one is read from ``column``."""
    features: dict = {"dense": {"x": dense()}, "sparse": {"a": sparse(column="a")}}
    features[group][name] |= {"column": column}
    return features


def built(**changes) -> dict:
    return with_sequence(history=BUILT | changes)


COLUMNS = [
    (with_columns("dense", "x", "amount"), with_columns("dense", "x", "price"), "data.dense.x.column"),
    (with_columns("sparse", "a", "twin"), with_columns("sparse", "a", "site"), "data.sparse.a.column"),
    (
        with_sequence(columns={"history__item": {"column": "seen", "field": "item"}}),
        with_sequence(columns={"history__item": {"column": "seen", "field": "ad"}}),
        "data.sequences.history.features.item.column",
    ),
    (with_sequence(), with_sequence(time={"column": "history", "field": "sent"}), "data.sequences.history.time"),
    (built(of={"item": "ad"}), built(of={"item": "page"}), "data.sequences.history.features.item.column"),
    (built(by="session"), built(), "data.sequences.history.history.by"),
    (built(where="buy"), built(where="click"), "data.sequences.history.history.where"),
]


@pytest.mark.parametrize(("now", "then", "setting"), COLUMNS, ids=[each[2] for each in COLUMNS])
def test_another_column_is_no_rename_unless_somebody_says_so(store: Store, now: dict, then: dict, setting: str) -> None:
    put(store, "now", features=now)
    put(store, "then", features=then)
    with pytest.raises(NotComparableError, match=rf"if the log renamed it, checkpoint.allow=\[{setting}\] says so"):
        translation(store, "now", "then")
    assert translation(store, "now", "then", [setting]) == translation(store, "then", "then")
    with pytest.raises(NotComparableError):
        translation(store, "now", "then", [f"{setting}s", "data.dense.other"])


def test_ids_keep_their_identity_not_their_row(store: Store) -> None:
    put(store, "now", hashes=(11, 22, 33))
    put(store, "then", hashes=(33, 44, 11, 55), a=sparse(rows=6))
    change = translation(store, "now", "then")
    assert change.rows("a", np.array([0, 1, 2, 3, 4])).tolist() == [0, 1, 4, 1, 2]


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
    change = translation(store, "now", "then")
    assert np.allclose(change.values("x", scaled(now)), scaled(then), atol=1e-5)
    assert change.values("x", np.zeros(2, np.float32)).tolist() == [0.0, 0.0], "missing stays missing"


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
            "mapped by hash into 9 rows in the dataset, by hash",
        ),
        ({"a": sparse("hash", 5)}, {}, "by vocab into 5 in the model"),
        ({"a": sparse(seed=8)}, {}, "seed of feature 'a' is 8 in the dataset, 7 in the model"),
        ({"a": sparse(separator="|")}, {}, "separator of feature 'a'"),
        (
            {"a": sparse(max_ids=3)},
            {},
            "feature 'a' has at most 3 ids per row in the dataset, where the model takes all",
        ),
        (
            {"a": sparse(max_ids=3)},
            {"a": sparse(max_ids=4)},
            "at most 3 ids per row in the dataset, where the model takes 4",
        ),
        ({}, {"a": sparse(weights="w")}, "weights of feature 'a' is None in the dataset, 'w' in the model"),
        ({"x": dense() | {"clip": [0, 9]}}, {}, r"feature 'x' is clipped to \[0, 9\] in the dataset, which does not"),
        ({"x": dense() | {"clip": [0, 9]}}, {"x": dense() | {"clip": [0, 10]}}, "is clipped to"),
        ({"missing": ["", "NA"]}, {}, r"data.missing is \['', 'NA'\] in the dataset, \[\] in the model"),
        ({"strip": True}, {}, "data.strip is True in the dataset, False in the model"),
        ({"decimal": ","}, {}, "data.decimal is ',' in the dataset, '.' in the model"),
        ({"x": dense("percentile", bounds=[1.0])}, {}, "feature 'x' has other bounds of percentile in the dataset"),
        (
            {"x": dense("standardise", 1e9)},
            {"x": dense("standardise")},
            "feature 'x' has a mean so far from the model's",
        ),
        (
            {"x": dense("standardise", 1e9) | {"width": 2}},
            {"x": dense("standardise") | {"width": 2}},
            "a vector, has a m",
        ),
        ({"x": dense() | {"width": 2}}, {}, "feature 'x' has width 2 in the dataset, 1 in the model"),
    ],
)
def test_what_cannot_be_translated_is_said_by_feature(store: Store, now: dict, then: dict, words: str) -> None:
    put(store, "now", **now)
    put(store, "then", **then)
    with pytest.raises(NotComparableError, match=words):
        translation(store, "now", "then")


def test_what_another_model_cuts_off_is_cut_off_for_it(store: Store) -> None:
    put(store, "now", x=dense("none", 0, 1) | {"clip": [-50, 50]})
    put(store, "then", x=dense("none", 0, 1) | {"clip": [0, 9]}, a=sparse(max_ids=2))
    change = translation(store, "now", "then")
    assert change.values("x", np.array([-3.0, 4.0, 40.0], np.float32)).tolist() == [0, 4, 9]
    assert change.longest == {"a": 2} and change.raw == []
    lists = Ragged(np.array([0, 3, 3, 4, 6]), np.arange(6), np.arange(6) / 10)
    cut = lists.first(2)
    assert cut.offsets.tolist() == [0, 2, 2, 3, 5] and cut.values.tolist() == [0, 1, 3, 4, 5]
    assert cut.weights is not None and cut.weights.tolist() == [0, 0.1, 0.3, 0.4, 0.5]


NONE, LOG = dense("none", 0, 1), dense("log1p", 0, 1)


@pytest.mark.parametrize("now", [NONE, LOG])
@pytest.mark.parametrize(
    "then",
    [
        dense(),
        dense("standardise", 5, 2),
        dense("percentile", bounds=[0.0, 1.0, 4.0]),
        NONE | {"clip": [1, 9]},
        dense("max_norm", 0, 1) | {"missing": None},
    ],
)
def test_a_zero_is_no_missing_value_to_a_model_that_tells_them_apart(store: Store, now: dict, then: dict) -> None:
    put(store, "now", x=now)
    put(store, "then", x=then)
    with pytest.raises(NotComparableError, match="feature 'x' does not tell a zero from a missing value"):
        translation(store, "now", "then")
    put(store, "kept", x=now, raw=["x"])
    change = translation(store, "kept", "then")
    assert change.raw == ["x"]
    zero, missing = change.values("x", np.array([0.0, np.nan]))
    own = FeatureScale.of("x", then).values(np.array([0.0, np.nan]))
    assert zero == own[0] and (missing == own[1] or np.isnan([missing, own[1]]).all())


def test_a_vector_of_which_a_zero_may_be_missing_is_not_scaled(store: Store) -> None:
    put(store, "now", x=NONE | {"width": 2})
    put(store, "then", x=dense("standardise") | {"width": 2})
    with pytest.raises(NotComparableError, match="feature 'x', a vector, does not tell a zero from a missing value"):
        translation(store, "now", "then")


def test_a_bound_at_todays_mean_is_a_number(store: Store) -> None:
    """In today's scale it is 0, the value of a missing number; bounds with a missing one are in no order."""
    then = dense("percentile", bounds=[0.0, 1.0, 4.0])
    put(store, "now", x=dense("standardise", 1.0, 2.0))
    put(store, "then", x=then)
    moved = translation(store, "now", "then").values("x", np.array([-1.0, 0.25, 3.0], np.float32))
    assert moved.tolist() == FeatureScale.of("x", then).values(np.array([-1.0, 1.5, 7.0])).tolist()


def test_limits_of_values_are_no_other_scale(store: Store) -> None:
    """Its bits would change by rounding, there and back."""
    put(store, "now", x=dense() | {"min": None, "max": 50.0, "required": False})
    put(store, "then", x=dense() | {"min": 0.0, "max": 9.0, "required": True})
    assert translation(store, "now", "then").dense == {"x": None}


def test_a_number_that_is_clipped_more_today_is_taken_as_it_came(store: Store) -> None:
    put(store, "now", x=dense("none", 0, 1) | {"clip": [0, 9]}, raw=["x"])
    put(store, "then", x=dense("none", 0, 1))
    change = translation(store, "now", "then")
    assert change.raw == ["x"]
    assert change.values("x", np.array([-3.0, 4.0, 40.0, np.nan])).tolist() == [-3, 4, 40, 0]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (with_sequence(max_length=10), "sequence 'history' has up to 10 events in the dataset, 20 in the model"),
        (with_sequence(max_length=50), "sequence 'history' has up to 50 events in the dataset, 20 in the model"),
        (with_sequence(age_bins=32), "ages of sequence 'history' have 32 bins in the dataset, 64 in the model"),
        ({"dense": {}, "sparse": {}}, "it needs sequence 'history', which the dataset does not have"),
        (with_sequence(history=BUILT | {"days": 7}), "history.days of sequence 'history' is 7 in the dataset, 30 in"),
        (with_sequence(history=BUILT | {"where": "click"}), "history.where of sequence 'history' is 'click' in"),
        (with_sequence(history=BUILT | {"lag_minutes": 5.0}), "history.lag_minutes of sequence 'history' is 5.0 in"),
        (with_sequence(history=None), "history.by of sequence 'history' is None in the dataset, 'user' in the model"),
        (with_sequence(), "history.by of sequence 'history' is None in the dataset, 'user' in the model"),
    ],
)
def test_sequences_that_a_model_cannot_read_are_said(store: Store, now: dict, words: str) -> None:
    """Its vectors of places end at its own longest history, and an age's id is the number of its bin."""
    put(store, "now", features=now)
    put(store, "then", features=with_sequence(history=BUILT))
    with pytest.raises(NotComparableError, match=words):
        translation(store, "now", "then")


@pytest.mark.parametrize("now", [with_sequence(), with_sequence(time=None), with_sequence(history=None)])
@pytest.mark.parametrize("then", [with_sequence(), with_sequence(history=None)])
def test_sequences_of_the_same_length_are_read_as_they_are(store: Store, now: dict, then: dict) -> None:
    put(store, "now", features=now)
    put(store, "then", features=then)
    assert translation(store, "now", "then").sparse == {}


def test_a_sequence_that_the_log_has_is_not_one_that_was_built(store: Store) -> None:
    put(store, "now", features=with_sequence(history=BUILT))
    put(store, "then", features=with_sequence(history=None))
    with pytest.raises(NotComparableError, match="history.by of sequence 'history' is 'user' in the dataset, None in"):
        translation(store, "now", "then")


def test_of_earlier_releases_the_settings_say_how_a_sequence_was_built(store: Store) -> None:
    """A record without ``history``: the version has its configuration beside it, the dataset in its manifest."""
    settings = {"data": {"sequences": {"history": {"history": BUILT}}}}
    for path in ("now", "then"):
        with store.draft(path, kind="dataset", key=path, config=settings, inputs={}) as draft:
            draft.commit({})
        put(store, path, features=with_sequence())
    store.write_bytes("then/config.yaml", b"data: {sequences: {history: {history: {by: user, days: 7}}}}")
    with pytest.raises(NotComparableError, match="history.days of sequence 'history' is 30 in the dataset, 7 in the"):
        translation(store, "now", "then")
    put(store, "newer", features=with_sequence(history=BUILT | {"days": 14}))
    with pytest.raises(NotComparableError, match="history.days of sequence 'history' is 14 in the dataset, 7 in the"):
        translation(store, "newer", "then")
    assert translation(store, "now", "now").sparse == {}


CLOCK = {"row_time": "at", "time_zone": None}


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"row_time": "served_at"}, "data.timestamp"),
        ({"time_zone": "Asia/Tokyo"}, "data.time_zone"),
        ({"time_format": "%d.%m.%Y"}, "data.time_format"),
    ],
)
def test_ages_by_another_clock_are_not_those_of_the_model(store: Store, change: dict, setting: str) -> None:
    for path, clock in (("now", CLOCK | change), ("then", CLOCK)):
        features = with_sequence()
        features["sequences"] |= clock
        put(store, path, features=features)
    with pytest.raises(NotComparableError, match=f"{setting}, by which the ages of events are counted, is"):
        translation(store, "now", "then")
    assert translation(store, "now", "then", [setting]).sparse == {}


def test_without_ages_no_clock_matters(store: Store) -> None:
    for path, row_time in (("now", "served_at"), ("then", "at")):
        features = with_sequence(time=None)
        features["sequences"] |= CLOCK | {"row_time": row_time}
        put(store, path, features=features)
    assert translation(store, "now", "then").sparse == {}


@pytest.mark.parametrize(
    ("now", "then", "words"),
    [
        ({"max": 10.0}, {}, "data.dense.x.max is 10.0 in the dataset, None in the model"),
        ({"max": 10.0}, {"max": 20.0}, "data.dense.x.max is 10.0 in the dataset, 20.0 in the model"),
        ({"min": 0.0}, {"min": -1.0}, "data.dense.x.min is 0.0"),
        ({"required": True}, {"required": False}, "data.dense.x.required is True"),
    ],
)
def test_rows_that_only_the_model_would_score_must_be_there(store: Store, now: dict, then: dict, words: str) -> None:
    """Rows in quarantine are not judged: neither on the candidate, which refuses them, nor on the one that serves."""
    put(store, "now", x=dense() | now)
    put(store, "then", x=dense() | then)
    with pytest.raises(NotComparableError, match=f"{words}.*rows that the model would score are in quarantine"):
        translation(store, "now", "then")
    assert translation(store, "then", "now").dense == {"x": None}, "they are there for a model that refuses some"
    store.write_json("now/quality.json", {"quarantine": {"columns": {"y": 3}}})
    assert translation(store, "now", "then").dense == {"x": None}, "the limit refused no row"
    store.write_json("now/quality.json", {"quarantine": {"columns": {"x": 1}}})
    with pytest.raises(NotComparableError, match=words):
        translation(store, "now", "then")


ADDED = [
    ({"dense": {"x": dense(), "more": dense(column="more")}}, "more", "data.dense.more"),
    ({"dense": {"x": dense(), "more": dense(column="x") | {"required": True}}}, "x", "data.dense.more"),
    ({"sparse": {"a": sparse(), "more": sparse(column="more")}}, "more", "data.sparse.more"),
    ({"sparse": {"a": sparse(), "more": sparse(column="more", weights="w")}}, "w", "data.sparse.more"),
    ({"sparse": {"a": sparse(), "more": sparse(column="a", bounds=[1.0])}}, "a", "data.sparse.more"),
    ({"sparse": {"a": sparse(), "more": sparse(column="a", integer=True)}}, "a", "data.sparse.more"),
    ({"sparse": {"a": sparse(), "more": sparse(cross=["a", "other"])}}, "other", "data.sparse.more"),
    (
        {"sequences": {"groups": {"seen": {"columns": {}, "time": {"column": "at", "field": None}}}}},
        "at",
        "data.sequences.seen",
    ),
    (
        {"sequences": {"groups": {"seen": {"columns": {"seen__item": {"column": "items"}}, "time": None}}}},
        "items",
        "data.sequences.seen",
    ),
]


@pytest.mark.parametrize(("added", "column", "setting"), ADDED, ids=[f"{each[2]}-{each[1]}" for each in ADDED])
def test_rows_that_a_new_feature_refuses_are_missed(store: Store, added: dict, column: str, setting: str) -> None:
    """The model that serves does not read that feature: it scores them, and nobody can see how well."""
    plain = {"dense": {"x": dense(column="x")}, "sparse": {"a": sparse(column="a")}}
    put(store, "then", features=plain)
    put(store, "now", features=plain | added)
    store.write_json("now/quality.json", {"quarantine": {"rows": 3, "columns": {"y": 3}}})
    assert translation(store, "now", "then").dense == {"x": None}, "it refused none"
    for quarantine in ({"rows": 1, "columns": {column: 1}}, {"rows": 1}):
        store.write_json("now/quality.json", {"quarantine": quarantine})
        with pytest.raises(NotComparableError, match=f"{setting}, which the model does not have, is read from"):
            translation(store, "now", "then")


@pytest.mark.parametrize("more", [{}, {"required": True}])
def test_values_that_both_refuse_judge_both(store: Store, more: dict) -> None:
    """A new feature of a column that the model reads by the same rules refuses no other row."""
    plain = {"dense": {"x": dense(column="x") | more}, "sparse": {"a": sparse(column="a", **more)}}
    new = {"dense": {"y": dense(column="x") | more}, "sparse": {"b": sparse(column="a", **more)}}
    new["sparse"]["c"] = sparse(cross=["a", "a"], **more)
    put(store, "then", features=plain)
    put(store, "now", features={group: plain[group] | new[group] for group in plain})
    store.write_json("now/quality.json", {"quarantine": {"rows": 2, "columns": {"x": 1, "a": 1}}})
    assert translation(store, "now", "then").sparse == {"a": None}


def test_bins_of_whole_numbers_refuse_others(store: Store) -> None:
    bins = sparse("bins", bounds=[1.0, 2.0], column="age")
    put(store, "then", a=bins | {"integer": False})
    put(store, "now", a=bins | {"integer": True})
    store.write_json("now/quality.json", {"quarantine": {"rows": 1, "columns": {"age": 1}}})
    with pytest.raises(NotComparableError, match="data.sparse.a.integer is True in the dataset, False in the model"):
        translation(store, "now", "then")
    assert translation(store, "then", "now").sparse == {"a": None}


def test_rows_with_late_events_that_only_the_model_would_score_must_be_there(store: Store) -> None:
    put(store, "now", features=with_sequence(drop_leaks=False))
    put(store, "then", features=with_sequence(drop_leaks=True))
    with pytest.raises(NotComparableError, match="data.sequences.history.leaks is quarantine in the dataset, drop in"):
        translation(store, "now", "then")
    assert translation(store, "then", "now").sparse == {}


def test_a_label_of_another_column_judges_nobody(store: Store) -> None:
    label = {"column": "click", "positive": "1", "negative": "0"}
    put(store, "now", label=label | {"column": "buy"})
    put(store, "then", label=label)
    with pytest.raises(NotComparableError, match="data.label.column is 'buy' in the dataset, 'click' in the model"):
        translation(store, "now", "then")
    assert translation(store, "now", "then", ["data.label.column"]).dense == {"x": None}


@pytest.mark.parametrize("change", ["column: cart", "positive: bought", "negative: left", "kind: number", "given: buy"])
def test_a_further_label_that_says_something_else_judges_nobody(store: Store, change: str) -> None:
    put(store, "now")
    put(store, "then")
    store.write_bytes("then/config.yaml", b"data: {tasks: {buy: {kind: binary, positive: '1', negative: '0'}}}")
    store.write_bytes("now/config.yaml", b"data: {tasks: {buy: {column: buy}, late: {positive: x}}}")
    assert translation(store, "now", "then").dense == {"x": None}
    store.write_bytes("now/config.yaml", f"data: {{tasks: {{buy: {{{change}}}}}}}".encode())
    setting = f"data.tasks.buy.{change.partition(':')[0]}"
    with pytest.raises(NotComparableError, match=f"{setting} is .* in the model; .*checkpoint.allow="):
        translation(store, "now", "then")
    assert translation(store, "now", "then", [setting]).dense == {"x": None}


def test_of_earlier_releases_the_settings_say_what_a_quote_is(store: Store) -> None:
    put(store, "now", quote=None)
    put(store, "then")
    with pytest.raises(NotComparableError, match="data.quote is None in the dataset, '\"' in the model"):
        translation(store, "now", "then")
    store.write_bytes("then/config.yaml", b"data: {format: csv, quote: null}")
    assert translation(store, "now", "then").dense == {"x": None}
    store.write_bytes("then/config.yaml", b"data: {format: parquet, quote: null}")
    assert translation(store, "now", "then", ["data.quote"]).dense == {"x": None}


def test_without_a_header_a_column_is_the_one_at_its_place(store: Store) -> None:
    put(store, "now", x=dense() | {"column": "x"})
    put(store, "then", x=dense() | {"column": "x"})
    store.write_bytes("then/config.yaml", b"data: {format: csv, header: false, columns: [label, x, a, b]}")
    moved = b"data: {format: csv, header: false, columns: [label, b, a, x]}"
    store.write_bytes("now/config.yaml", moved)
    with pytest.raises(
        NotComparableError, match="'x' is column 4 of the lines in the dataset, 2 in the model; .*allow="
    ):
        translation(store, "now", "then")
    assert translation(store, "now", "then", ["data.columns"]).dense == {"x": None}
    swapped = b"data: {format: csv, header: false, columns: [b, x, a, label]}"
    store.write_bytes("now/config.yaml", swapped)
    assert translation(store, "now", "then").dense == {"x": None}, "of these the model reads no other one"
    store.write_json("then/transforms.json", store.read_json("then/transforms.json") | {"label": {"column": "label"}})
    with pytest.raises(NotComparableError, match="'label' is column 4 of the lines in the dataset, 1 in the model"):
        translation(store, "now", "then")
    store.write_bytes("now/config.yaml", b"data: {format: csv, header: false, columns: [label, x, a, c, b]}")
    assert translation(store, "now", "then").dense == {"x": None}, "nothing that is read has moved"


NAMED = ["{format: csv, header: true}", "{format: parquet, columns: [label, x]}", "{format: kafka, messages: avro}"]


@pytest.mark.parametrize("named", NAMED)
def test_names_and_places_of_columns_are_not_compared(store: Store, named: str) -> None:
    """A list of columns in a wrong order would judge a model on other columns than those it serves by."""
    for path in ("named", "placed"):
        put(store, path)
    store.write_bytes("named/config.yaml", f"data: {named}".encode())
    store.write_bytes("placed/config.yaml", b"data: {format: csv, header: false, columns: [label, x, a]}")
    for now, then in (("named", "placed"), ("placed", "named")):
        with pytest.raises(NotComparableError, match=r"told apart by their .*checkpoint.allow=\[data.columns\]"):
            translation(store, now, then)
        assert translation(store, now, then, ["data.columns"]).dense == {"x": None}


@pytest.mark.parametrize(
    ("reading", "column"),
    [
        ("format: criteo, columns: ", "x"),
        ("format: kafka, messages: csv, columns: ", "x"),
        ("format: csv, header: false, columns: ", "heard"),
        ("format: csv, header: false, columns: ", "city"),
        ("format: csv, header: false, columns: ", "bought"),
    ],
)
def test_columns_by_place_are_those_of_every_format_and_of_all_that_is_read(
    store: Store, reading: str, column: str
) -> None:
    """Weights, parts of a cross and further labels are read, too."""
    ids = sparse(weights="heard") | {"cross": ["city", "day"]}
    for path, columns in (("now", f"[free, other, {column}]"), ("then", f"[{column}, other, free]")):
        put(store, path, x=dense() | {"column": "x"}, a=ids)
        settings = f"data: {{{reading}{columns}, tasks: {{buy: {{column: bought}}}}}}"
        store.write_bytes(f"{path}/config.yaml", settings.encode())
    with pytest.raises(NotComparableError, match=f"'{column}' is column 3 of the lines in the dataset, 1 in the model"):
        translation(store, "now", "then")
    translation(store, "now", "then", ["data.columns"])


def test_ids_without_a_row_today_keep_theirs_in_the_other_model(store: Store) -> None:
    """A model that knows more ids than today's short log is not made to forget them."""
    rng = np.random.default_rng(3)

    def made(name: str, rows: int, *overrides: str):
        ids = rng.integers(0, 300, (rows, 3))
        path = Path(store.full(f"{name}.csv"))
        lines = [f"{i % 2},{i},id{a},{'' if i % 9 == 0 else f't{b}|t{c}'}" for i, (a, b, c) in enumerate(ids)]
        path.write_text("\n".join(["label,x,c,t", *lines]) + "\n")
        config = compose(
            [
                "data=csv",
                "data.name=d",
                "data.label.column=label",
                "+data.dense={x: {transform: none}}",
                "+data.sparse={v: {column: c}, t: {separator: '|'}, l: {column: c, mapping: learned, rows: 100}}",
                "data.split.test_share=0.5",
                f"data.path={path}",
                *overrides,
            ]
        )
        with store.draft(f"datasets/{name}", kind="dataset", key=name, config={}, inputs={}) as draft:
            return draft.commit(ingest(config.data, config.ingest, config.seed, draft)), lines

    then, _ = made("then", 9000)
    now, lines = made("now", 900, "ingest.rows_per_group=64", "ingest.block_mib=1")
    records = [dict(zip(("label", "x", "c", "t"), line.split(","), strict=True)) for line in lines]
    change, split = translation(store, now.path, then.path), SplitReader(store, now, "test")
    assert change.unseen == ["v", "t", "l"] and len(split.groups) > 3
    serve = RecordTransform.read(store, then.path)
    for group in split.groups:
        columns = split.allocate(group.rows)
        ragged = split.read(group, columns, 0)
        unseen = split.unseen(group, change.unseen)
        assert all(np.count_nonzero(unseen[name]) > 3 for name in change.unseen)
        wanted = serve([records[int(x)] for x in columns.dense[0]])
        for name, own in zip(("v", "l"), columns.single, strict=True):
            same = change.rows(name, own, unseen[name]) == wanted[name].to_numpy()
            assert same.all() or (name == "l" and same[unseen[name] > 0].all())  # ids that share a row have one answer
        assert change.rows("t", ragged["t"].values, unseen["t"]).tolist() == wanted["t"].explode().to_list()


NUMBERS = (
    "data=csv",
    "data.name=d",
    "data.label.column=label",
    "+data.dense={p: {column: x, transform: percentile, bins: 20, clip: [5, 90]}, l: {column: x},"
    " m: {column: x, transform: max_norm}}",
    "+data.sparse={b: {column: x, bins: 20}, v: {column: c}}",
    "data.split.test_share=0.5",
)


def fitted(
    store: Store, name: str, seed: int, *overrides: str, outlier: float | None = None, value: float | None = None
):
    """A dataset of rows whose numbers lie elsewhere for every ``seed``; a tenth of them is missing."""
    rng = np.random.default_rng(seed)
    x = np.round(rng.gamma(2.0 + seed, 10.0, 2000), 1)
    if value is not None:
        x[:] = value
    if outlier is not None:
        x[7::100] = outlier  # in rows to train on and in held-out ones
    fields = [[i % 3 == 0, "" if i % 10 == 0 else x[i], f"id{i % 7}"] for i in range(2000)]
    path = Path(store.full(f"{name}.csv"))
    path.write_text("label,x,c\n" + "".join(f"{int(a)},{b},{c}\n" for a, b, c in fields))
    config = compose([*NUMBERS, f"data.path={path}", *overrides])
    with store.draft(f"datasets/{name}", kind="dataset", key=name, config={}, inputs={}) as draft:
        return draft.commit(ingest(config.data, config.ingest, config.seed, draft))


def translated(store: Store, now, then) -> dict[str, np.ndarray]:
    """The held-out rows of ``now``, one group after the other, as the transforms of ``then`` would make them."""
    change, split = translation(store, now.path, then.path), SplitReader(store, now, "test")
    parts: dict[str, list[np.ndarray]] = {}
    for group in split.groups:
        columns = split.allocate(group.rows)
        split.read(group, columns, 0)
        raw = split.raw(group, change.raw) if change.raw else {}
        for name in change.dense:
            own = columns.dense[split.schema.dense.index(name)]
            parts.setdefault(name, []).append(change.values(name, raw.get(name, own)))
        for name in change.sparse:
            own = columns.single[split.single.index(name)]
            parts.setdefault(name, []).append(change.rows(name, raw.get(name, own)))
    return {name: np.concatenate(values) for name, values in parts.items()}


@pytest.mark.parametrize("rows_per_group", [64, 100_000])
def test_a_fresh_fit_of_percentiles_and_bins_is_scored_from_the_raw_numbers(tmp_path: Path, rows_per_group) -> None:
    """Each model sees a row as its own transforms would have made it from the logs, bit for bit."""
    store = Store(str(tmp_path))
    first = fitted(store, "then", 0)
    second = fitted(store, "now", 1, f"ingest.rows_per_group={rows_per_group}")
    moved = translated(store, second, first)
    split = SplitReader(store, second, "test")
    raw = np.concatenate([split.raw(group, ["p"])["p"] for group in split.groups])
    records = [{"x": None if np.isnan(value) else float(value), "c": "id1"} for value in raw]
    wanted = RecordTransform.read(store, first.path)(records)
    assert 700 < len(raw) == len(split.column(LABEL)) and 0 < np.isnan(raw).sum() < len(raw)
    own = RecordTransform.read(store, second.path)(records)
    assert np.array_equal(own["p"].to_numpy(), split.column("p")), "the raw numbers are those of these rows"
    for name in ("p", "b", "m"):
        assert np.array_equal(moved[name], wanted[name].to_numpy(), equal_nan=True), name
    assert not np.array_equal(moved["b"], split.column("b")), "the fits do differ"
    assert np.allclose(moved["l"], wanted["l"].to_numpy(), atol=1e-5)


def test_a_number_that_moves_the_mean_far_away_rounds_no_other_number(tmp_path: Path) -> None:
    """A price where the column holds a time, in microseconds, leaves no digit of the others in float32."""
    store, scaled = Store(str(tmp_path)), "+data.dense.s={column: x, transform: standardise}"
    first = fitted(store, "then", 0, scaled)
    second = fitted(store, "now", 0, scaled, outlier=1.7e15)
    moved, split = translated(store, second, first)["s"], SplitReader(store, second, "test")
    raw = np.concatenate([split.raw(group, ["s"])["s"] for group in split.groups])
    assert 0 < (raw > 1e15).sum() < 10 and len(np.unique(split.column("s"))) < 5 < len(np.unique(raw))
    records = [{"x": None if np.isnan(value) else float(value), "c": "id1"} for value in raw]
    assert np.array_equal(moved, RecordTransform.read(store, first.path)(records)["s"].to_numpy())


def test_a_number_that_is_the_same_in_all_rows_of_today_is_no_missing_one(tmp_path: Path) -> None:
    """In today's scale both are 0; to the other model, of days with other numbers, they are not."""
    store, scaled = Store(str(tmp_path)), "+data.dense.s={column: x, transform: standardise}"
    first = fitted(store, "then", 0, scaled)
    second = fitted(store, "now", 0, scaled, value=7.0)
    split = SplitReader(store, second, "test")
    raw = np.concatenate([split.raw(group, ["s"])["s"] for group in split.groups])
    assert set(raw[~np.isnan(raw)]) == {7.0} and np.isnan(raw).any()
    records = [{"x": None if np.isnan(value) else float(value), "c": "id1"} for value in raw]
    wanted = RecordTransform.read(store, first.path)(records)["s"].to_numpy()
    assert len(np.unique(wanted)) == 2 and np.array_equal(translated(store, second, first)["s"], wanted)


def test_only_numbers_that_a_transform_does_not_keep_are_kept_beside_the_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    whole = fitted(store, "whole", 0)
    assert {name for name in whole.files if name.startswith("raw/")} == {"raw/part-00000.parquet"}
    assert store.read_json(f"{whole.path}/transforms.json")["raw"] == ["p", "b"]
    plain = fitted(store, "plain", 0, "~data.dense.p", "~data.sparse.b")
    assert not any(name.startswith("raw/") for name in plain.files)


@pytest.mark.parametrize("transform", ["log1p_standardise", "standardise", "none", "max_norm"])
def test_a_scale_may_give_way_to_percentiles_and_back(tmp_path: Path, transform: str) -> None:
    """Numbers on a bound fall into the bin that they fall into by themselves."""
    store = Store(str(tmp_path))
    scaled = fitted(store, "scaled", 1, f"data.dense.p.transform={transform}", "data.dense.p.clip=[]")
    ranks = fitted(store, "ranks", 1, "data.dense.p.clip=[]")
    for now, then, exact in ((scaled, ranks, True), (ranks, scaled, False)):
        moved, split = translated(store, now, then)["p"], SplitReader(store, then, "test")
        assert np.allclose(moved, split.column("p"), atol=0 if exact else 1e-6, equal_nan=True)
