"""Plans for nights to come: tables grow by their trend, memory is full on the planted night, remedies are planned."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.planning import PlanInputs
from pipeline.plugins.capacity.growth import Limit, NightDataset, Nights, check_tables, read_nights
from pipeline.plugins.capacity.outlook import outlook, shown_nights, slowest_memory, with_rows
from pipeline.plugins.capacity.outlook_page import outlooks_text
from pipeline.plugins.capacity.outlook_record import Outlook
from pipeline.plugins.capacity.what_if import limits_of
from pipeline.records import DatasetSchema, SparseColumn, plain
from pipeline.records.json_schema import json_schema
from pipeline.store import Store
from tests.planning.plan_cases import configure, cpu, dataset

FIRST = date(2026, 1, 1)


def limits(rows: dict[str, int], **changes) -> dict[str, Limit]:
    settings = {"when_full": "replace", "grows": True} | changes
    return {name: Limit(rows=most, setting=f"data.sparse.{name}.rows", **settings) for name, most in rows.items()}


def nights(tables: dict[str, list[int]], skipped: tuple[int, ...] = ()) -> Nights:
    """A night for each number in the lists; None: the night does not have the table. ``skipped``: days without one."""
    count = len(next(iter(tables.values())))
    days = [FIRST + timedelta(days=i) for i in range(count + len(skipped)) if i not in skipped]
    made = []
    for place, day in enumerate(days):
        rows = {name: sizes[place] for name, sizes in tables.items() if sizes[place] is not None}
        made.append(NightDataset(dataset=f"datasets/d/{day}/k", first=day, last=day, schema=dataset(rows)[0]))
    return Nights(nights=tuple(made))


def planted(
    tables: dict[str, list[int]],
    ddr: float,
    most: int = 10**8,
    count: int = 30,
    ssd: float = 0.0,
    owners: int = 0,
    **more,
):
    config = configure(cpu(1 + owners, 1, ddr=ddr))
    config.hardware.embedding_hosts = owners
    config.hardware.ssd_gib, config.hardware.ssd_gb_per_s, config.hardware.ssd_read_iops = ssd, 0.1, 5_000.0
    known = nights(tables, **more)
    schema, profile = dataset({table.name: table.rows for table in known.newest.schema.tables})
    inputs = PlanInputs.of(config, schema, profile)
    names = {table.name: most for table in schema.tables}
    return inputs, outlook(inputs, known, limits(names), count, {}, model="clicks")


def first_short(inputs: PlanInputs, rows_at, place: int = 0) -> int:
    """The first night with the planted rows for which the planner needs more than the memories up to ``place``."""
    return next(night for night in range(200) if slowest_memory(with_rows(inputs, rows_at(night))) > place)


def linear(start: int, pace: int, count: int = 8, seed: int = 0) -> list[int]:
    steps = np.random.default_rng(seed).normal(pace, 0.05 * pace, count - 1).round().astype(int)
    return [start, *(start + np.cumsum(steps)).tolist()]


def test_the_night_when_memory_is_full_is_found_on_planted_growth():
    tables = {"user": linear(1_000_000, 100_000), "city": [5_000] * 8}
    inputs, record = planted(tables, ddr=1.0)
    truth = first_short(inputs, lambda night: {"user": 1_700_000 + 100_000 * night, "city": 5_000})
    assert 5 < truth < 28
    full = record.tiers["ddr"].full
    assert full.night == pytest.approx(truth, abs=1) and full.earliest <= truth <= full.latest
    assert record.tiers["ddr"].last and not record.fits
    assert [plan.fits for plan in record.plans] == [plan.night < full.night for plan in record.plans]
    assert record.tables["city"].trend == "stopped" and record.tables["user"].trend == "steady"


def test_remedies_keep_the_tables_there_until_the_last_night():
    inputs, record = planted({"user": linear(1_000_000, 100_000), "city": [5_000] * 8}, ddr=1.0)
    cap, *others = record.tiers["ddr"].remedies
    setting, rows = cap.split("=")
    assert (
        setting == "data.sparse.user.rows"
        and slowest_memory(with_rows(inputs, {"user": int(rows), "city": 5_000})) == 0
    )
    assert any(remedy.startswith("hardware.ssd_gib=") for remedy in others)
    ddr = next(remedy for remedy in others if remedy.startswith("hardware.ddr_gib="))
    larger = inputs.changed("hardware.ddr_gib", float(ddr.partition("=")[2]))
    assert slowest_memory(with_rows(larger, {name: table.rows["30"][1] for name, table in record.tables.items()})) == 0


def test_remedies_of_a_bipartite_cluster_are_those_of_its_embedding_hosts():
    tables = {"user": linear(1_000_000, 100_000), "city": linear(800_000, 100_000, seed=1)}
    inputs, record = planted(tables, ddr=1.0, owners=1)
    assert record.tiers["ddr"].last and not record.fits
    remedies = record.tiers["ddr"].remedies
    last = {name: table.rows["30"][1] for name, table in record.tables.items()}
    memory = next(remedy for remedy in remedies if remedy.startswith("hardware.embedding_ddr_gib="))
    hosts = next(remedy for remedy in remedies if remedy.startswith("hardware.hosts="))
    for remedy in (memory, hosts):
        changed = inputs
        for path, _, value in (each.partition("=") for each in remedy.split()):
            changed = changed.changed(path, float(value) if "gib" in path else int(value))
        assert slowest_memory(with_rows(changed, last)) == 0, remedy
    assert "hardware.embedding_hosts=" in hosts and not any("hardware.ddr_gib" in each for each in remedies)


def test_a_slower_memory_takes_over_and_the_step_takes_longer():
    inputs, record = planted({"user": linear(1_000_000, 100_000), "city": [5_000] * 8}, ddr=1.0, ssd=50.0)
    truth = first_short(inputs, lambda night: {"user": 1_700_000 + 100_000 * night, "city": 5_000})
    assert list(record.tiers) == ["ddr"] and not record.tiers["ddr"].last and record.fits
    assert record.tiers["ddr"].full.night == pytest.approx(truth, abs=1)
    before, after = record.plans[0], record.plans[-1]
    assert before.filled["ddr"] < 1 and before.tiers["ssd_bytes"] == 0 < after.tiers["ssd_bytes"]
    assert after.step_ms > before.step_ms
    assert any(plan.moved and plan.moved["user"][1] == "ssd table_wise" for plan in record.plans)
    assert any(remedy.startswith("hardware.ddr_gib=") for remedy in record.tiers["ddr"].remedies)


def test_a_limit_stops_the_growth_and_names_its_night_and_override():
    _, record = planted({"user": linear(1_000, 100)}, ddr=8.0, most=2_900)
    user = record.tables["user"]
    assert user.full.night == pytest.approx(12, abs=1) and user.full.earliest <= 12 <= user.full.latest
    assert user.rows["30"] == (2_900, 2_900, 2_900) and not record.tiers and record.fits
    text = outlooks_text([record])
    assert f"user reaches its limit on night {user.full.night} [" in text and "take rows of ids" in text
    assert "data.sparse.user.rows above 2900 makes room" in " ".join(text.split())
    assert "no tier is full by night 30" in text


def test_missing_nights_and_renamed_features():
    renamed = {"user": [None] * 3 + linear(1_000, 100, 5), "new": [None] * 6 + [10, 20], "old": linear(1_000, 50)}
    _, record = planted(renamed, ddr=8.0, skipped=(4, 5))
    assert record.missing == ("2026-01-05", "2026-01-06") and record.read[-1] == "2026-01-10"
    assert len(record.tables["user"].history) == 5 and record.tables["user"].trend == "steady"
    assert record.tables["new"].trend == "short" and record.tables["new"].rows["30"] == (20, 20, 20)
    text = outlooks_text([record])
    assert "no night of 2026-01-05, 2026-01-06" in text and "note: new: fewer than 3 nights" in text
    # A day without a night adds no rows: the pace is that of a night.
    assert record.tables["old"].rows["30"][1] == pytest.approx(1_350 + 30 * 50, rel=0.05)
    with pytest.raises(ConfigError) as error:
        check_tables(nights({"user": [1, 2, 3]}).newest, ["user_id"])
    assert "user_id of the settings is not in it; its user is not in the settings" in error.value.message


def test_what_is_shown_and_its_schema():
    assert shown_nights(30) == [0, 10, 20, 30] and shown_nights(1) == [0, 1] and shown_nights(7) == [0, 2, 5, 7]
    _, record = planted({"user": linear(1_000, 100)}, ddr=8.0, count=7)
    data = json.loads(json.dumps(plain(record)))
    assert Outlook.from_json(data) == record
    schema = json_schema(Outlook)
    assert set(schema["required"]) <= set(data) <= set(schema["properties"])
    assert {"night", "day", "rows", "fits", "step_ms", "tiers", "filled", "tables"} <= set(data["plans"][0])
    assert data["plans"][-1]["day"] == "2026-01-15"


def test_a_hashed_table_keeps_its_rows():
    config = configure(cpu(1, 1))
    schema, profile = dataset({"user": 500})
    inputs = PlanInputs.of(config, schema, profile)
    record = outlook(inputs, nights({"user": [500] * 3}), limits({"user": 500}, grows=False), 5, {}, model="clicks")
    assert record.tables["user"].trend == "fixed" and record.tables["user"].full.night is None
    assert "reaches" not in outlooks_text([record])


def chain(store: Store, rows: list[int], before: str | None = None, start: int = 0) -> list[str]:
    """Datasets whose mappings go on from each other, each with a table of so many rows."""
    paths = []
    for number, size in enumerate(rows, start):
        day = FIRST + timedelta(days=number)
        path = f"datasets/d/{day}/key{number}{len(paths)}{size}"
        config = {"data": {"mapping_from": before}}
        with store.draft(path, kind="ingest", key=f"k{number}{size}", config=config, inputs={}) as draft:
            columns = (SparseColumn(name="user", rows=size),)
            schema = DatasetSchema(dense=(), sparse=columns, rows={}, files={}, groups={})
            draft.write_json("schema.json", schema.to_json())
            draft.commit({})
        before = path
        paths.append(path)
    return paths


def test_nights_are_those_that_the_last_one_continues(tmp_path: Path):
    store = Store(str(tmp_path))
    first = chain(store, [10, 20, 30, 9_999])
    # The night of 9,999 rows was rolled back: the next one goes on from the night before it.
    paths = chain(store, [40, 50], before=first[2], start=4)
    known = read_nights(store, paths[-1], "clicks")
    assert known.history("user").rows.tolist() == [10, 20, 30, 40, 50]
    assert known.missing == ("2026-01-04",) and known.gone == ""


def test_too_few_nights_are_named(tmp_path: Path):
    store = Store(str(tmp_path))
    paths = chain(store, [10, 20], before="datasets/d/2025-12-31/gone")
    with pytest.raises(ArtifactError) as error:
        read_nights(store, paths[-1], "clicks")
    assert "model 'clicks' has 2 nights (2026-01-01, 2026-01-02) in store" in error.value.message
    assert "expected at least 3" in error.value.message and "datasets/d/2025-12-31/gone, is gone" in error.value.message
    assert "nightjar backfill" in error.value.hint and "nightjar store gc --keep-days 60" in error.value.hint


def test_remedies_name_the_settings_of_tables_of_sequences() -> None:
    history = "{by: user, days: 2}"
    sequence = (
        f"+data.sequences.seen={{features: {{item: {{table: item}}, kind: {{}}}}, target: item, history: {history}}}"
    )
    log = ["data=csv", "data.name=d", "data.path=x.csv", "data.timestamp=t", "data.day=2026-01-01"]
    limits = limits_of(compose([*log, "+data.sparse.item={}", sequence], night=True))
    assert {name: limit.setting for name, limit in limits.items()} == {
        "item": "data.sparse.item.rows",
        "seen__kind": "data.sequences.seen.features.kind.rows",
        "seen__age": "data.sequences.seen.age_bins",
    }
