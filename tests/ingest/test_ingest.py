"""The whole stage on small logs: what comes out, and that it never depends on how it was worked through."""

import gzip
import itertools
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import zstandard
from omegaconf import OmegaConf

from pipeline.config import Config, DenseFeature, LabelConfig, SparseDefaults, SparseFeature, SplitConfig
from pipeline.ingest.schema import CRITEO_COLUMNS
from pipeline.ingest.stage import raw_fingerprint
from pipeline.records import Profile

from .conftest import csv_config, write_rows

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared/data"
real_data = pytest.mark.real_data
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="the real data sets are not beside the project")


def yaml_config(name: str, *overrides: str) -> Config:
    """``conf/data/<name>.yaml`` over the schema, as Hydra composes it."""
    data = OmegaConf.load(REPOSITORY / f"conf/data/{name}.yaml")
    merged = OmegaConf.merge(
        OmegaConf.structured(Config),
        {"data": data, "hardware": {"name": "x"}, "model": {"name": "dlrm"}},
        OmegaConf.from_dotlist(list(overrides)),
    )
    return OmegaConf.to_object(merged)


def criteo_lines(rows: int) -> list[str]:
    rng = np.random.default_rng(3)
    lines = []
    for _ in range(rows):
        counts = [str(v) if rng.random() > 0.2 else "" for v in rng.integers(-2, 2000, 13)]
        ids = [f"{v:08x}" if rng.random() > 0.1 else "" for v in rng.integers(0, 40, 26)]
        lines.append("\t".join([str(int(rng.random() < 0.3)), *counts, *ids]))
    return lines


@needs_data
@real_data
def test_adult_is_accounted_for(run_ingest):
    dataset = run_ingest(yaml_config("adult", f"data.path={SHARED / 'adult.data'}"))
    assert dataset.summary["rows"] == 32_561
    assert dataset.summary["rows_quarantined"] == 0
    assert dataset.summary["rows_test"] / 32_561 == pytest.approx(0.2, abs=0.01)
    profile = Profile.from_json(dataset.json("profile.json"))
    assert profile.label_rate["train"] == pytest.approx(0.24, abs=0.01)
    assert 0.04 < profile.sparse["workclass"].missing_share < 0.07  # its '?' values
    assert "Private" in dataset.vocab("workclass")["id"][0]
    assert dataset.all_rows.select(dataset.schema.dense).to_numpy().std(axis=0) == pytest.approx(1, abs=0.05)


@needs_data
@real_data
def test_criteo_sample_is_accounted_for(run_ingest):
    dataset = run_ingest(yaml_config("criteo", f"data.path={SHARED / 'criteo_sample.tsv'}"))
    assert (dataset.summary["rows"], dataset.summary["rows_quarantined"]) == (1_999, 0)
    profile = Profile.from_json(dataset.json("profile.json"))
    assert profile.dense["I2"].minimum < 0
    assert profile.dense["I1"].missing_share > 0.1
    assert np.isfinite(dataset.all_rows.select(dataset.schema.dense).to_numpy()).all()


def test_columns_types_and_row_numbers(run_ingest, tmp_path):
    lines = ["label,x,c"] + [f"{i % 2},{i},{'hot' if i % 4 else 'cold'}" for i in range(400)]
    lines += ["1,,"] * 5
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines))
    dataset = run_ingest(csv_config(path, split=SplitConfig(test_share=0.0)))
    rows = dataset.split("train")
    assert rows.schema == {"label": pl.Float32, "x": pl.Float32, "c": pl.Int32}
    assert dataset.vocab("c").select("id", "row", "count").rows() == [("hot", 2, 300), ("cold", 3, 100)]
    assert dataset.vocab("c").schema["hash"] == pl.UInt64
    assert rows["c"].to_list()[:5] == [3, 2, 2, 2, 3]
    assert rows["c"].to_list()[-5:] == [0] * 5  # missing
    assert rows["x"].to_list()[-5:] == [0.0] * 5  # missing: the mean
    assert dataset.schema.sparse[0].rows == 4
    assert dataset.schema.rows == {"train": 405, "test": 0}


def test_negative_counts_are_logged_by_their_size(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n1,-3,a\n0,0,a\n1,7,a\n")
    config = csv_config(path, dense_transform="log1p", split=SplitConfig(test_share=0.0))
    rows = run_ingest(config).split("train")
    assert rows["x"].to_list() == pytest.approx([-np.log(4), 0, np.log(8)])


@pytest.mark.parametrize(("transform", "expected"), [("none", [1, 3]), ("standardise", [-1, 1])])
def test_other_transforms(run_ingest, tmp_path, transform, expected):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c\n1,1,a\n0,3,a\n")
    config = csv_config(path, dense={"x": DenseFeature(transform=transform)}, split=SplitConfig(test_share=0.0))
    assert run_ingest(config).split("train")["x"].to_list() == expected


def test_statistics_and_vocabulary_come_from_train_rows_only(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    lines = ["label,x,c,day"] + [f"{i % 2},{i % 3},seen,1" for i in range(30)] + ["1,1000000,new,2"] * 5
    path.write_text("\n".join(lines))
    dataset = run_ingest(csv_config(path, day_column="day", split=SplitConfig(by="day")))
    assert dataset.schema.rows == {"train": 30, "test": 5}
    assert dataset.vocab("c")["id"].to_list() == ["seen"]
    assert dataset.split("test")["c"].to_list() == [1] * 5
    assert dataset.split("test")["day"].to_list() == [2] * 5
    profile = Profile.from_json(dataset.json("profile.json"))
    assert profile.dense["x"].maximum == 2
    assert profile.sparse["c"].distinct == 1
    assert profile.label_rate == {"train": 0.5, "test": 1.0}


DAYS = (
    ("timestamp", [86_400, 2 * 86_400 + 5, 3 * 86_400]),
    ("timestamp", ["1970-01-02 10:00:00", "1970-01-03", "1970-01-04"]),
    ("day_column", ["1970-01-02", "1970-01-03", "1970-01-04"]),
    ("timestamp", [86_400_000_000, 2e12, 3e12]),
    ("timestamp", [19_700_102, 19_700_103, 19_700_104]),
    ("day_column", [19_700_102, 19_700_103, 19_700_104]),
)


@pytest.mark.parametrize(("field", "days"), DAYS)
def test_days_come_from_numbers_dates_and_timestamps(run_ingest, tmp_path, field, days):
    path = tmp_path / "a.csv"
    lines = ["label,x,c,t"] + [f"{i % 2},{i},a,{days[i % 3]}" for i in range(30)] + ["1,1,a,tomorrow"]
    path.write_text("\n".join(lines))
    dataset = run_ingest(csv_config(path, **{field: "t"}, split=SplitConfig(by="day", test_days=2)))
    assert dataset.schema.rows == {"train": 10, "test": 20}
    assert dataset.quarantine[0]["reason"].startswith("t is 'tomorrow', expected a number or YYYY-MM-DD")
    if days[0] != 86_400_000_000:
        assert dataset.split("train")["day"].unique().to_list() == [1]


@pytest.mark.parametrize("unit", [1, 1_000, 1_000_000, 1_000_000_000])
def test_timestamps_are_numbers_of_any_unit(run_ingest, tmp_path, unit):
    lines = [f"{i % 3 % 2},{i},a,{(1_767_225_600 + i % 2 * 86_400) * unit}" for i in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["label,x,c,t", *lines]))
    dataset = run_ingest(csv_config(tmp_path / "a.csv", timestamp="t", split=SplitConfig(by="day")))
    assert dataset.all_rows["day"].unique().sort().to_list() == [20_454, 20_455]


def test_caps_and_rare_ids_share_the_unseen_row(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    ids = [f"v{i}" for i in range(10) for _ in range(i + 1)]
    path.write_text("\n".join(["label,x,c", *(f"{i % 2},1,{v}" for i, v in enumerate(ids))]))
    sparse = {"c": SparseFeature(rows=6, min_count=3), "h": SparseFeature(column="c", mapping="hash", rows=5000)}
    dataset = run_ingest(csv_config(path, sparse=sparse, split=SplitConfig(test_share=0.0)))
    assert dataset.vocab("c")["id"].to_list() == ["v9", "v8", "v7", "v6"]
    assert dataset.split("train")["c"].to_list()[:21] == [1] * 21
    hashed = dataset.split("train")["h"]
    assert hashed.min() >= 2 and hashed.max() < 5000 and hashed.n_unique() == 10
    profile = Profile.from_json(dataset.json("profile.json"))
    assert profile.sparse["c"].hot_share[0] == pytest.approx(21 / 55)  # the shared row is the hottest
    assert profile.sparse["h"].distinct == 10
    assert [column.rows for column in dataset.schema.sparse] == [6, 5000]


def test_multi_valued_and_weighted_features(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,x,c,t\n1,1,a|b|a,p:2|q\n0,1,,\n1,1,b||?,q:0.5\n0,1,a,p:heavy\n0,1,a,p:-1\n")
    sparse = {"c": SparseFeature(separator="|"), "t": SparseFeature(separator="|", weight_separator=":")}
    config = csv_config(path, sparse=sparse, missing=["", "?"], split=SplitConfig(test_share=0.0))
    dataset = run_ingest(config)
    rows = dataset.split("train")
    ids = dict(dataset.vocab("c").select("id", "row").rows())
    assert rows["c"].to_list() == [[ids["a"], ids["b"], ids["a"]], [0], [ids["b"]], [ids["a"]]]
    assert rows["t__weight"].to_list() == [[2, 1], [1], [0.5], [-1]]
    assert [len(bag) for bag in rows["t"]] == [2, 1, 1, 1]
    assert [(c.multi, c.weighted) for c in dataset.schema.sparse] == [(True, False), (True, True)]
    assert dataset.quarantine == [
        {"file": "a.csv", "line": 5, "reason": "t has weight 'heavy', expected a finite number"}
    ]
    profile = Profile.from_json(dataset.json("profile.json"))
    assert profile.sparse["c"].pooling == 6 / 4 and profile.sparse["c"].missing_share == 0.25
    first = pq.read_schema(dataset.store.full(f"{dataset.artifact.path}/{dataset.schema.files['train'][0]}"))
    assert str(first.field("c").type).startswith("list<") and str(first.field("t__weight").type).startswith("list<")


def test_what_does_not_parse_is_quarantined_with_its_line(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    good = [f"{i % 2},{i},a" for i in range(20)]
    bad = ["2,1,a", "1,many,a", "", "1,2", ",1,a", "1,inf,a", "1,1,a,b", "1,nan,a", "1,1e300,a"]
    data = "\n".join(["label,x,c", *good, *bad, *good]).encode() + b"\n1,1,\xff\xfe\n\n\n"
    path.write_bytes(data)
    dataset = run_ingest(csv_config(path))
    assert dataset.summary["rows"] == 50 and dataset.summary["rows_quarantined"] == 10
    assert [(entry["line"], entry["reason"]) for entry in dataset.quarantine] == [
        (22, "label is '2', expected '1' or '0'"),
        (23, "x is 'many', expected a finite number"),
        (24, "the line is empty"),
        (25, "2 fields, expected 3"),
        (26, "label is '', expected '1' or '0'"),
        (27, "x is 'inf', expected a finite number"),
        (28, "4 fields, expected 3"),
        (29, "x is 'nan', expected a finite number"),
        (30, "x is '1e300', expected a finite number"),
        (51, "the line is not valid UTF-8"),
    ]
    assert {entry["file"] for entry in dataset.quarantine} == {"a.csv"}


@pytest.mark.slow
def test_the_same_log_gives_the_same_bytes_whatever_the_block_size(run_ingest, tmp_path, monkeypatch):
    lines = criteo_lines(3000)
    lines[17] = "broken"
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(lines))
    checksums = []
    for block_bytes in (1 << 20, 1 << 20, 9_000, 100_001):
        monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", block_bytes)
        config = yaml_config(
            "criteo", f"data.path={path}", "ingest.block_mib=1", "ingest.rows_per_group=700", "ingest.groups_per_file=2"
        )
        dataset = run_ingest(config)
        checksums.append(dataset.checksums)
    assert all(other == checksums[0] for other in checksums)
    assert dataset.schema.groups["train"][0] == [700, 700]
    assert len(dataset.schema.files["train"]) == 2
    files = dataset.schema.files["train"]
    for name, groups in zip(files, dataset.schema.groups["train"], strict=True):
        meta = pq.read_metadata(dataset.store.full(f"{dataset.artifact.path}/{name}"))
        assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == groups


def test_ids_counted_on_disk_get_the_rows_that_they_get_in_memory(run_ingest, tmp_path, monkeypatch):
    ids = (1200 * np.random.default_rng(4).random(6000) ** 2).astype(int)
    lines = [f"{i % 2},{i},user{number}" for i, number in enumerate(ids)]
    (tmp_path / "log.csv").write_text("\n".join(["label,x,c", *lines]) + "\n")
    config = csv_config(tmp_path / "log.csv", sparse={"c": SparseFeature(rows=300, min_count=2)})
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 700)
    in_memory = run_ingest(config)
    monkeypatch.setattr("pipeline.ingest.counts.IDS_IN_MEMORY", 100)
    monkeypatch.setattr("pipeline.ingest.counts._MERGE_ROWS", 50)
    on_disk = run_ingest(config)
    assert on_disk.checksums == in_memory.checksums
    assert len(in_memory.vocab("c")) == 298


def test_a_row_falls_into_the_same_split_in_every_format_and_order(run_ingest, tmp_path):
    lines = criteo_lines(400)
    tsv, parquet = tmp_path / "a.tsv", tmp_path / "a.parquet"
    tsv.write_text("\n".join(lines[::-1]))
    rows = [[value or None for value in line.split("\t")] for line in lines]
    frame = pl.DataFrame(rows, schema=dict.fromkeys(CRITEO_COLUMNS, pl.String), orient="row")
    frame.with_columns(pl.col("^I.*$").cast(pl.Int32), pl.col("label").cast(pl.Int8)).write_parquet(parquet)
    first = run_ingest(yaml_config("criteo", f"data.path={tsv}"))
    second = run_ingest(yaml_config("criteo", f"data.path={parquet}", "data.format=parquet"))
    assert first.split("test").rows()[::-1] == second.split("test").rows()
    assert first.split("train").rows()[::-1] == second.split("train").rows()


@pytest.mark.parametrize(
    ("where", "suffix"),
    [
        ("local", ".zst"),
        ("memory", ".gz"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("local", ""), ("local", ".gz"), ("memory", ""), ("memory", ".zst"))
        ),
    ],
)
def test_directories_and_globs_of_compressed_files(run_ingest, tmp_path, suffix, where):
    root = str(tmp_path / "logs") if where == "local" else f"memory://logs{suffix}"
    fs, base = fsspec.core.url_to_fs(root)
    fs.makedirs(base, exist_ok=True)
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    lines = criteo_lines(90)
    for number in range(3):
        part = "\n".join(lines[number * 30 : number * 30 + 30]).encode()
        half = part.find(b"\n", len(part) // 2)
        # Two members or frames in one file: log shippers append.
        fs.pipe_file(f"{base}/day{number}.tsv{suffix}", pack(part[:half]) + pack(part[half:]))
    fs.pipe_file(f"{base}/_SUCCESS", b"")
    checksums = [
        run_ingest(yaml_config("criteo", f"data.path={path}")).checksums for path in (root, f"{root}/day*.tsv{suffix}")
    ]
    assert checksums[0] == checksums[1]
    whole = tmp_path / "whole.tsv"
    whole.write_text("\n".join(lines))
    assert run_ingest(yaml_config("criteo", f"data.path={whole}")).checksums == checksums[0]


def test_csv_dialects(run_ingest, tmp_path):
    plain = write_rows(tmp_path / "plain.csv", 50)
    text = plain.read_text()
    (tmp_path / "semicolon.csv").write_bytes(b"\xef\xbb\xbf" + text.replace(",", ";").replace("\n", "\r\n").encode())
    (tmp_path / "tab.csv").write_text(text.replace(",", "\t"))
    (tmp_path / "quoted.csv").write_text(text.replace(",", '","').replace("\n", '"\n"')[:-1].join(['"', ""]))
    (tmp_path / "bare.csv").write_text(text.split("\n", 1)[1].replace(",", " , "))
    expected = run_ingest(csv_config(plain)).all_rows
    configs = [
        csv_config(tmp_path / "semicolon.csv", separator=";"),
        csv_config(tmp_path / "tab.csv", separator="\\t"),
        csv_config(tmp_path / "quoted.csv"),
        csv_config(tmp_path / "bare.csv", header=False, columns=["label", "x", "c"], strip=True),
    ]
    for config in configs:
        dataset = run_ingest(config)
        assert dataset.summary["rows_quarantined"] == 0, config.data.path
        assert dataset.all_rows.equals(expected), config.data.path


def test_parquet_with_typed_columns(run_ingest, tmp_path):
    frame = pl.DataFrame(
        {
            "click": [True, False, None, True],
            "x": [1.5, float("nan"), 2.0, float("inf")],
            "user": [7, 8, 9, None],
            "tags": [["a", "b"], [], ["a"], None],
            "unused": [1, 2, 3, 4],
        }
    )
    (tmp_path / "p").mkdir()
    frame.write_parquet(tmp_path / "p/a.parquet")
    config = csv_config(
        tmp_path / "p",
        format="parquet",
        label=LabelConfig(column="click"),
        sparse={"user": SparseFeature(), "tags": SparseFeature(separator=",")},
        split=SplitConfig(test_share=0.0),
    )
    dataset = run_ingest(config)
    assert dataset.split("train")["label"].to_list() == [1, 0]
    assert dataset.vocab("user")["id"].sort().to_list() == ["7", "8"]
    assert [len(bag) for bag in dataset.split("train")["tags"]] == [2, 1]
    assert [entry["line"] for entry in dataset.quarantine] == [3, 4]


def test_defaults_of_sparse_features(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv")
    config = csv_config(path, sparse_defaults=SparseDefaults(mapping="hash", rows=10))
    dataset = run_ingest(config)
    assert dataset.schema.sparse[0].rows == 10
    assert not any(name.startswith("vocab/") for name in dataset.artifact.files)
    assert dataset.json("transforms.json")["sparse"]["c"]["mapping"] == "hash"


def test_progress_and_fingerprint(run_ingest, tmp_path):
    path = write_rows(tmp_path / "a.csv")
    ticks = itertools.count()
    dataset = run_ingest(csv_config(path), now=lambda: float(next(ticks)))  # a second more each time it is asked
    assert "pass 1 of 2: 300 rows, 300 rows/s" in dataset.messages
    assert "pass 2 of 2: 300 of 300 rows, 300 rows/s" in dataset.messages
    assert dataset.summary["rows_per_s"] == round(300 / (next(ticks) - 1), 1)
    quick = run_ingest(csv_config(path), now=lambda: 0.0)
    assert not any("pass" in message for message in quick.messages)
    first = raw_fingerprint(csv_config(path).data)
    write_rows(path, 400)
    assert raw_fingerprint(csv_config(path).data) != first


@pytest.mark.parametrize("name", ["adult", "criteo", "csv", "parquet", "synthetic"])
def test_every_data_yaml_matches_the_schema(name):
    config = yaml_config(name)
    assert config.data.name == name
    assert config.data.format in ("csv", "criteo", "parquet", "synthetic")


def test_row_groups_of_many_columns_have_fewer_rows(tmp_path, run_ingest, monkeypatch):
    monkeypatch.setattr("pipeline.ingest.output._GROUP_BYTES", 1024 * 4 * 72)
    names = [f"x{number}" for number in range(70)]
    lines = [
        ",".join([str(row % 2), f"id{row % 9}", *(str(row * at % 97 / 8) for at in range(70))]) for row in range(3000)
    ]
    (tmp_path / "log.csv").write_text("\n".join([",".join(["label", "c", *names]), *lines]) + "\n")
    config = csv_config(tmp_path / "log.csv", dense={name: DenseFeature() for name in names})
    made = run_ingest(config)
    assert {size for sizes in made.schema.groups["train"] for size in sizes[:-1]} == {1024}
    monkeypatch.setattr("pipeline.ingest.file_source.WIDE", 10)  # smaller blocks, same bytes
    assert run_ingest(config).checksums == made.checksums
