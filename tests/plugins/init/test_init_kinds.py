"""``nightjar init`` on columns of several values, Avro, partitions and quoted line breaks: the YAML runs unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import fastavro
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import cli
from pipeline.core.errors import DataError
from pipeline.plugins.init.columns import text_vector, with_maps
from pipeline.plugins.init.sample import read_sample
from tests.plugins.init.test_init import by_name, clicks, composed, guessed

ROWS = 1500


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(rows: int = ROWS) -> list[dict[str, object]]:
    """A log with a column of every kind."""
    rng = np.random.default_rng(5)
    made: list[dict[str, object]] = []
    for at in range(rows):
        topics = [f"t{topic}" for topic in rng.choice(40, rng.integers(0, 4), replace=False)]
        interests = {
            f"i{one}": round(float(rng.random()), 3) for one in rng.choice(25, rng.integers(1, 4), replace=False)
        }
        unit = rng.normal(size=4)
        made.append(
            {
                "clicked": int(rng.random() < 0.3),
                "user_id": int(rng.integers(0, 200)),
                "pages": [int(page) for page in rng.integers(0, 50, at % 4)],
                "topics": topics,
                "topic_scores": [round(float(score), 3) for score in rng.random(len(topics))],
                "interests": interests if at % 9 else None,
                "embedding": [round(float(each), 4) for each in rng.normal(size=8)] if at % 7 else None,
                "direction": [float(each) for each in unit / np.linalg.norm(unit)],
                "spare": [float(each) + 0.5 for each in rng.integers(0, 9, rng.integers(1, 6))],
            }
        )
    return made


def write(kind: str) -> str:
    """The log in the working directory, as a file of ``kind``."""
    if kind == "jsonl":
        Path("log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    elif kind == "avro":
        lists = {
            "pages": "long",
            "topics": "string",
            "topic_scores": "double",
            "embedding": "double",
            "direction": "double",
            "spare": "double",
        }
        fields = [{"name": name, "type": ["null", {"type": "array", "items": inner}]} for name, inner in lists.items()]
        fields += [{"name": name, "type": "long"} for name in ("clicked", "user_id")]
        fields.append({"name": "interests", "type": ["null", {"type": "map", "values": "double"}]})
        with Path("log.avro").open("wb") as sink:
            fastavro.writer(sink, {"type": "record", "name": "click", "fields": fields}, records(), codec="deflate")
    else:
        pairs = [{**one, "interests": list((one["interests"] or {}).items()) or None} for one in records()]  # type: ignore[attr-defined]
        columns = {name: [one[name] for one in pairs] for name in pairs[0]}
        kinds = {"interests": pa.map_(pa.string(), pa.float32()), "embedding": pa.list_(pa.float32(), 8)}
        pq.write_table(
            pa.table({name: pa.array(values, kinds.get(name)) for name, values in columns.items()}), "log.parquet"
        )
    return f"log.{kind}"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "avro"])
def test_every_kind_of_column_is_told_and_the_schema_runs_as_it_is(work, run_ingest, kind):
    path = write(kind)
    assert cli.main(["init", path]) == 0
    schema = guessed(path)
    assert by_name(schema, "dense")["embedding"] == {"width": 8}
    assert by_name(schema, "dense")["direction"] == {"width": 4, "transform": "none"}
    sparse = by_name(schema, "sparse")
    assert sparse["pages"] == {"holds": "list"} and sparse["interests"] == {"holds": "map"}
    assert sparse["topics"] == {"weights": "topic_scores"}
    assert {guess.column: guess.seen for guess in schema.of("out")} == {
        "topic_scores": "not a feature of its own: the weights of topics",
        "spare": next(guess.seen for guess in schema.of("out") if guess.column == "spare"),
    }
    dataset = run_ingest(composed("log"))
    assert dataset.summary["rows"] == ROWS
    assert [(c.name, c.weighted) for c in dataset.schema.sparse if c.multi] == [
        (name, name != "pages") for name in ("pages", "topics", "interests") if name in sparse
    ] or kind == "avro"
    assert {"embedding_7", "direction_3"} <= set(dataset.schema.dense)
    assert not np.isnan(dataset.all_rows.select(dataset.schema.dense).to_numpy()).any()


@pytest.mark.parametrize(
    "others",
    [
        {"pages": "none"},
        {"pages": {"first": 1}},
        {"interests": [1, 2]},
        {"user_id": {"id": 1}},
        {"topics": 7, "pages": {}},
    ],
)
def test_a_few_lines_with_values_of_another_kind_change_no_guess(work, others):
    lines = records(2000)
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sound = guessed("log.jsonl")
    lines[700] |= others
    lines[1400] |= others
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_sample("log.jsonl").bad == 2
    broken = guessed("log.jsonl")
    assert [(guess.name, guess.kind, guess.settings.keys()) for guess in broken.features] == [
        (guess.name, guess.kind, guess.settings.keys()) for guess in sound.features
    ]


def test_lines_that_are_left_out_do_not_shift_the_booleans_of_others(work):
    """A column of words and booleans is text, and each of its values is looked up in its own line."""
    lines = [{"clicked": bool(at % 3) if at % 2 else "true", "t": ["a"]} for at in range(1000)]
    expected = [str(int(bool(at % 3))) if at % 2 else "true" for at in range(1, 1000)]
    lines[0]["t"] = {"a": 1}
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = read_sample("log.jsonl")
    assert sample.bad == 1 and sample.frame["clicked"].to_list() == expected


def test_a_column_of_text_and_lists_is_read_as_it_is(work):
    lines = [{"clicked": at % 2, "c": f"u{at % 9}", "t": ["a", "b"] if at % 3 else "a"} for at in range(600)]
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = read_sample("log.jsonl")
    assert (sample.rows, sample.bad) == (600, 0) and sample.frame["t"].dtype == pl.String


def test_vectors_in_text(work, run_ingest):
    rng = np.random.default_rng(2)
    near, far = rng.normal(size=(400, 3)).round(3).tolist(), rng.random((400, 4)).tolist()
    lines = [f'{at % 2},u{at % 9},"{near[at]}",{";".join(map(str, far[at]))}' for at in range(400)]
    Path("log.csv").write_text("label,user,near,far\n" + "\n".join(lines) + "\n")
    assert cli.main(["init", "log.csv"]) == 0
    assert by_name(guessed("log.csv"), "dense") == {"near": {"width": 3}, "far": {"width": 4, "separator": ";"}}
    assert len(run_ingest(composed("log")).schema.dense) == 7
    assert text_vector(pl.Series(["1;2;3", "4;5;6"])) is None  # whole numbers are ids
    assert text_vector(pl.Series(["0.1;0.2", "0.1;0.2;0.3"])) is None


def test_durations_are_numbers_of_their_units(work, run_ingest):
    """Polars has no text for them."""
    rng = np.random.default_rng(3)
    dwell = pl.Series("dwell", rng.integers(0, 10_000, 400)).cast(pl.Duration("ms"))
    log = pl.DataFrame({"label": rng.integers(0, 2, 400), "user": [f"u{at % 9}" for at in range(400)], "dwell": dwell})
    log.write_parquet("log.parquet")
    assert cli.main(["init", "log.parquet"]) == 0
    assert "dwell" in by_name(guessed("log.parquet"), "dense")
    made = run_ingest(composed("log", "++data.dense.dwell.transform=none", "+data.sparse.again={column: dwell}"))
    assert made.summary["rows_quarantined"] == 0
    assert set(made.all_rows["dwell"].to_list()) == set(dwell.cast(pl.Int64).to_list())
    assert set(made.vocab("again")["id"].to_list()) <= set(dwell.cast(pl.Int64).cast(pl.String).to_list())
    for kind in (pl.Duration("ms"), pl.Time):
        log.with_columns(at=dwell.cast(pl.Int64).cast(kind)).write_parquet("log.parquet")
        with pytest.raises(DataError, match="none of the 400 rows .* at is '.*', expected a number or YYYY-MM-DD"):
            run_ingest(composed("log", "++data.timestamp=at"))


def test_objects_of_changing_keys_are_maps_and_others_records():
    frame = pl.DataFrame({"m": [{"a": 1.0, "b": None}, {"a": None, "b": 2.0}, None], "r": [{"a": 1, "b": 2}] * 3})
    found = with_maps(frame)
    assert found["m"].to_list() == [[{"key": "a", "value": 1.0}], [{"key": "b", "value": 2.0}], None]
    assert found["r"].dtype == pl.Struct


def test_partitions_are_the_day_the_hour_and_features(work, run_ingest):
    log = clicks(4000).drop("time", "event")
    for number, day in enumerate(("2026-01-30", "2026-01-31")):
        for hour in range(3, 5):
            for region in ("eu", "us"):
                folder = Path(f"logs/date={day}/hour={hour:02}/region={region}")
                folder.mkdir(parents=True)
                log[number * 2000 :: 7].write_parquet(folder / "part-0.parquet")
    assert cli.main(["init", "logs", "--name", "parts"]) == 0
    config = composed("parts", "data.day=2026-01-31", "data.split.by=hours", "data.split.test_hours=20")
    assert config.data.path == "logs/date={day}/*/*/*"
    assert config.data.hour_column == "hour" and "region" in config.data.sparse
    dataset = run_ingest(config)
    assert dataset.summary["rows"] > 500 and dataset.summary["rows_test"] == dataset.summary["rows"] // 2
    assert set(dataset.vocab("region")["id"]) == {"eu", "us"}


def test_line_breaks_in_quotes_are_no_rows(work, run_ingest):
    lines = [f'{at % 2},"k {at % 5}\nof ""many"", lines",{at % 11}' for at in range(300)]
    Path("log.csv").write_text("label,text,n\n" + "\n".join(lines) + "\n")
    assert cli.main(["init", "log.csv"]) == 0
    assert guessed("log.csv").label.column == "label"
    dataset = run_ingest(composed("log"))
    assert dataset.summary["rows"] == 300 and dataset.vocab("text").height == 5
