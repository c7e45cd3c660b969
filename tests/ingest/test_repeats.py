"""Rows of one event: which stays, which labels later clicks correct; against brute force, day by day as at once."""

from __future__ import annotations

import dataclasses
import random
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import (
    Config,
    DataConfig,
    DedupeConfig,
    HardwareConfig,
    IngestConfig,
    LabelConfig,
    SparseFeature,
    SplitConfig,
)
from pipeline.config.sequences import EventColumn, SequenceConfig
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest import spill
from pipeline.ingest.blocks import CountJob, count
from pipeline.ingest.engines import LocalEngine
from pipeline.ingest.events import MarkedRows
from pipeline.ingest.file_source import file_sources
from pipeline.ingest.ids import hash_event_keys
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.repeats import CLICK, FORMER, KNOWN, ROW, Repeats
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import WrappedSource

from .conftest import csv_config
from .test_days import Nights

DAYS = [date(2026, 1, 1) + timedelta(days=i) for i in range(10)]
Event = tuple[int, str, int]  # day, key, label; "c" in place of a label: a click of the log of clicks


def config_of(folder: Path, day: str | None, days: int, window: int = 0, **changes):
    fields = {
        "dedupe": DedupeConfig(key="event", days=days),
        "split": SplitConfig(test_share=0.0),
        "day": day,
        "label": LabelConfig(window_days=window, late_path=f"{folder}/clicks/{{day}}.csv" if window else None),
        "sparse": {"c": SparseFeature(min_count=1, rows=1000)},
        "dense": {},
        **changes,
    }
    return csv_config(f"{folder}/{{day}}.csv", **fields)


def write_days(folder: Path, events: list[Event], clicks: list[tuple[int, str]]) -> None:
    """Each row has an id of its own; anchors keep both classes in every day."""
    (folder / "clicks").mkdir(parents=True, exist_ok=True)
    for number, day in enumerate(DAYS):
        rows = [(f"anchor{number}{label}", label) for label in (0, 1)]
        rows += [(key, label) for at, key, label in events if at == number]
        lines = [f"{label},{number}/{place},{key}" for place, (key, label) in enumerate(rows)]
        (folder / f"{day}.csv").write_text("\n".join(["label,c,event", *lines]) + "\n")
        late = [key for at, key in clicks if at == number]
        (folder / "clicks" / f"{day}.csv").write_text("\n".join(["event", *late]) + "\n")


def brute_force(events: list[Event], clicks: list[tuple[int, str]], days: int, window: int):
    """(rows that stay as [day, id, label when its day came], {(day, id): the day its click came})."""
    reach, stay, late = max(days, window), [], {}
    for number in range(len(DAYS)):
        rows = [(f"anchor{number}{label}", label) for label in (0, 1)]
        rows += [(key, label) for at, key, label in events if at == number]
        for place, (key, label) in enumerate(rows):
            first = next((row for row in reversed(stay) if row[1] == key and number - row[0] <= reach), None)
            if first is None:
                stay.append([number, key, f"{number}/{place}", label])
            elif label:
                _click(first, number, window, late)
        for key in [key for at, key in clicks if at == number]:
            first = next((row for row in reversed(stay) if row[1] == key), None)
            if first is not None:
                _click(first, number, window, late)
    return stay, late


def _click(first, number: int, window: int, late) -> None:
    if window and number - first[0] <= window and not first[3]:
        if number == first[0]:
            first[3] = 1
        else:
            late.setdefault((first[0], first[2]), number)


def rows_of(dataset) -> list[tuple[str, float]]:
    """(id, label) of the train rows, by what the vocabulary calls them."""
    names = dict(dataset.vocab("c").select("row", "id").iter_rows())
    rows = dataset.split("train")
    return sorted((names.get(row, "unknown"), label) for row, label in rows.select("c", "label").iter_rows())


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3))])
def test_days_one_by_one_and_at_once_are_as_brute_force_says(tmp_path, seed):
    folder, draw = tmp_path, random.Random(seed)
    days, window = [(0, 2), (2, 1), (1, 3), (3, 0)][seed]
    events = [(draw.randrange(10), draw.choice("abcdefgh"), draw.randrange(2)) for _ in range(40)]
    clicks = [(draw.randrange(10), draw.choice("abcdefghi")) for _ in range(12)]
    write_days(folder, events, clicks)
    stay, late = brute_force(events, clicks, days, window)
    nights, before = Nights(folder), None
    for number, day in enumerate(DAYS):
        made = nights.ingest(config_of(folder, str(day), days, window, mapping_from=before))
        before = made.artifact.path
        own = [(name, float(label)) for at, _, name, label in stay if at == number]
        again = [(name, 1.0) for (_, name), came in late.items() if came == number]
        assert rows_of(made) == sorted(own + again)
        given_rows = 2 + sum(at == number for at, *_ in events)
        assert made.summary["rows"] == given_rows
        assert made.summary["rows_repeated"] == given_rows - len(own)
        assert sum(made.summary["rows_corrected"].values()) == len(again)
    final = {name: float(label or (at, name) in late) for at, _, name, label in stay}
    for number, day in enumerate(DAYS):  # once more, when all clicks are known
        corrected = rows_of(nights.ingest(config_of(folder, str(day), days, window)))
        mine = {name: label for name, label in final.items() if name.startswith(f"{number}/")}
        assert {name: label for name, label in corrected if name in mine} == mine
    once = Nights(folder / "once").ingest(config_of(folder, f"{DAYS[0]}..{DAYS[-1]}", days, window))
    assert rows_of(once) == sorted(final.items())
    assert not once.summary["rows_corrected"]


ENTRY = st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans())


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_what_is_on_disk_is_judged_as_brute_force_says(examples):
    drawn = given(st.lists(ENTRY, max_size=30), st.integers(0, 4), st.integers(0, 4), st.integers(1, 7))
    settings(max_examples=examples, deadline=None)(drawn(assert_judged))()


def assert_judged(entries, days, window, waiting):
    """``entries`` on disk, ``waiting`` of them in memory at a time, are judged as brute force judges them."""
    dropped, clicked, stay = [], [], {}
    for day, part, line, key, has in sorted((day, i % 3, i, key, has) for i, (key, day, has) in enumerate(entries)):
        first = stay.get(key)
        if first is None or day - first[0] > max(days, window):
            stay[key] = [day, (part << 40) + line, has]
            continue
        dropped.append((part << 40) + line)
        if has and window and not first[2] and day - first[0] <= window:
            first[2] = True
            clicked.append(first[1])
    with pytest.MonkeyPatch.context() as patch:
        outcomes = []
        for rows in (1 << 20, waiting):
            patch.setattr(spill, "_WAITING_ROWS", rows)
            each = Repeats(days, window)
            for line, (key, day, has) in enumerate(entries):
                hashes = hash_event_keys(pl.Series([key]))
                event = {"key": hashes[0], "check": hashes[1], "clicked": [has], "day": [day], "line": [line]}
                each.add(pl.DataFrame(event, schema_overrides={"day": pl.Int32, "line": pl.Int64}), ROW, part=line % 3)
            judged = each.judge()
            outcomes.append((judged.dropped.tolist(), judged.clicked.tolist()))
            assert sum(judged.repeated.values()) == len(dropped)
            assert sum(judged.corrected.values()) == len(clicked)
        assert outcomes == [(sorted(dropped), sorted(clicked))] * 2


def test_a_click_corrects_a_row_once():
    keys = hash_event_keys(pl.Series(["a"]))

    def event(day: int, clicked: bool) -> pl.DataFrame:
        made = {"key": keys[0], "check": keys[1], "clicked": [clicked], "day": [day]}
        return pl.DataFrame(made, schema_overrides={"day": pl.Int32})

    for known, late in ((False, 1), (True, 0)):
        each = Repeats(0, 7)
        each.add(event(1, False), FORMER)
        if known:  # a night between has done it
            each.add(event(2, True), KNOWN)
        each.add(event(3, True), CLICK)
        each.add(event(3, True).with_columns(line=pl.lit(5, pl.Int64)), ROW)
        judged = each.judge()
        assert sum(frame.height for frame in judged.late.values()) == late
        assert judged.repeated == {3: 1}


def synthetic(day: str, days: int = 0) -> Config:
    sparse = {"C1": SparseFeature(min_count=1)}
    dedupe, split = DedupeConfig(key="C1", days=days), SplitConfig(test_share=0.0)
    data = DataConfig(name="s", format="synthetic", sparse=sparse, dedupe=dedupe, split=split, day=day)
    data.synthetic.rows, data.synthetic.ids_per_feature, data.synthetic.new_ids = 2000, 500, 0.2
    return Config(stages=["ingest"], data=data, hardware=HardwareConfig(name="x"))


def test_of_a_synthetic_range_the_events_of_every_day_are_read(tmp_path):
    days = ("2026-01-01", "2026-01-02")
    once = Nights(tmp_path / "once").ingest(synthetic("..".join(days)))
    alone = [Nights(tmp_path / day).ingest(synthetic(day)) for day in days]
    assert once.summary["rows"] == 4000
    assert once.summary["rows_repeated"] == sum(each.summary["rows_repeated"] for each in alone)
    assert once.split("train")["day"].value_counts(sort=True)["count"].to_list() == sorted(
        (each.summary["rows_train"] for each in alone), reverse=True
    )


def test_a_synthetic_day_is_made_anew_once_the_day_before_has_events(tmp_path):
    nights = Nights(tmp_path)
    first = nights.ingest(synthetic("2026-01-02", days=1))
    nights.ingest(synthetic("2026-01-01", days=1))
    again = nights.ingest(synthetic("2026-01-02", days=1))
    assert again.artifact.key != first.artifact.key
    assert again.summary["rows_repeated"] > first.summary["rows_repeated"]


def test_blocks_files_and_rows_without_a_key(run_ingest, tmp_path):
    lines = [f"{i % 2},id{i % 5},{'' if i % 50 == 7 else f'e{i % 300}'}" for i in range(1000)]
    (tmp_path / "logs").mkdir()
    for number in range(4):
        part = "\n".join(["label,c,event", *lines[250 * number : 250 * number + 250]])
        (tmp_path / "logs" / f"{number}.csv").write_text(part + "\n")
    config = csv_config(f"{tmp_path}/logs/*.csv", dedupe=DedupeConfig(key="event"), dense={})
    nights = Nights(tmp_path)
    made = nights.ingest(config)
    assert made.summary["rows_quarantined"] == 20
    assert made.summary["rows_repeated"] == 1000 - 20 - 294
    assert made.summary["rows_train"] + made.summary["rows_test"] == 294
    assert {each["reason"] for each in made.quarantine} == {"event is missing"}
    small = Nights(tmp_path / "b").ingest(dataclasses.replace(config, ingest=IngestConfig(block_mib=1)))
    assert small.checksums == made.checksums


class Parted(LocalEngine):
    """Reads files in parts, as an engine of several processes does: later parts number their lines from 1."""

    def parts(self, source):
        return source.parts()


def test_parts_of_files_and_small_blocks_lose_the_same_rows(tmp_path, monkeypatch):
    draw = random.Random(7)
    events = [(draw.randrange(10), f"e{draw.randrange(60)}", draw.randrange(2)) for _ in range(300)]
    clicks = [(draw.randrange(10), f"e{draw.randrange(60)}") for _ in range(20)]
    write_days(tmp_path, events, clicks)
    config = config_of(tmp_path, f"{DAYS[0]}..{DAYS[-1]}", 2, 3)
    whole = Nights(tmp_path / "whole").ingest(config)
    assert whole.summary["rows_repeated"] > 100 and whole.summary["rows_relabelled"]
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 64)
    assert Nights(tmp_path / "small").ingest(config).checksums == whole.checksums
    monkeypatch.setattr("pipeline.ingest.stage.engine_of", lambda settings: Parted())
    assert Nights(tmp_path / "parts").ingest(config).checksums == whole.checksums


def test_a_click_corrects_the_row_of_its_day_alone(tmp_path):
    """A dataset of many days may have two rows of a key that are too far apart to be one event."""
    write_days(tmp_path, [(0, "a", 0), (4, "a", 0)], [(5, "a")])
    nights = Nights(tmp_path)
    before = nights.ingest(config_of(tmp_path, f"{DAYS[0]}..{DAYS[4]}", 0, 2)).artifact.path
    made = nights.ingest(config_of(tmp_path, str(DAYS[5]), 0, 2, mapping_from=before))
    assert made.summary["rows_corrected"] == {str(DAYS[4]): 1}
    assert rows_of(made) == [("4/2", 1.0), ("5/0", 0.0), ("5/1", 1.0)]


C, LISTED = SparseFeature(min_count=1, rows=1000), SparseFeature(min_count=1, rows=1000, separator="/")


@pytest.mark.parametrize(
    ("then", "now", "again"),
    [
        ({"c": C, "event": C}, {"sparse": {"c": C}}, 1),
        ({"c": C, "event": C}, {"sparse": {"event": C, "c": C}}, 1),
        ({"c": LISTED}, {"sparse": {"c": LISTED}}, 1),
        ({"c": C}, {"sparse": {"c": LISTED}}, 0),
        ({"c": C}, {"sparse": {"c": C}, "weight": "w"}, 0),
    ],
)
def test_rows_are_corrected_across_nights_of_other_settings(tmp_path, then, now, again):
    """What is no feature any more is left out; a row that lacks what is one now is not trained on."""
    write_days(tmp_path, [(0, "a", 0)], [(1, "a")])
    for day in DAYS[:2]:
        header, *lines = (tmp_path / f"{day}.csv").read_text().splitlines()
        (tmp_path / f"{day}.csv").write_text("\n".join([f"{header},w", *(f"{line},2" for line in lines)]) + "\n")
    nights = Nights(tmp_path)
    before = nights.ingest(config_of(tmp_path, str(DAYS[0]), 0, 2, sparse=then)).artifact.path
    made = nights.ingest(config_of(tmp_path, str(DAYS[1]), 0, 2, mapping_from=before, **now))
    assert sum(made.summary["rows_corrected"].values()) == again
    assert made.split("train")["label"].to_list() == [0.0, 1.0] + [1.0] * again


@pytest.mark.parametrize(("then", "now", "again"), [(3, 3, 1), (3, 2, 0), (2, 3, 1)])
def test_longer_sequences_than_todays_model_reads_are_not_trained_on_again(tmp_path, then, now, again):
    """Its vectors of places end at its own longest history."""
    write_days(tmp_path, [(0, "a", 0)], [(1, "a")])
    for day in DAYS[:2]:
        header, *lines = (tmp_path / f"{day}.csv").read_text().splitlines()
        (tmp_path / f"{day}.csv").write_text("\n".join([f"{header},h", *(f"{line},x/y/z" for line in lines)]) + "\n")

    def past(longest):
        feature = EventColumn(column="h", table="c")
        return {"past": SequenceConfig(features={"of": feature}, target="c", separator="/", max_length=longest)}

    nights = Nights(tmp_path)
    before = nights.ingest(config_of(tmp_path, str(DAYS[0]), 0, 2, sequences=past(then))).artifact.path
    made = nights.ingest(config_of(tmp_path, str(DAYS[1]), 0, 2, mapping_from=before, sequences=past(now)))
    assert sum(made.summary["rows_corrected"].values()) == again
    assert made.split("train")["past__of"].list.len().max() == now


@pytest.mark.parametrize(
    "other",
    [
        {"dedupe": DedupeConfig(), "label": LabelConfig()},
        {"label": LabelConfig(column="other", window_days=2)},
        {"sparse": {"event": C}},
    ],
    ids=["no key", "another label", "other features"],
)
def test_another_model_of_the_log_loses_no_repeated_row_and_no_click(tmp_path, other):
    """Its dataset of the day before was made later, and has no events, those of another label, or other features."""
    write_days(tmp_path, [(0, "a", 0), (1, "a", 0), (0, "b", 1)], [(1, "a"), (1, "b")])
    for day in DAYS[:2]:
        header, *lines = (tmp_path / f"{day}.csv").read_text().splitlines()
        flipped = [f"{line},{1 - int(line[0])}" for line in lines]
        (tmp_path / f"{day}.csv").write_text("\n".join([f"{header},other", *flipped]) + "\n")
    nights = Nights(tmp_path)
    before = nights.ingest(config_of(tmp_path, str(DAYS[0]), 0, 2)).artifact.path
    nights.ingest(config_of(tmp_path, str(DAYS[0]), 0, 2, **other))
    made = nights.ingest(config_of(tmp_path, str(DAYS[1]), 0, 2, mapping_from=before))
    assert made.summary["rows_repeated"] == 1
    assert made.summary["rows_corrected"] == {str(DAYS[0]): 1}
    assert rows_of(made) == [("0/2", 1.0), ("1/0", 0.0), ("1/1", 1.0)]


def test_lines_of_dropped_rows_are_lines_of_their_file(tmp_path):
    """An engine that reads a file in parts numbers a later part's lines by how many the earlier ones had."""
    (tmp_path / "a.csv").write_text("label,c,event\n" + "".join(f"{at % 2},i,e{at % 3}\n" for at in range(9)))
    data = csv_config(tmp_path / "a.csv", dedupe=DedupeConfig(key="event"), dense={}).data
    spec = data_spec(data)
    source = file_sources(data, spec, find_files(str(tmp_path / "a.csv")), 1)[0]
    marked = WrappedSource(source, [MarkedRows(dropped=np.arange(5, 11))])
    counted, _, _ = count(next(marked.blocks()), CountJob(spec))
    assert (counted.kept, counted.lines) == (3, 9)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_drops_the_same_rows(nights_pair, tmp_path):
    local, on_ray = nights_pair
    assert on_ray.checksums == local.checksums


@pytest.fixture
def nights_pair(tmp_path):
    pytest.importorskip("ray")
    write_days(tmp_path, [(0, "a", 0), (0, "a", 1), (1, "b", 0), (1, "b", 1)], [(1, "a")])
    config = config_of(tmp_path, f"{DAYS[0]}..{DAYS[-1]}", 2, 2)
    made = [Nights(tmp_path / "local").ingest(config)]
    return *made, Nights(tmp_path / "ray").ingest(dataclasses.replace(config, ingest=IngestConfig(engine="ray")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dedupe": DedupeConfig(days=2)}, "data.dedupe.days is 2, but data.dedupe.key names no column"),
        ({"dedupe": DedupeConfig()}, "data.label.window_days is 2, but data.dedupe.key is null"),
        ({"label": LabelConfig(window_days=2, late_path="clicks.csv")}, "data.label.late_path has no {day}"),
        ({"label": LabelConfig(late_path="{day}.csv")}, "late_path is set, but data.label.window_days is 0"),
        ({"format": "synthetic"}, "late_path is set, but .* data.format=synthetic is no format of files"),
    ],
)
def test_settings_that_cannot_act_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message.replace("{", "\\{")):
        Nights(tmp_path).ingest(config_of(tmp_path, str(DAYS[0]), 0, 2, **changes))


def test_a_log_of_clicks_that_is_not_there_is_waited_for(tmp_path):
    write_days(tmp_path, [], [])
    (tmp_path / "clicks" / f"{DAYS[0]}.csv").unlink()
    with pytest.raises(DataError, match=r"2026-01-01 is not complete: there are no files at .*data.label.late_path"):
        Nights(tmp_path).ingest(config_of(tmp_path, str(DAYS[0]), 0, 2))
