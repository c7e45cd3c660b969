"""Sequences that are built from the log: night by night as at once, and only what came before."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta

import polars as pl
import pytest

from pipeline.config import (
    ChecksConfig,
    DedupeConfig,
    DenseFeature,
    DriftLimits,
    LabelConfig,
    SparseFeature,
    SplitConfig,
)
from pipeline.config.checks import check
from pipeline.config.sequences import EventColumn, HistoryConfig, SequenceConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.record_transform import RecordTransform
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.stage import raw_fingerprint
from pipeline.serving import scorer

from .conftest import csv_config
from .test_days import Nights

DAYS = [date(2026, 1, 1) + timedelta(days=number) for number in range(10)]
HEADER = "label,row,user,item,kind,time,dwell"


def config_of(folder, day: str | None, most: int = 3, days: int = 2, history: dict | None = None, **changes):
    sequence = SequenceConfig(
        features={"item": EventColumn(table="item"), "kind": EventColumn(rows=50)},
        max_length=most,
        target="item",
        history=HistoryConfig(by="user", days=days, **history or {}),
    )
    fields = {
        "timestamp": "time",
        "split": SplitConfig(test_share=0.0),
        "day": day,
        "dense": {},
        "sparse": {"row": SparseFeature(), "item": SparseFeature()},
        "sequences": {"seen": sequence},
        "checks": ChecksConfig(hold=DriftLimits()),  # the first days' histories are short
    }
    return csv_config(f"{folder}/{{day}}.csv" if day else folder, **{**fields, **changes})


def draw(seed: int, count: int = 60):
    """Rows (day, row, user, item, label, time, dwell) whose times often tie, in the order of the files."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        time = datetime.combine(chance.choice(DAYS), datetime.min.time(), UTC) + timedelta(hours=chance.randrange(24))
        rows.append(
            (
                time.date(),
                f"r{number}",
                chance.choice(["u", "v", "w", ""]),
                chance.choice("abcdef"),
                chance.randrange(2),
                time,
                chance.randrange(3),
            )
        )
    anchors = [
        (day, f"{day}-{label}", "", "a", label, datetime.combine(day, datetime.min.time(), UTC), 0)
        for day in DAYS
        for label in (0, 1)
    ]
    return sorted([*rows, *anchors], key=lambda row: row[0])


def line_of(row) -> str:
    _, name, user, item, label, time, dwell = row
    return f"{label},{name},{user},{item},{item.upper()},{time:%Y-%m-%d %H:%M:%S},{dwell}"


def write_days(folder, rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for day in DAYS:
        lines = [line_of(row) for row in rows if row[0] == day]
        (folder / f"{day}.csv").write_text("\n".join([HEADER, *lines]) + "\n")


def brute_force(rows, most: int, days: int, where=lambda row: True) -> dict[str, list[str]]:
    histories = {}
    for _, name, user, _, _, time, _ in rows:
        own = [(other[5], other[3]) for other in rows if user and other[2] == user and where(other)]
        before = [event for event in own if event[0] < time and time - event[0] <= timedelta(days=days)]
        histories[name] = [item for _, item in sorted(before)[-most:]]
    return histories


def histories_of(dataset) -> dict[str, list[str]]:
    """The items of every row's history, by the row's name; the kinds are of the same events."""
    names, items, kinds = (
        dict(dataset.vocab(table).select("row", "id").iter_rows()) for table in ("row", "item", "seen__kind")
    )
    seen = {}
    for row, events, of_kind in dataset.all_rows.select("row", "seen__item", "seen__kind").iter_rows():
        seen[names[row]] = [items[each] for each in events if each in items]
        assert [kinds[each] for each in of_kind if each in kinds] == [name.upper() for name in seen[names[row]]]
    return seen


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))])
def test_ten_nights_have_the_histories_of_ten_days_at_once_and_of_brute_force(tmp_path, seed):
    rows, (most, days) = draw(seed), [(3, 2), (2, 1), (8, 4)][seed]
    write_days(tmp_path / "logs", rows)
    wanted = brute_force(rows, most, days)
    assert sum(map(len, wanted.values())) > 40
    nights, one_by_one = Nights(tmp_path), {}
    for day in DAYS:
        made = nights.ingest(config_of(tmp_path / "logs", str(day), most, days))
        assert made.summary["rows"] == sum(row[0] == day for row in rows) and not made.summary["rows_quarantined"]
        one_by_one |= histories_of(made)
    assert one_by_one == wanted
    at_once = Nights(tmp_path / "once").ingest(config_of(tmp_path / "logs", f"{DAYS[0]}..{DAYS[-1]}", most, days))
    assert histories_of(at_once) == wanted


def test_a_log_as_a_whole_is_in_no_order_and_only_events_that_count_are_taken(run_ingest, tmp_path):
    rows = draw(7)
    random.Random(1).shuffle(rows)
    log = tmp_path / "log.csv"
    log.write_text("\n".join([HEADER, *map(line_of, rows)]) + "\n")
    clicks = run_ingest(config_of(log, None, 4, 5, {"where": "label"}))
    assert histories_of(clicks) == brute_force(rows, 4, 5, lambda row: row[4] == 1)
    dwelt = run_ingest(config_of(log, None, 4, 5, {"where": "dwell", "lag_minutes": 180.0}))
    got = histories_of(dwelt)
    assert got != brute_force(rows, 4, 5, lambda row: row[6] > 0)
    late = {row[1]: row[5] - timedelta(hours=3) for row in rows}
    moved = [(*row[:5], late[row[1]], row[6]) for row in rows]
    for row, shifted in zip(rows, moved, strict=True):
        before = [
            (o[5], o[3])
            for o in rows
            if row[2] and o[2] == row[2] and o[5] < shifted[5] and o[6] > 0 and row[5] - o[5] <= timedelta(days=5)
        ]
        assert got[row[1]] == [item for _, item in sorted(before)[-4:]]


def test_rows_that_do_not_count_are_no_events(tmp_path):
    day, rows = DAYS[0], [row for row in draw(3, 200) if row[0] == DAYS[0]]
    lines = [HEADER, *map(line_of, rows)]
    spoilt = {row[1] for row in rows[4:10]}
    lines[5:11] = [line.replace(line[0], "?", 1) for line in lines[5:11]]  # their labels
    lines += lines[-3:]  # repeated
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / f"{day}.csv").write_text("\n".join(lines) + "\n")
    made = Nights(tmp_path).ingest(config_of(folder, str(day), dedupe=DedupeConfig(key="row")))
    assert made.summary["rows_quarantined"] == 6 and made.summary["rows_repeated"] == 3
    assert histories_of(made) == brute_force([row for row in rows if row[1] not in spoilt], 3, 2)


def test_rows_that_come_late_have_the_histories_of_their_own_time(tmp_path):
    rows = draw(5)
    write_days(tmp_path / "logs", rows)
    moved = [row for row in rows if row[0] == DAYS[4] and row[2]][:3]
    for day, change in ((DAYS[4], -1), (DAYS[5], 1)):
        path = tmp_path / "logs" / f"{day}.csv"
        lines = path.read_text().splitlines()
        lines = [line for line in lines if line not in map(line_of, moved)] + [line_of(row) for row in moved] * (
            change > 0
        )
        path.write_text("\n".join(lines) + "\n")
    config = config_of(tmp_path / "logs", f"{DAYS[0]}..{DAYS[-1]}", late="own_day")
    assert histories_of(Nights(tmp_path).ingest(config)) == brute_force(rows, 3, 2)
    nights = Nights(tmp_path / "nights")
    for day in DAYS[:6]:
        nights.ingest(config_of(tmp_path / "logs", str(day), late="own_day"))
    again = [nights.ingest(config_of(tmp_path / "logs", str(day), late="own_day")) for day in DAYS[4:6]]
    wanted = brute_force(rows, 3, 2)
    for made in again:
        own = histories_of(made)
        assert own == {name: wanted[name] for name in own}
    assert {row[1] for row in moved} <= set(histories_of(again[0]))


def test_a_day_that_changes_makes_the_days_after_it_again(tmp_path):
    rows = draw(2)
    write_days(tmp_path / "logs", rows)
    nights = Nights(tmp_path)

    def mark(day) -> str:
        return raw_fingerprint(config_of(tmp_path / "logs", str(day)).data, nights.store)

    alone = mark(DAYS[2])
    for day in DAYS[:2]:
        nights.ingest(config_of(tmp_path / "logs", str(day)))
    before = mark(DAYS[2])
    assert before != alone
    extra = (DAYS[1], "more", "u", "f", 0, datetime(2026, 1, 2, 23, tzinfo=UTC), 0)
    with (tmp_path / "logs" / f"{DAYS[1]}.csv").open("a") as log:
        log.write(line_of(extra) + "\n")
    rows = [*rows, extra]
    assert mark(DAYS[2]) == before  # until that day is ingested again
    nights.ingest(config_of(tmp_path / "logs", str(DAYS[1])))
    assert mark(DAYS[2]) not in (alone, before)
    own = histories_of(nights.ingest(config_of(tmp_path / "logs", str(DAYS[2]))))
    wanted = brute_force(rows, 3, 2)
    assert own == {name: wanted[name] for name in own} and any("f" in events for events in own.values())


def test_a_time_zone_orders_what_is_written_with_offsets(run_ingest, tmp_path):
    lines = [
        "1,first,u,a,A,2026-03-29T00:30:00Z,0",
        "0,second,u,b,B,2026-03-29T01:45:00+01:00,0",
        "0,third,u,c,C,2026-03-29 03:10:00,0",  # of Berlin, whose clocks left out the hour before
    ]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([HEADER, *reversed(lines)]) + "\n")
    assert histories_of(run_ingest(config_of(log, None, time_zone="Europe/Berlin"))) == {
        "first": [],
        "second": ["a"],
        "third": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("history", "changes", "message"),
    [
        ({}, {"timestamp": None, "day_column": "time"}, r"history\.by is set, but data\.timestamp names no column"),
        (
            {"where": "label"},
            {"label": LabelConfig(window_days=2), "dedupe": DedupeConfig(key="row")},
            r"whose clicks may come 2 days later",
        ),
        ({}, {"sparse": {"row": SparseFeature(), "item": SparseFeature(separator="|")}}, r"rows have several ids"),
    ],
)
def test_histories_that_cannot_be_built_are_refused(tmp_path, history, changes, message):
    with pytest.raises(ConfigError, match=message):
        check(config_of(tmp_path, str(DAYS[0]), history=history, **changes))


def test_workers_of_ray_do_not_build_histories(tmp_path):
    config = config_of(tmp_path, str(DAYS[0]))
    config.ingest.engine = "ray"
    with pytest.raises(ConfigError, match=r"builds histories on one machine") as error:
        check(config)
    assert "ingest.engine=local" in str(error.value.hint)


def test_events_kept_of_other_columns_are_left_out(tmp_path):
    write_days(tmp_path / "logs", draw(4))
    nights = Nights(tmp_path)
    nights.ingest(config_of(tmp_path / "logs", str(DAYS[0])))
    config = config_of(tmp_path / "logs", str(DAYS[1]))
    config.data.sequences["seen"].features["kind"] = EventColumn(column="dwell", rows=50)
    made = nights.ingest(config)
    assert any("keeps events of other columns" in line for line in made.messages)
    kept = [name for name in made.artifact.files if name.startswith("histories/seen/")]
    events = pl.read_parquet(made.bytes(kept[0]))
    assert events.height == sum(row[0] == DAYS[1] and bool(row[2]) for row in draw(4))


def test_another_model_of_the_log_changes_no_history(tmp_path):
    """Its datasets are of the same days and were made later; they keep other events under this name, or none."""
    rows = draw(1)
    write_days(tmp_path / "logs", rows)
    nights, mine, clicks = Nights(tmp_path), {}, {}
    for day in DAYS[:4]:
        for where, found in ((None, mine), ("label", clicks)):
            found |= histories_of(nights.ingest(config_of(tmp_path / "logs", str(day), history={"where": where})))
        nights.ingest(config_of(tmp_path / "logs", str(day), sequences={}))
    assert mine != clicks
    for where, found in ((lambda row: True, mine), (lambda row: row[4] == 1, clicks)):
        wanted = brute_force(rows, 3, 2, where)
        assert found == {name: wanted[name] for name in found}


def test_records_bring_the_histories_that_a_log_tells(run_ingest, tmp_path):
    rows = draw(6)
    log = tmp_path / "log.csv"
    log.write_text("\n".join([HEADER, *map(line_of, rows)]) + "\n")
    config = config_of(log, None, 4, 5)
    dataset = run_ingest(config)
    transform, wanted = RecordTransform.read(dataset.store, dataset.artifact.path), brute_force(rows, 4, 5)
    longest = max(rows, key=lambda row: len(wanted[row[1]]))
    at = {row[1]: row[5].timestamp() for row in rows}
    before = [row for row in rows if row[2] == longest[2] and longest[5] - timedelta(days=5) <= row[5] < longest[5]]
    events = [
        {"item": row[3], "kind": row[3].upper(), "time": at[row[1]]}
        for row in sorted(before, key=lambda row: (row[5], row[3]))
    ]
    record = {"row": longest[1], "item": longest[3], "time": at[longest[1]], "seen": events}
    made = transform([record])
    names = {row: name for name, row in dataset.vocab("row").select("id", "row").iter_rows()}
    (own,) = (row for row in dataset.all_rows.iter_rows(named=True) if names[row["row"]] == longest[1])
    assert len(own["seen__item"]) > 1
    assert {name: own[name] for name in made.columns if name in own} == {
        name: value for name, value in made.row(0, named=True).items() if name in own
    }
    columns = scorer._spec(config.data, labelled=False).columns
    assert "seen" in columns and "time" in columns and not {"user", "kind"} & set(columns)


@pytest.mark.parametrize(
    ("column", "history", "setting"),
    [
        ("user", {}, "data.sequences.seen.history.by"),
        ("kind", {}, "data.sequences.seen.features.kind.column"),
        ("dwell", {"where": "dwell"}, "data.sequences.seen.history.where"),
    ],
)
def test_a_column_of_lists_tells_no_event(run_ingest, tmp_path, column, history, setting):
    log = {name: [str(number % 3) for number in range(60)] for name in HEADER.split(",")}
    log |= {"label": [number % 2 for number in range(60)], "time": list(range(60))}
    pl.DataFrame(log).with_columns(pl.concat_list(column).alias(column)).write_parquet(tmp_path / "log.parquet")
    config = config_of(tmp_path / "log.parquet", None, history=history, format="parquet")
    with pytest.raises(DataError, match=f"column '{column}' holds lists, expected one value a row") as caught:
        run_ingest(config)
    assert caught.value.hint == f"{setting}=<a column with one value a row>"


def test_a_column_that_the_log_is_asked_for_is_no_name_of_a_built_sequence():
    config = config_of("log.csv", None, dense={"price": DenseFeature(column="seen")})
    with pytest.raises(ConfigError, match="column 'seen', but data.dense.price.column reads a column of that name"):
        data_spec(config.data)
