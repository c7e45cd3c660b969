"""``nightjar init``: a schema guessed from a sample, that composes, ingests every row, and says what it saw."""

import gzip
import json
import lzma
import re
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline import cli
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import DataError
from pipeline.plugins.init.infer import Schema, infer
from pipeline.plugins.init.sample import day_pattern, has_header, read_sample, text_format

SHARED = Path(__file__).parents[4] / "shared/data"


def clicks(rows: int = 4000) -> pl.DataFrame:
    """A log of what a guess must tell apart."""
    rng = np.random.default_rng(7)
    ad, amount = rng.integers(0, 40, rows), rng.choice([3, 10, 700, 5013], rows)
    clicked = (rng.random(rows) < np.where(ad % 5 == 0, 0.5, 0.1) + 0.3 * (amount == 10)).astype(int)
    tags = [
        "|".join(f"t{tag}:{weight:.1f}" for tag, weight in zip(rng.integers(0, 30, n), rng.random(n), strict=True))
        for n in rng.integers(0, 5, rows)
    ]
    return pl.DataFrame(
        {
            "event": [f"{value:032x}" for value in range(rows)],
            "time": [str(datetime(2026, 1, 3) + timedelta(seconds=20 * i)) for i in range(rows)],
            "user_id": rng.integers(0, 900, rows),
            "ad": [f"a{number:03}" for number in ad],
            "zone": [f"{number:04}" for number in ad // 4],
            "price": np.round(rng.lognormal(1, 1.5, rows), 2),
            "age": np.round(rng.normal(40, 5, rows)),
            "amount": amount,
            "tags": tags,
            "site": ["main"] * rows,
            "paid": np.where(clicked, rng.integers(1, 9, rows), 0),
            "clicked": clicked,
        }
    )


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def guessed(path: Path | str, label: str | None = None) -> Schema:
    return infer(read_sample(str(path)), label)


def by_name(schema: Schema, kind: str) -> dict[str, dict[str, int | str]]:
    return {guess.name or guess.column: guess.settings for guess in schema.of(kind)}


def composed(name: str, *overrides: str) -> Config:
    return compose([f"data={name}", "stages=[ingest]", "data.max_quarantine_share=0", *overrides])


@pytest.mark.parametrize(
    "end", [".csv.gz", ".parquet", *(pytest.param(end, marks=pytest.mark.slow) for end in (".csv", ".jsonl.xz"))]
)
def test_columns_are_told_apart_and_the_schema_runs_as_it_is(work, run_ingest, capsys, end):
    log = clicks()
    if end == ".parquet":
        log.write_parquet("log.parquet")
    elif end == ".jsonl.xz":
        Path("log.jsonl.xz").write_bytes(lzma.compress(log.write_ndjson().encode()))
    else:
        text = log.write_csv().encode()
        Path(f"log{end}").write_bytes(gzip.compress(text) if end.endswith(".gz") else text)
    assert cli.main(["init", f"log{end}"]) == 0
    out = capsys.readouterr().out
    assert "nightjar run data=log run=first" in out and "nightjar nightly data=log date=2026-01-03" in out
    assert "publishes nothing: about 800 rows of so small a log are held out, and the gate wants 1,000" in out
    schema = guessed(f"log{end}")
    assert (schema.label.column, schema.positive, schema.negative) == ("clicked", "1", "0")
    assert schema.time is not None and schema.time.column == "time"
    assert set(by_name(schema, "dense")) == {"price", "age", "amount"}
    (why,) = (guess.seen for guess in schema.of("sparse") if guess.name == "amount-value")
    assert re.fullmatch(r"a whole number with few values, \d+", why), "bins of them say as much"
    sparse = by_name(schema, "sparse")
    assert set(sparse) >= {"user_id", "ad", "zone", "amount-value", "tags"}, "leading zeros make an id"
    assert sparse["tags"]["separator"] == "|" and sparse["tags"]["weight_separator"] == ":"
    assert 1700 <= int(sparse["user_id"]["rows"]) <= 1900, "twice the distinct ids"
    assert schema.transform == "standardise" and by_name(schema, "dense")["price"] == {"transform": "log1p_standardise"}
    out_of_it = {guess.column: guess.seen for guess in schema.of("out")}
    assert set(out_of_it) == {"event", "site", "paid"}
    assert "names the row" in out_of_it["event"] and "one value only" in out_of_it["site"]
    assert "alone predicts the label" in out_of_it["paid"]
    written = Path("my/data/log.yaml").read_text()
    assert all(f"#   {name}: {why}" in written for name, why in out_of_it.items())
    dataset = run_ingest(composed("log"))  # found in my/ without -cd
    assert dataset.summary["rows"] == log.height and dataset.quarantine == []
    assert {column.name for column in dataset.schema.sparse} == set(sparse)


@pytest.mark.parametrize("label", [None, "clicked"])
def test_what_follows_a_click_is_no_feature_of_it_and_no_label_by_itself(work, run_ingest, capsys, label):
    rng = np.random.default_rng(5)
    clicked = rng.random(3000) < 0.3
    bought = clicked & (rng.random(3000) < 0.3)
    pl.DataFrame(
        {
            "ad": rng.integers(0, 30, 3000).astype(str),
            "clicked": clicked.astype(int),
            "bought": bought.astype(int),
            "paid": np.where(bought, "yes", "no"),
            "price": rng.random(3000).round(2),
            "stay": np.where(bought, rng.integers(1, 60, 3000), 0),
        }
    ).write_csv("log.csv")
    assert cli.main(["init", "log.csv", *(["--label", label] if label else [])]) == 0
    assert "3 columns left out" in capsys.readouterr().out
    schema = guessed("log.csv", label)
    assert schema.label.column == "clicked"
    why = {guess.column: guess.seen for guess in schema.of("out")}
    assert "tasks: {bought: {given: click}}" in why["bought"] and "known only after the click" in why["stay"]
    assert 'tasks: {paid: {given: click, positive: "yes", negative: "no"}}' in why["paid"]
    tasks = "+data.tasks={bought: {given: click}, paid: {given: click, positive: 'yes', negative: 'no'}}"
    assert run_ingest(composed("log", tasks)).quarantine == [], "the tasks work as they are written"


def test_a_log_without_a_header_gets_names_for_its_columns(work, run_ingest):
    clicks().drop("event").write_csv("log.data", include_header=False, separator=";")
    assert cli.main(["init", "log.data", "--label", "column_11", "--name", "raw"]) == 0
    config = composed("raw")
    assert config.data.separator == ";" and not config.data.header and len(config.data.columns) == 11
    assert run_ingest(config).summary["rows"] == 4000


def test_parquet_of_mixed_columns(work, run_ingest):
    rows = 500
    draw = np.random.default_rng(3)
    pl.DataFrame(
        {
            "ids": [[f"i{j % 9}" for j in range(i % 4)] for i in range(rows)],
            "vector": [[0.5, 1.5]] * rows,
            "made": [{"a": 1}] * rows,
            "day": draw.integers(0, 9, rows),
            "x/y": draw.choice(["p", "q", "r"], rows),
            "half": [1.5 if i % 3 else None for i in range(rows)],
            "seen_at": [datetime(2026, 1, 1) + timedelta(hours=i) for i in range(rows)],
            "empty": pl.Series([None] * rows, dtype=pl.String),
            "bought": draw.random(rows) < 0.3,
        }
    ).write_parquet("mixed.parquet")
    assert cli.main(["init", "mixed.parquet"]) == 0
    schema = guessed("mixed.parquet")
    left_out = {guess.column: guess.seen for guess in schema.of("out")}
    assert set(left_out) == {"made", "half", "empty"} and by_name(schema, "dense")["vector"] == {"width": 2}
    assert "always empty" in left_out["empty"]
    assert "or none" in left_out["half"]
    config = composed("mixed")
    assert config.data.timestamp == "seen_at" and config.data.label.column == "bought"
    assert config.data.sparse["x_y"].column == "x/y" and config.data.dense["day_id"].column == "day"
    assert run_ingest(config).summary["rows"] == rows


def test_a_column_of_days_is_the_time_and_a_feature_only_by_choice(work):
    lines = [f"2026-01-{1 + i % 28:02},v{i % 5},{int(i % 3 == 0)}" for i in range(300)]
    Path("log.csv").write_text("date,c,late\n" + "\n".join(lines) + "\n")
    assert cli.main(["init", "log.csv"]) == 0
    assert "#  date: {column: date}  # a day that was seen says nothing" in Path("my/data/log.yaml").read_text()
    config = composed("log")
    assert config.data.timestamp == "date" and set(config.data.sparse) == {"c"}


def test_words_for_a_missing_number_are_told(work):
    lines = [
        f"{i % 2},{'NA' if i % 5 == 0 else i % 7},{'?' if i % 9 == 0 else f'v{i % 3}'},NA{i % 2}" for i in range(300)
    ]
    Path("log.csv").write_text("label,n,c,region\n" + "\n".join(lines) + "\n")
    schema = guessed("log.csv", "label")
    assert schema.missing == ("?", "NA")
    assert "n" in by_name(schema, "dense") and "20.0% missing" in schema.of("dense")[0].seen


def test_decimal_commas_are_numbers_and_dates_of_other_forms_are_told(work, run_ingest):
    """Such as a program of another language writes them."""
    lines = [
        f"{i % 2};{i % 90},{i % 7}5;{1 + i % 28:02d}.01.2026 10:00;{1 + i % 28}.1.2026 10h;{i % 5},{i % 3};n/a;"
        f"c{i // 2 % 3}"
        for i in range(400)
    ]
    Path("log.csv").write_text("label;price;when;at;pair;none;c\n" + "\n".join(lines) + "\n")
    schema = guessed("log.csv", "label")
    assert schema.decimal == "," and set(by_name(schema, "dense")) == {"price", "pair"}
    seen = {guess.column: guess.seen for guess in schema.of("out")}
    assert schema.time is not None and (schema.time.column, schema.time_format) == ("when", "%d.%m.%Y %H:%M")
    assert "dates are no feature" in seen["at"] and "data.time_format" in seen["at"]
    assert cli.main(["init", "log.csv", "--label", "label"]) == 0
    assert composed("log").data.decimal == ","
    points = ["1.5" if i else "x" for i in range(40)]
    Path("other.csv").write_text("label;price;point\n" + "".join(f"{i % 2};{i},5;{p}\n" for i, p in enumerate(points)))
    assert guessed("other.csv", "label").decimal == "."


@pytest.mark.parametrize(
    ("label", "form"),
    [
        (None, "%Y-%m-%d %H:%M:%S"),
        ("clicked", "%d.%m.%Y %H:%M"),
        pytest.param(None, "%d.%m.%Y %H:%M", marks=pytest.mark.slow),
        pytest.param("clicked", "%Y-%m-%d %H:%M:%S", marks=pytest.mark.slow),
    ],
)
def test_a_few_broken_values_hide_neither_the_label_nor_the_time(work, run_ingest, form, label):
    log = clicks().drop("paid", "event")
    written = [datetime.fromisoformat(time).strftime(form) for time in log["time"]]
    said = log["clicked"].cast(pl.String).to_list()
    written[50], said[70], said[90] = "yesterday", "perhaps", ""
    log.with_columns(pl.Series("time", written), pl.Series("clicked", said)).write_csv("log.csv")
    schema = guessed("log.csv", label)
    assert (schema.label.column, schema.positive, schema.negative) == ("clicked", "1", "0")
    assert schema.time is not None and schema.time.column == "time"
    assert schema.time_format == (None if form.startswith("%Y") else form)
    if not schema.time_format:
        assert schema.days is not None and schema.days[1] == "2026-01-03"
    assert cli.main(["init", "log.csv"]) == 0
    dataset = run_ingest(compose(["data=log", "stages=[ingest]", "data.day=2026-01-03"]))
    assert [entry["line"] for entry in dataset.quarantine] == [52, 72, 92]


@pytest.mark.parametrize("unit", [1, 1_000, 1_000_000])
@pytest.mark.parametrize("broken", [["yesterday", "", "-5"], ["-5", "0", "99999999999999999999"], ["-5", "7", "8"]])
def test_a_few_broken_values_do_not_make_a_feature_of_the_clock(work, unit, broken):
    log = clicks().drop("paid", "event")
    times = [str((1_767_398_400 + 20 * row) * unit) for row in range(log.height)]
    times[50], times[70], times[90] = broken
    log.with_columns(pl.Series("time", times)).write_csv("log.csv")
    schema = guessed("log.csv")
    assert schema.time is not None and schema.time.column == "time"
    assert "time" not in [guess.column for guess in schema.features]
    assert schema.days == ("2026-01-03", "2026-01-03")


def test_a_row_id_of_a_log_with_repeated_rows_is_told_as_the_key_of_events(work):
    log = clicks().drop("paid")
    pl.concat([log, log[:300]]).write_csv("log.csv")
    seen = {guess.column: guess.seen for guess in guessed("log.csv").of("out")}
    assert "300 rows come again" in seen["event"] and "data.dedupe.key=event keeps the first" in seen["event"]
    assert set(seen) == {"event", "site"}


def test_one_date_tells_whether_the_day_or_the_month_comes_first(work):
    days = ["1/12/2026"] * 999 + ["1/13/2026"]
    pl.DataFrame({"when": days, "c": [i % 7 for i in range(1000)], "clicked": [i % 2 for i in range(1000)]}).write_csv(
        "log.csv"
    )
    schema = guessed("log.csv")
    assert (schema.time_format, schema.other_format) == ("%m/%d/%Y", "")


@pytest.mark.parametrize(
    ("form", "offset", "zone"),
    [
        ("%d/%b/%Y:%H:%M:%S %z", "-0700", "time_zone: Etc/GMT+7  #"),
        ("[%d/%b/%Y:%H:%M:%S %z]", "+0530", "# time_zone: Europe/Berlin  #"),
        ("%d/%b/%Y:%H:%M:%S %z", "+0000", None),
        ("%Y/%m/%d %H:%M:%S%z", "+02:00", "time_zone: Etc/GMT-2  #"),
        ("%d-%b-%Y %H:%M:%S", "", None),
        ("%d %b %Y", "", None),
    ],
)
def test_times_with_names_of_months_and_offsets_are_times_of_the_day_that_is_written(
    work, run_ingest, form, offset, zone
):
    """As Apache writes its access log."""
    log = clicks().drop("paid", "event")
    written = []
    for time in log["time"]:
        written.append(datetime.fromisoformat(time).strftime(form.replace("%z", offset)))
    log.with_columns(pl.Series("time", written)).write_csv("log.csv")
    assert cli.main(["init", "log.csv"]) == 0
    schema = guessed("log.csv")
    assert schema.time is not None and schema.time.column == "time"
    assert (schema.time_format, schema.other_format) == (form, "")
    assert schema.days is not None and schema.days[1] == "2026-01-03"
    zones = [line for line in Path("my/data/log.yaml").read_text().splitlines() if "time_zone" in line]
    assert len(zones) == (zone is not None) and all(line.startswith(str(zone)) for line in zones)
    if zone is None or not zone.startswith("#"):
        dataset = run_ingest(compose(["data=log", "stages=[ingest]", "data.day=2026-01-03"]))
        assert dataset.summary["rows"] == sum(time.startswith("2026-01-03") for time in log["time"])


def test_it_is_said_that_a_day_has_too_few_rows_for_the_gate(work, capsys):
    times = [str(datetime(2026, 1, 3) + timedelta(seconds=86.4 * row)) for row in range(6000)]
    clicks(6000).with_columns(time=pl.Series(times).str.slice(0, 19)).write_csv("log.csv")
    assert cli.main(["init", "log.csv"]) == 0
    assert "about 200 rows a day of so small a log are held out, and the gate wants 1,000" in capsys.readouterr().out


def label_with(broken, rows):
    """A log of ``rows`` rows with ``broken`` labels, one in a row, from the fourth row on."""
    labels = clicks(rows)["clicked"].cast(pl.String).to_list()
    labels[3 : 3 + len(broken)] = broken
    clicks(rows).select("ad", "price").with_columns(pl.Series("clicked", labels)).write_csv("log.csv")


def test_a_broken_label_is_taken_and_named_with_the_number_of_its_rows(work, capsys):
    label_with(["perhaps", "perhaps", "later"], 1000)
    assert cli.main(["init", "log.csv"]) == 0
    others = "another value in 3 rows of 1,000 ('perhaps', 'later')"
    assert f"{others}: such rows go to quarantine" in capsys.readouterr().out
    assert f"% positive; {others}" in (work / "my/data/log.yaml").read_text()
    label_with([], 1000)
    assert cli.main(["init", "log.csv", "--force"]) == 0
    assert "another value" not in capsys.readouterr().out


@pytest.mark.parametrize(("broken", "rows"), [("perhaps", 60), ("2", 1000)])
def test_a_broken_label_that_hides_the_label_is_named_with_the_way_out(work, capsys, broken, rows):
    label_with([broken], rows)
    assert cli.main(["init", "log.csv"]) == 3
    said = capsys.readouterr().err
    assert f"column 'clicked' has '0' and '1' in all rows of the sample but 1 row of {rows:,} ('{broken}')" in said
    assert "hint: --label clicked takes it" in said
    assert cli.main(["init", "log.csv", "--label", "clicked"]) == 0
    assert f"another value in 1 row of {rows:,} ('{broken}')" in capsys.readouterr().out


def test_a_label_of_many_values_is_an_error(work):
    log = clicks().with_columns((pl.arange(pl.len()) % 5 + 1).alias("rating"))
    log.write_csv("log.csv")
    with pytest.raises(DataError, match="column 'rating' has 5 values in the sample, expected two"):
        guessed("log.csv", "rating")


def test_a_count_is_no_label_with_broken_values(work):
    log = clicks().with_columns(pl.when(pl.arange(pl.len()) < 9).then(2).otherwise("clicked").alias("clicked"))
    log.select("ad", "clicked").write_csv("log.csv")
    with pytest.raises(DataError, match="no column has two values"):
        guessed("log.csv")


@pytest.mark.parametrize(
    ("path", "names", "expected"),
    [
        ("logs/2026-01-31/*.csv", ["/w/logs/2026-01-31/a.csv"], ("logs/{day}/*.csv", "2026-01-31")),
        ("logs/*/c.csv", ["/w/logs/2026-01-30/c.csv", "/w/logs/2026-01-31/c.csv"], ("logs/{day}/c.csv", "2026-01-31")),
        ("logs/*/c.csv", ["/w/logs/2026-01-30/c.csv", "/w/logs/other/c.csv"], ("logs/*/c.csv", None)),
        ("logs", ["/w/logs/2026-01-30/a.csv", "/w/logs/2026-01-31/b.csv"], ("logs/{day}/*", "2026-01-31")),
        ("/w/logs/", ["/w/logs/d=2026-01-30/a", "/w/logs/d=2026-01-31/b"], ("/w/logs/d={day}/*", "2026-01-31")),
        ("logs", ["/w/logs/2026-01-30.csv", "/w/logs/2026-01-31.csv"], ("logs/{day}.csv", "2026-01-31")),
        ("logs", ["/w/logs/a.csv", "/w/logs/b.csv"], ("logs", None)),
        ("logs/day=*.csv", ["/w/logs/day=2026-01-30.csv"], ("logs/day={day}.csv", "2026-01-30")),
        ("log.csv", ["/w/log.csv"], ("log.csv", None)),
    ],
)
def test_days_in_the_path(path, names, expected):
    assert day_pattern(path, names) == expected


def test_a_header_is_words_that_do_not_come_again():
    assert has_header([["user", "ad"], ["u1", "a1"], ["u2", "a1"]])
    assert not has_header([["u1", "a1"], ["u1", "a2"], ["u2", "a1"]])
    assert not has_header([["user", "3"], ["u1", "a1"]])
    assert not has_header([["user", "user"], ["u1", "a1"]])


@pytest.mark.parametrize(
    ("header", "line", "label"),
    [
        ("user,1,price,clicked", "u{ad},a{ad},{price},{click}", "clicked"),
        ("user,null,price,clicked", "u{ad},a{ad},{price},{click}", "clicked"),
        ("user,2026,price,bid", "u{ad},a{ad},{price},{click}", "bid"),
        ("user,1,clicked", "u{ad},{flag},{click}", "clicked"),
        ("label,0,1,2", "{click},{price},a{ad},{flag}", "label"),
        ("user,ad,clicked,,", "u{ad},a{ad},{click},,", "clicked"),
    ],
)
def test_names_of_a_header_may_be_numbers_or_missing(work, run_ingest, header, line, label):
    lines = []
    for row in range(400):
        lines.append(line.format(ad=row % 7, price=row % 90 / 10, flag=row // 3 % 2, click=row % 5 % 2))
    Path("log.csv").write_text("\n".join([header, *lines]) + "\n")
    assert cli.main(["init", "log.csv", "--label", label]) == 0
    assert "header: false" not in Path("my/data/log.yaml").read_text()
    assert run_ingest(composed("log")).summary["rows"] == 400


@pytest.mark.parametrize("first", ["u1,a1,x,1", "u1,a1,3.5,1", "u1,u1,?,1", "u1,1,3.5,?"])
def test_a_first_line_with_a_strange_value_is_a_row(first):
    rows = [first.split(","), *([f"u{row % 9}", f"a{row % 7}", str(row / 8), str(row % 2)] for row in range(100))]
    assert not has_header(rows)


def test_a_name_that_two_columns_have_is_told(work, capsys):
    lines = [f"u{row % 7},u{row % 5},{row % 2}" for row in range(100)]
    Path("log.csv").write_text("\n".join(["user,user,clicked", *lines]) + "\n")
    assert cli.main(["init", "log.csv"]) == 3
    assert "the header names 2 columns 'user', columns 1 and 2; expected a name for each" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["{number},{line}", "{line},"])
def test_a_header_may_leave_out_the_name_of_row_numbers_or_of_what_ends_each_line(work, run_ingest, form):
    """As ``pandas.DataFrame.to_csv`` and some databases write it."""
    header, *lines = clicks(60).drop("event").write_csv().splitlines()
    text = [form.format(number="", line=header), *(form.format(number=n, line=line) for n, line in enumerate(lines))]
    Path("log.csv").write_text("\n".join(text) + "\n")
    assert cli.main(["init", "log.csv"]) == 0
    schema = guessed("log.csv")
    assert schema.label.column == "clicked" and schema.time is not None and schema.time.column == "time"
    assert "#   (no name): the header gives it no name\n" in Path("my/data/log.yaml").read_text()
    assert run_ingest(composed("log")).summary["rows"] == 60
    assert not has_header([["", "ad"], ["u1", "a1"], ["", "a2"]]), "a value is missing"


def test_files_are_read_by_their_own_headers_and_empty_ones_are_left_out(work, run_ingest):
    log = clicks(200).drop("event")
    Path("log").mkdir()
    Path("log/a.csv").write_text("")
    log[:100].write_csv("log/b.csv")
    log[100:].select(reversed(log.columns)).with_columns(added=pl.lit("x")).write_csv("log/c.csv")
    sample = read_sample("log")
    assert sample.rows == 200 and sample.frame.columns == [*log.columns, "added"]
    assert guessed("log").label.column == "clicked"
    assert cli.main(["init", "log"]) == 0
    assert run_ingest(composed("log")).summary["rows"] == 200
    Path("empty.csv").write_text("")
    with pytest.raises(DataError, match="holds no rows"):
        read_sample("empty.csv")


def test_separators_and_quotes():
    form = text_format(b'a|b\n"x|y"|1\nz|2\n')
    assert (form.layout.separator, form.layout.names, form.header) == ("|", ("a", "b"), True)
    with pytest.raises(DataError, match="no separator of"):
        text_format(b"one\ntwo\n")


@pytest.mark.parametrize("before", [b"sep=,\n", b"# by a database\n", b"\n"])
def test_a_header_below_other_lines_is_told_since_no_run_would_find_it(before):
    with pytest.raises(DataError, match="the names of the columns are in line 2, expected them in line 1") as caught:
        text_format(before + b"user,ad,zone\nu1,a1,z1\nu2,a1,z1\n")
    assert caught.value.hint.startswith("tail -n +2 FILE > ")


def test_a_long_log_is_sampled_and_its_rows_are_estimated(work, monkeypatch):
    Path("logs").mkdir()
    for number in range(20):
        Path(f"logs/{number:02}.csv").write_text("label,c\n" + "1,a\n0,b\n" * 500)
    monkeypatch.setattr("pipeline.plugins.init.sample.BYTES", 8000)
    sample = read_sample("logs")
    assert sample.files == 20 and sample.rows < 4000
    assert sample.total == pytest.approx(20_000, rel=0.1)


def test_names_of_columns_may_hold_anything(work, run_ingest):
    rng = np.random.default_rng(3)
    names = ["us er", "a\nb", "u\u2028s", "x${y}z", 'q"y', "tab\tt", "b\\c", "#x", "c: d", "naïve", "d.e"]
    rows = [
        {"click": int(rng.random() < 0.3), "one\nvalue": 1, **{name: f"v{rng.integers(7)}" for name in names}}
        for _ in range(400)
    ]
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "odd.jsonl"]) == 0
    config = composed("odd")
    assert {feature.column or name for name, feature in config.data.sparse.items()} == set(names)
    assert run_ingest(config).summary["rows"] == 400


def test_a_stray_quote_before_long_lines_costs_its_line(work, capsys):
    text = "word " * 200
    lines = [f"{i % 3 // 2},u{i % 50},{'x' * (i == 5)}{text}" for i in range(400)]
    Path("log.csv").write_text("click,user,text\n" + "\n".join(lines).replace(",x", ',"') + "\n")
    assert cli.main(["init", "log.csv"]) == 0
    assert "of 399 rows" in capsys.readouterr().out


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_json_is_told_however_long_its_line_is(work, capsys, monkeypatch, indent):
    rows = [{"click": i % 2, "user": f"u{i % 50}"} for i in range(500)]
    Path("log.json").write_text(json.dumps(rows, indent=indent))
    assert cli.main(["init", "log.json"]) == 3
    assert "log.json is an array of JSON" in capsys.readouterr().err
    monkeypatch.setattr("pipeline.plugins.init.sample.BYTES", 4000)
    assert cli.main(["init", "log.json"]) == 3
    assert "jq -c" in capsys.readouterr().err


@pytest.mark.parametrize("header", [True, False])
def test_lines_that_end_with_cr_alone_are_told_however_many_there_are(work, capsys, monkeypatch, header):
    clicks(200).write_csv("lf.csv", include_header=header)
    Path("cr.csv").write_bytes(Path("lf.csv").read_bytes().replace(b"\n", b"\r"))
    for size in (64 << 20, 4000):
        monkeypatch.setattr("pipeline.plugins.init.sample.BYTES", size)
        assert cli.main(["init", "cr.csv"]) == 3
        err = capsys.readouterr().err
        assert "the lines of cr.csv end with CR alone" in err and "tr '\\r' '\\n' < FILE > FILE.lf" in err
    assert cli.main(["init", "lf.csv"]) == 0


def test_what_cannot_be_guessed_is_said(work, capsys):
    Path("one.csv").write_text("x,c\n" + "".join(f"{i},v{i % 3}\n" for i in range(200)))
    Path("numbers.csv").write_text("label,x\n" + "".join(f"{i % 2},{i * 0.37:.2f}\n" for i in range(200)))
    Path("empty.csv").write_text("label,c\n")
    Path("my/data").mkdir(parents=True)
    Path("my/data/taken.yaml").write_text("")
    for arguments, code, words in (
        (["one.csv"], 3, "no column has two values and is nearly always filled"),
        (["one.csv", "--label", "y"], 3, "the log has no column 'y'; it has: x, c"),
        (["numbers.csv"], 2, "no column of ids"),
        (["empty.csv"], 3, "empty.csv holds no rows"),
        (["nothing.csv"], 3, "nothing exists at nothing.csv"),
        (["one.csv", "--name", "taken"], 2, "taken.yaml exists already"),
        (["one.csv", "--name", "criteo"], 2, "data=criteo is built in"),
        (["one.csv", "--name", "../one"], 2, "--name=one"),
    ):
        assert cli.main(["init", *arguments]) == code, arguments
        assert words in capsys.readouterr().err


@pytest.mark.real_data
@pytest.mark.parametrize(("file", "label"), [("adult.data", "column_15"), ("criteo_sample.tsv", "label")])
def test_real_logs(work, run_ingest, file, label):
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not beside this checkout")
    assert cli.main(["init", str(SHARED / file), "--name", "real"]) == 0
    config = composed("real")
    assert config.data.label.column == label
    assert run_ingest(config).quarantine == []


def test_values_that_name_a_time_are_not_looked_up_and_those_that_say_something_of_other_times_are(work):
    """Each day has a click rate and a temperature of its own; a shop has its rate on all days."""
    rng = np.random.default_rng(5)
    day, shop = np.repeat(np.arange(80), 100), rng.permutation(np.arange(8000) % 40)
    rate = rng.choice([0.1, 0.5], 80)[day] * rng.choice([0.3, 1.7], 40)[shop]
    frame = pl.DataFrame(
        {
            "day": [f"2026-{1 + each // 28:02}-{1 + each % 28:02}" for each in day],
            "temperature": rng.permutation(300)[day] / 10,
            "shop": rng.permutation(900)[shop] / 10,
            "clicked": (rng.random(8000) < rate).astype(int),
        }
    )
    frame.write_csv(work / "log.csv")
    (found,) = guessed(work / "log.csv").of("sparse")
    exact, binned = map(float, re.findall(r"0\.\d+", found.seen))
    assert found.name == "shop-value" and exact < binned, "what is said for the feature speaks for it"
    frame.drop("day").write_csv(work / "timeless.csv")
    assert set(by_name(guessed(work / "timeless.csv"), "sparse")) == {"shop-value", "temperature-value"}


def test_a_log_in_one_file_with_times_is_offered_a_split_by_time(work):
    clicks().write_csv("log.csv")
    assert cli.main(["init", "log.csv"]) == 0
    file = Path("my/data/log.yaml")
    assert "\n# split: {by: time}  # " in file.read_text() and composed("log").data.split.by == "hash"
    file.write_text(file.read_text().replace("# split: {by: time}", "split: {by: time}"))
    assert composed("log").data.split.by == "time"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([""], 2, "path is empty"),
        (["s3://"], 3, "nothing exists at s3://"),
        (["hidden"], 3, "hidden is a folder without files, expected some whose names begin with neither . nor _"),
        (["log.csv", "--force", "--option", "=x"], 2, "--option =x has no name"),
        (["log.csv", "-cd", "a_file"], 2, "cannot write a_file/data/log.yaml"),
        (["log.csv", "--force"], 2, "cannot write my/data/log.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence_and_writes_nothing(work, capsys, words, code, says):
    clicks().write_csv("log.csv")
    Path("a_file").touch()
    Path("hidden").mkdir()
    Path("hidden/_rows.csv").write_text("label,c\n1,a\n")
    Path("my/data/log.yaml").mkdir(parents=True)
    assert cli.main(["init", *words]) == code
    assert says in capsys.readouterr().err
    assert not [path for path in Path("my").rglob("*") if path.is_file()]
