"""What a user can get wrong: one clear DataError or ConfigError each, with the override that mends it."""

import gzip

import numpy as np
import polars as pl
import pytest

from pipeline.config import DenseFeature, LabelConfig, SamplingConfig, SparseFeature, SplitConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.stage import raw_fingerprint

from .conftest import csv_config, write_rows


def refused(run_ingest, config, *parts, error=DataError):
    with pytest.raises(error) as caught:
        run_ingest(config)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.hint
    return caught.value


def test_missing_file(run_ingest, tmp_path):
    for path in (tmp_path / "no.csv", tmp_path / "*.csv"):
        refused(run_ingest, csv_config(path), "nothing exists at data.path=", "data.path=<file")
        with pytest.raises(DataError, match="nothing exists"):
            raw_fingerprint(csv_config(path).data)
    (tmp_path / "empty").mkdir()
    config = csv_config(tmp_path / "empty")
    refused(run_ingest, config, f"data.path={tmp_path}/empty is a folder without files", "data.path=<file")
    with pytest.raises(DataError, match="is a folder without files"):
        raw_fingerprint(config.data)
    with pytest.raises(DataError, match="cannot be opened"):
        raw_fingerprint(csv_config("nosuch://bucket/a.csv").data)


@pytest.mark.parametrize("text", ["", "\n\n", "label,x,c\n", "label,x,c"])
def test_empty_data(run_ingest, tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    refused(run_ingest, csv_config(tmp_path / "a.csv"), "holds no rows")


def test_wrong_column_names_the_nearest(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv", header="labels,x,c")
    refused(
        run_ingest,
        csv_config(path),
        "a.csv has no column 'label'",
        "nearest: labels",
        "it has: labels, x, c",
        "data.label.column=labels",
    )
    path = write_rows(tmp_path / "d.csv", header="rate,x,c")
    far = refused(run_ingest, csv_config(path), "d.csv has no column 'label'", "it has: rate, x, c")
    assert "rate" not in far.hint and "nearest" not in far.message, "a column that is hardly alike is no suggestion"
    path = write_rows(tmp_path / "b.csv")
    config = csv_config(path, sparse={"user_id": SparseFeature()})
    refused(run_ingest, config, "no column 'user_id'", "data.sparse.user_id.column=")
    pl.read_csv(path).write_parquet(tmp_path / "b.parquet")
    config = csv_config(tmp_path / "b.parquet", format="parquet", dense={"xx": DenseFeature()})
    refused(run_ingest, config, "no column 'xx'", "nearest: x", "data.dense.xx.column=x")
    path = write_rows(tmp_path / "c.csv", header="label,x,x")
    refused(run_ingest, csv_config(path, sparse={"s": SparseFeature(column="x")}), "2 columns called 'x'")


def test_no_row_can_be_used(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n" + "yes,1,a\nno,1,a\n" * 4 + "1,1\n")
    refused(
        run_ingest,
        csv_config(path),
        "none of the 9 rows",
        "(8 rows): label is neither '1' nor '0'",
        "a.csv line 2: label is 'yes'",
        "data.label.positive=",
    )
    unquoted = csv_config(path, label=LabelConfig(positive="True", negative="False"))
    refused(run_ingest, unquoted, "label is 'yes', expected 'True' or 'False'", 'write "yes" and "no" with quotes')
    config = csv_config(path, header=False, columns=["label", "x", "c", "d"])
    refused(run_ingest, config, "wrong number of fields", "data.separator=")
    path.write_text("label,x,c\n1,?,a\n0,?,a\n")
    refused(run_ingest, csv_config(path), "x is not a finite number", "data.missing=[")


def test_a_column_of_shares_or_weights_that_holds_none_is_named(run_ingest, tmp_path):
    (tmp_path / "a.csv").write_text("label,x,c,w\n" + "1,1,a,-2\n0,1,b,-2\n" * 9)
    shares = csv_config(tmp_path / "a.csv", sampling=SamplingConfig(column="w"))
    refused(run_ingest, shares, "w is no share", "data.sampling.column=<")
    refused(run_ingest, csv_config(tmp_path / "a.csv", weight="w"), "w is no weight", "data.weight=<")


def test_one_class_only(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n" + "0,1,a\n0,2,b\n" * 9)
    refused(run_ingest, csv_config(path), "train rows have one class only: every label is '0'")
    config = csv_config(path, label=LabelConfig(positive="0", negative="1"))
    refused(run_ingest, config, "every label is '0'")


def test_no_train_rows(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c,d\n" + "0,1,a,1\n1,2,b,2\n" * 9)
    config = csv_config(path, day_column="d", split=SplitConfig(by="day", test_days=2))
    refused(run_ingest, config, "all 18 rows fall into the test split", "there are 2 days, the last 2 test")


def test_the_hint_of_a_log_of_one_row_changes_something(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    # This row is one of the fifth that is held out.
    path.write_text("label,x,c\n1,4,a\n")
    for share, hint in ((0.2, "more rows"), (0.9, "data.split.test_share=0.2, or more rows")):
        config = csv_config(path, split=SplitConfig(test_share=share))
        error = refused(run_ingest, config, "the only row falls into the test split, expected some train rows")
        assert error.hint == hint


def test_damaged_and_misnamed_files(run_ingest, tmp_path):
    text = write_rows(tmp_path / "a.csv", 5000).read_bytes()
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(text)[:-50])
    refused(run_ingest, csv_config(tmp_path / "cut.csv.gz"), "cut.csv.gz is damaged or cut off")
    (tmp_path / "no.csv.zst").write_bytes(text)
    refused(run_ingest, csv_config(tmp_path / "no.csv.zst"), "no.csv.zst is damaged")
    config = csv_config(tmp_path / "a.csv", format="parquet")
    refused(run_ingest, config, "a.csv is not a readable Parquet or ORC file", "data.format=csv")
    wide = pl.Series("x", [1, 2], dtype=pl.Int128)
    pl.DataFrame({"label": [0, 1], "c": ["a", "b"], "x": wide}).write_parquet(tmp_path / "wide.parquet")
    config = csv_config(tmp_path / "wide.parquet", format="parquet")
    refused(run_ingest, config, "wide.parquet holds what Arrow does not read: Integers with more than 64 bits")
    pl.DataFrame({"label": [1]}).write_parquet(tmp_path / "a.parquet")
    refused(run_ingest, csv_config(tmp_path / "a.parquet"), "is a Parquet file", "data.format=parquet")


def test_contradicting_settings(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv")
    for changes, part in (
        ({"separator": "::"}, "data.separator is '::'"),
        ({"header": False}, "data.columns is empty"),
        ({"dense": {"label": DenseFeature(column="x")}}, "called 'label'"),
        ({"label": LabelConfig(positive="1", negative="1")}, "are both '1'"),
    ):
        refused(run_ingest, csv_config(path, **changes), part, error=ConfigError)


def test_a_list_column_needs_a_separator(run_ingest, tmp_path):
    pl.DataFrame({"label": [1, 0], "x": [1, 2], "c": [["a"], ["b"]]}).write_parquet(tmp_path / "a.parquet")
    config = csv_config(tmp_path / "a.parquet", format="parquet")
    error = refused(run_ingest, config, "c is a list; data.sparse.c.holds=list makes it multi-valued")
    assert error.hint == "data.sparse.c.holds=list"


def test_nothing_is_left_behind(run_ingest, tmp_path, monkeypatch):
    spills = tmp_path / "spills"
    spills.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spills))
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n0,1,a\n")
    refused(run_ingest, csv_config(path), "one class only")
    assert not list(spills.iterdir())
    assert not [p for p in tmp_path.glob("store*/**/*") if p.is_file()]


def test_long_values_are_cut_in_reasons(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv")
    with path.open("a") as sink:
        sink.write("1," + "9" * 5000 + "x,a\n")
    dataset = run_ingest(csv_config(path))
    assert len(dataset.quarantine[0]["reason"]) < 120


def test_garbage_bytes_are_a_data_error(run_ingest, tmp_path):
    path = tmp_path / "garbage.csv"
    path.write_bytes(bytes(np.random.default_rng(3).integers(0, 256, 5000, dtype=np.uint8)) + b'"\r"\r\n')
    with pytest.raises(DataError):
        run_ingest(csv_config(path))


@pytest.mark.parametrize("name", ["a.b", "a/b"])
def test_a_feature_name_that_cannot_name_a_module_or_file_is_refused_early(run_ingest, tmp_path, name):
    path = tmp_path / "d.csv"
    path.write_text("label,c\n1,a\n0,b\n")
    with pytest.raises(ConfigError, match="'/' and '.' are not allowed|PyTorch reserves"):
        run_ingest(csv_config(path, sparse={name: SparseFeature(column="c")}))


def test_rows_that_differ_in_the_label_alone_stay_together(run_ingest, tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"{label},{c}" for c in range(200) for label in (0, 1)]
    path.write_text("\n".join(["label,c", *rows]) + "\n")
    dataset = run_ingest(csv_config(path, dense={}, split=SplitConfig(test_share=0.3)))
    test = dataset.split("test")
    assert 60 <= len(test) <= 180
    assert test["label"].mean() == 0.5
