"""``nightjar store gc``: what goes, what stays and why, on stores whose artifacts are only manifests."""

import dataclasses
import json
import os
import shutil
import time
from datetime import date, timedelta
from pathlib import Path

import pytest

from pipeline.checkpoint.index import name_of
from pipeline.cli import main
from pipeline.core import units
from pipeline.core.errors import ArtifactError
from pipeline.launch.locks import night_lock, run_lock
from pipeline.launch.run_records import read_steps, write_steps
from pipeline.publishing import model_commands, promotion, versions
from pipeline.records.runs import Step
from pipeline.records.study import DONE, TRYING, TrialRecord, trial_path
from pipeline.report import models
from pipeline.schedule import store_gc
from pipeline.schedule.inventory import Folder, Inventory, take_stock
from pipeline.schedule.night_config import find_base, run_name
from pipeline.schedule.nightly import last_night
from pipeline.schedule.store_gc import remove
from pipeline.store import Store
from pipeline.store.lease import CHECKS
from pipeline.store.removal import Removal, store_time
from tests.waits import TurnedClock

FIRST = date(2026, 1, 1)
PLACES = {"ingest": "datasets/d/{day}/{key}", "plan": "plans/{key}", "partition": "towers/{key}"}


def key_of(stage: str, number: int) -> str:
    return f"{10 * number + list(PLACES).index(stage):032x}"


def path_of(stage: str, number: int) -> str:
    return PLACES[stage].format(day=FIRST + timedelta(days=number), key=key_of(stage, number))


def put(store: Store, path: str, inputs: dict | None = None, files: tuple[str, ...] = ("a.bin",), **summary) -> None:
    key = path.rpartition("/")[2]
    with store.draft(path, kind="made", key=key, config={}, inputs=inputs or {}) as draft:
        for name in files:
            with draft.open(name) as sink:
                sink.write(b"x" * 1000)
        draft.commit(summary)


def run_of(number: int, model: str = "clicks") -> str:
    return run_name(model, FIRST + timedelta(days=number))


def night(store: Store, number: int, outcome: str = "published", model: str = "clicks", base: int | None = None) -> str:
    """All that a night leaves: dataset, plan, towers, its run with a chain of two checkpoints, a version; its run."""
    run, day = run_of(number, model), FIRST + timedelta(days=number)
    keys = {stage: key_of(stage, number) for stage in PLACES}
    for stage in PLACES:
        if store.find(path_of(stage, number)) is None:
            put(store, path_of(stage, number))
    write_steps(store, run, [Step(name=s, key=keys[s], path=path_of(s, number)) for s in PLACES])
    chain = f"runs/{run}/checkpoints/{number:010x}"
    put(store, f"{chain}/{name_of(5)}", step=5, type="baseline", parents=[])
    put(store, f"{chain}/{name_of(9)}", step=9, type="difference", parents=[name_of(5)])
    put(store, f"runs/{run}/train/{number:032x}", keys, final=f"{chain}/{name_of(9)}")
    before = (
        None
        if base is None
        else {
            "version": f"v{base:05d}-{base:08d}",
            "day": "",
            "run": run_of(base, model),
            "checkpoint": "",
            "dataset": path_of("ingest", base),
            "plan": path_of("plan", base),
        }
    )
    record = {"format": 1, "model": model, "date": str(day), "run": run, "outcome": outcome, "base": before}
    store.write_json(f"runs/{run}/nightly.json", record)
    if before:
        begins = {"data": {"mapping_from": before["dataset"]}, "plan": {"former": before["plan"]}}
        store.write_bytes(f"runs/{run}/config.yaml", json.dumps(begins).encode())
    if outcome in ("published", "held"):
        version = f"v{number:05d}-{number:08d}"
        about = {"run": run, "dataset": path_of("ingest", number), "checkpoint": f"{chain}/{name_of(9)}"}
        verdict = "HOLD" if outcome == "held" else "PASS"
        put(store, versions.version_path(model, version), keys, version=version, verdict=verdict, **about)
        if outcome == "published":
            promotion.promote(store, model, version, by="publish")
    return run


def age(store: Store, path: str, days: float) -> None:
    """All below ``path`` is as if it had been written ``days`` ago."""
    when = time.time() - days * store_gc.DAY
    for file in sorted(Path(store.full(path)).rglob("*")):
        if file.name == "manifest.json":
            found = store.find(str(file.parent.relative_to(store.root)))
            assert found is not None
            store.write_manifest(dataclasses.replace(found, created=when))
        os.utime(file, (when, when))


def gc(store: Store, keep_days: float = 30.0, grace_hours: float = 24.0, *, dry_run: bool = False) -> dict:
    return store_gc.collect(store, keep_days, grace_hours, dry_run=dry_run).to_json()


def removed(result: dict) -> set[str]:
    return {each["path"] for each in result["removed"]}


def kept(result: dict) -> dict[str, str]:
    return {each["path"]: each["reason"] for each in result["kept"]}


def everything(number: int, model: str = "clicks") -> set[str]:
    return {f"runs/{run_of(number, model)}", *(path_of(stage, number) for stage in PLACES)}


@pytest.fixture(scope="module")
def nights(tmp_path_factory) -> Path:
    """Five published nights, long ago, of which models gc has kept the last three versions."""
    made = Store(str(tmp_path_factory.mktemp("nights")))
    for number in range(5):
        night(made, number, base=number - 1 if number else None)
    model_commands.collect(made, "clicks", 3, 0.0, dry_run=False)
    age(made, "", 100)
    return Path(made.root)


@pytest.fixture
def store(nights: Path, tmp_path: Path) -> Store:
    """A copy of these nights, as old, of the test's own."""
    return Store(str(shutil.copytree(nights, tmp_path / "store")))


def test_what_versions_refer_to_stays_whole_and_what_nobody_needs_goes(store: Store) -> None:
    result = gc(store)
    assert removed(result) == everything(0) | everything(1)
    assert set(kept(result)) == everything(2) | everything(3) | everything(4)
    assert not any(store.exists(path) for path in removed(result))
    assert not store.exists("datasets/d/2026-01-01"), "nor an empty folder for its day"
    assert result["bytes"] > 2 * 6 * 1000
    chain = f"runs/{run_of(2)}/checkpoints/{2:010x}"
    assert all(store.find(f"{chain}/{name_of(step)}") for step in (5, 9)), "the checkpoint with what it rests on"
    assert kept(result)[f"runs/{run_of(2)}"] == store_gc.NAMED_BY_VERSION
    assert removed(gc(store)) == set()


def test_the_next_night_finds_its_base_and_a_rollback_works(store: Store) -> None:
    gc(store, 0, 0)
    base = find_base(store, "clicks", FIRST + timedelta(days=5))
    assert base is not None and base.run == run_of(4)
    assert all(store.find(path) for path in (base.checkpoint, base.dataset, base.plan))
    promotion.roll_back(store, "clicks", "complaints")
    back = find_base(store, "clicks", FIRST + timedelta(days=5))
    assert back is not None and back.run == run_of(3)
    assert all(store.find(path) for path in (back.checkpoint, back.dataset, back.plan))
    assert last_night(store, "clicks", FIRST + timedelta(days=9)) == FIRST + timedelta(days=4)


def test_held_versions_keep_what_they_refer_to_until_models_gc_removes_them(store: Store) -> None:
    night(store, 5, "held")
    night(store, 6)
    age(store, "", 100)
    assert everything(5) <= kept(gc(store)).keys()
    night(store, 7)
    model_commands.collect(store, "clicks", 1, 0.0, dry_run=False)
    age(store, "", 100)
    assert everything(5) <= removed(gc(store))


def test_the_newest_night_of_a_model_stays_though_no_version_is_left(store: Store) -> None:
    """nightly.catch_up counts from the newest verdict; a later night that failed goes on from what it began with."""
    night(store, 10, "held", "others")
    night(store, 11, "failed", "others", base=8)
    night(store, 8, "failed", "others")
    night(store, 9, "failed", "others")  # a newer one has its verdict: nobody goes on with this one
    for name in store.names("models/others"):
        store.fs.rm(store.full(f"models/others/{name}"), recursive=True)
    age(store, "", 100)
    result = gc(store)
    reasons = {number: kept(result).get(f"runs/{run_of(number, 'others')}") for number in (8, 9, 10, 11)}
    assert reasons == {8: store_gc.BASE, 9: None, 10: store_gc.NEWEST_NIGHT, 11: store_gc.NEWEST_NIGHT}
    assert everything(8, "others") | everything(10, "others") | everything(11, "others") <= kept(result).keys()
    assert everything(9, "others") <= removed(result)
    assert last_night(store, "others", FIRST + timedelta(days=12)) == FIRST + timedelta(days=10)


def test_what_is_young_stays(store: Store) -> None:
    age(store, f"runs/{run_of(0)}", 20)
    age(store, path_of("ingest", 1), 20)
    assert removed(gc(store)) == everything(1) - {path_of("ingest", 1)}, "a kept run keeps what it was made of"
    assert {path_of("ingest", 1), *everything(0)} <= removed(gc(store, keep_days=19))


def test_the_grace_hours_hold_whatever_keep_days_says(store: Store) -> None:
    age(store, f"runs/{run_of(0)}", 0.5)
    assert f"runs/{run_of(0)}" not in removed(gc(store, keep_days=0))
    assert f"runs/{run_of(0)}" in removed(gc(store, keep_days=0, grace_hours=11))


def test_a_run_that_a_launcher_holds_stays_with_all_that_it_names(store: Store, capsys) -> None:
    with run_lock(store, run_of(0), 30.0):
        assert main(["store", "gc", "--store", store.url]) == 0
    assert f"keep runs/{run_of(0)}  a launcher works on it" in capsys.readouterr().out
    assert all(store.exists(path) for path in everything(0))
    assert not any(store.exists(path) for path in everything(1))
    assert removed(gc(store)) == everything(0)


@pytest.mark.parametrize("url", ["", "memory://prune-begun"])
def test_a_run_that_is_begun_while_things_go_keeps_what_it_names(tmp_path: Path, url: str) -> None:
    store = Store(url or str(tmp_path))
    for number in range(3):
        night(store, number, "failed")
    rules = store_gc.Rules(keep=0.0, grace=0.0, now=time.time())
    found = take_stock(store)
    going, _ = store_gc.may_go(found, store_gc.needs_of(store, found, {}, rules), rules)
    write_steps(store, run_of(0), read_steps(store, run_of(0)))  # as every launcher begins
    gone, left = remove(store, going, rules.now)
    assert {each.path for each in left} == everything(0)
    assert {each.reason for each in left} == {"in use"}
    assert {each.path for each in gone} == everything(1) and all(store.exists(path) for path in everything(0))


def test_a_run_that_a_launcher_took_meanwhile_stays(store: Store) -> None:
    rules = store_gc.Rules(keep=0.0, grace=0.0, now=time.time())
    found = take_stock(store)
    going, _ = store_gc.may_go(found, store_gc.needs_of(store, found, {}, rules), rules)
    with run_lock(store, run_of(0), 30.0):
        _, left = remove(store, going, rules.now)
    assert [each.path for each in left] == [f"runs/{run_of(0)}"]


def test_an_artifact_that_is_being_written_stays(store: Store) -> None:
    with store.locked(path_of("plan", 0)):
        result = gc(store)
    assert kept(result)[path_of("plan", 0)] == "in use" and store.find(path_of("plan", 0)) is not None
    assert path_of("plan", 0) not in removed(result) and path_of("plan", 0) in removed(gc(store))


def test_while_a_night_works_nothing_goes_but_looking_is_allowed(store: Store, capsys, monkeypatch) -> None:
    clock = TurnedClock(runs=False)
    clock.stand_in(monkeypatch)
    renewing = clock.turning(60.0 / CHECKS, lambda: clock.waiting() == 3)
    with night_lock(store, "clicks", 60.0, "night 2026-01-06"), renewing:
        assert main(["store", "gc", "--store", store.url]) == 8
        said = capsys.readouterr()
        assert "model 'clicks' is already being worked on" in said.err and "(night 2026-01-06)" in said.err
        assert said.err.count("hint:") == 1 and "Traceback" not in said.err
        assert main(["store", "gc", "--store", store.url, "--dry-run"]) == 0
    assert all(store.exists(path) for path in everything(0))
    assert main(["store", "gc", f"store={store.url}"]) == 0
    assert not any(store.exists(path) for path in everything(0))
    assert not store.exists("nightly/clicks/lease.json")


def test_a_dry_run_says_the_same_and_removes_nothing(store: Store, capsys) -> None:
    before = sorted(store.fs.find(store.root))
    assert main(["store", "gc", "--store", store.url, "--dry-run", "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)
    assert tried["dry_run"] and sorted(store.fs.find(store.root)) == before
    assert main(["store", "gc", "--store", store.url, "--dry-run"]) == 0
    text = capsys.readouterr().out
    size = next(units.size(each["bytes"]) for each in tried["removed"] if each["path"] == path_of("ingest", 0))
    assert f"would remove {path_of('ingest', 0)}  {size}  nothing kept refers to it, 100 days old" in text
    assert f"would remove 2 datasets, 2 runs, 2 plans, 2 towers artifacts: {units.size(tried['bytes'])}" in text
    assert "kept 3 datasets, 3 runs, 3 plans, 3 towers artifacts, for 3 versions\n  3 datasets, " in text
    assert removed(gc(store)) == removed(tried)


def test_remains_of_killed_processes_go_once_they_are_old(store: Store) -> None:
    half = f"datasets/d/2026-03-01/{77:032x}"
    for path in (f"{half}/train/part-0.parquet", f"runs/{run_of(4)}/.write-abc", "datasets/d/x.parquet.partial"):
        store.write_bytes(path, b"half")
    Path(store.full(f"plans/{78:032x}")).mkdir()
    store.write_bytes("datasets/d/notes.txt", b"mine")
    store.write_bytes("plans/mine/plan.json", b"{}")
    young = gc(store)
    assert kept(young)[half] == store_gc.GRACE
    assert removed(young) == everything(0) | everything(1)
    age(store, "", 2)
    empty = store.full(f"plans/{78:032x}")
    os.utime(empty, (0, 0))
    remains = {half, f"plans/{78:032x}", f"runs/{run_of(4)}/.write-abc", "datasets/d/x.parquet.partial"}
    result = gc(store)
    assert removed(result) == remains
    assert {each["kind"] for each in result["removed"]} == {"remains"}
    assert store.exists("datasets/d/notes.txt") and store.exists("plans/mine/plan.json"), "what is no artifact stays"


def test_an_artifact_that_lost_its_manifest_stays_while_something_was_made_of_it(store: Store) -> None:
    for path in (path_of("ingest", 4), path_of("ingest", 0)):
        store.fs.rm_file(store.full(f"{path}/manifest.json"))
    result = gc(store)
    assert kept(result)[path_of("ingest", 4)] == f"{store_gc.NAMED_BY_VERSION}, though its manifest.json is gone"
    assert path_of("ingest", 4) in result["noticed"]
    assert path_of("ingest", 0) in removed(result)


def test_an_artifact_with_a_damaged_manifest_stays_and_is_named(store: Store, capsys) -> None:
    store.write_bytes(f"{path_of('plan', 0)}/manifest.json", b"{")
    age_of = store.full(f"{path_of('plan', 0)}/manifest.json")
    os.utime(age_of, (0, 0))
    assert main(["store", "gc", "--store", store.url]) == 0
    assert f"keep {path_of('plan', 0)}  its manifest.json is damaged" in capsys.readouterr().out
    assert store.exists(f"{path_of('plan', 0)}/a.bin") and not store.exists(path_of("plan", 1))


def test_what_looks_of_the_gate_spent_stays(store: Store) -> None:
    """Also where it cannot be read: nothing in it refers to an artifact."""
    store.write_bytes("models/clicks/budget.json", b"{")
    os.utime(store.full("models/clicks/budget.json"), (0, 0))
    assert removed(gc(store)) and store.fs.cat_file(store.full("models/clicks/budget.json")) == b"{"


@pytest.mark.parametrize(
    "file",
    [
        "models/clicks/v00002-00000002/manifest.json",
        "models/clicks/current.json",
        f"runs/{run_of(4)}/steps.json",
        f"runs/{run_of(4)}/config.yaml",
        f"runs/{run_of(4)}/result.json",
        f"runs/{run_of(2)}/train/{2:032x}/manifest.json",
        f"runs/{run_of(0)}/nightly.json",
    ],
)
@pytest.mark.parametrize("content", [b"{", b"[]", b'{"stages": [1], "steps": [2]}'])
def test_where_it_is_not_known_what_is_needed_nothing_goes(store: Store, capsys, file: str, content: bytes) -> None:
    if content[:1] == b"{" and len(content) > 1 and file.endswith(".yaml"):
        content = b"data: {mapping_from: ["
    store.write_bytes(file, content)
    before = sorted(store.fs.find(store.root))
    assert main(["store", "gc", "--store", store.url]) == 7
    said = capsys.readouterr().err
    assert f"{store.url}/{file}".rpartition("/")[0] in said and "hint:" in said and "Traceback" not in said
    assert sorted(store.fs.find(store.root)) == before


def test_a_version_that_serves_but_is_gone_stops_it(store: Store) -> None:
    store.fs.rm_file(store.full("models/clicks/v00004-00000004/manifest.json"))
    with pytest.raises(ArtifactError, match="names v00004-00000004, which does not exist"):
        gc(store)
    assert all(store.exists(path) for path in everything(0))


def test_killed_in_the_middle_nothing_looks_whole_and_the_next_one_goes_on(store: Store) -> None:
    tried = gc(store, dry_run=True)
    going = [Removal(**each) for each in tried["removed"]]

    def killed(phase: str) -> None:
        raise KeyboardInterrupt

    for entry in going:
        with pytest.raises(KeyboardInterrupt):
            remove(store, [entry], time.time(), killed)
        left = store.fs.find(store.full(entry.path))
        assert left and not [name for name in left if name.endswith("manifest.json")]
    assert removed(gc(store)) == removed(tried)
    assert not any(store.exists(path) for path in removed(tried))


def test_rows_kept_for_days_to_come_keep_their_dataset(store: Store) -> None:
    def dataset(day: str, number: int, *late: str) -> str:
        path = f"datasets/other/{day}/{number:032x}"
        put(store, path, files=tuple(f"late/{each}.parquet" for each in late))
        age(store, path, 100)
        return path

    first, last = dataset("2026-01-01", 900, "2025-12-31", "2026-01-02"), dataset("2026-01-02", 901, "2026-01-03")
    result = gc(store)
    assert kept(result)[last] == store_gc.LATE
    assert first in removed(result), "the day it kept rows for was ingested, the one before it never will be"


def test_events_that_the_next_days_look_for_keep_their_datasets(store: Store) -> None:
    def dataset(day: str, number: int, window: int) -> str:
        path = f"datasets/shop/{day}/{number:032x}"
        config = {"data": {"dedupe": {"key": "event", "days": 1}, "label": {"window_days": window}}}
        with store.draft(path, kind="ingest", key=f"{number:032x}", config=config, inputs={}) as draft:
            with draft.open("events/part-00000.parquet") as sink:
                sink.write(b"x")
            draft.commit({})
        age(store, path, 100 - number / 100)
        return path

    old, former, again, newest = (
        dataset(day, 910 + at, 3) for at, day in enumerate(("2026-01-01", "2026-01-02", "2026-01-02", "2026-01-04"))
    )
    bare = "datasets/shop/2026-01-03/0000000000000000000000000000abcd"
    put(store, bare)  # without events
    age(store, bare, 100)
    result = gc(store)
    assert {old, former, bare} <= removed(result), "one was delivered again"
    assert kept(result)[again] == kept(result)[newest] == store_gc.AWAITED
    last = dataset("2026-01-05", 920, 0)
    assert again in removed(gc(store)) and kept(gc(store))[last] == store_gc.AWAITED, "dedupe.days is 1"


def test_events_that_histories_of_the_next_days_are_built_from_keep_their_datasets(store: Store) -> None:
    """Without them the next nights would go on with shorter histories, and no error would say so."""
    history = {"data": {"sequences": {"seen": {"history": {"by": "user", "days": 2}}, "given": {"time": "at"}}}}

    def dataset(number: int) -> str:
        path = f"datasets/shop/2026-01-0{number}/{930 + number:032x}"
        with store.draft(path, kind="ingest", key=f"{930 + number:032x}", config=history, inputs={}) as draft:
            with draft.open("histories/seen/part-00000.parquet") as sink:
                sink.write(b"x")
            draft.commit({})
        age(store, path, 100)
        return path

    days = [dataset(number) for number in range(1, 6)]
    result = gc(store)  # days of other zones, and of 23 hours, make it three days before the next one
    assert set(days) & removed(result) == set(days[:2])
    assert {kept(result)[path] for path in days[2:]} == {store_gc.AWAITED}


def test_events_stay_though_another_model_of_the_log_has_ingested_the_day_without_them(store: Store) -> None:
    config = {"data": {"dedupe": {"key": "event", "days": 3}}}
    for number, events in ((940, True), (941, False)):
        path = f"datasets/shop/2026-01-02/{number:032x}"
        with store.draft(path, kind="ingest", key=f"{number:032x}", config=config, inputs={}) as draft:
            with draft.open("events/part-00000.parquet" if events else "a.bin") as sink:
                sink.write(b"x")
            draft.commit({})
        age(store, path, 1050 - number)
    result = gc(store)
    assert kept(result)[f"datasets/shop/2026-01-02/{940:032x}"] == store_gc.AWAITED
    assert f"datasets/shop/2026-01-02/{941:032x}" in removed(result)


def test_models_that_keep_other_events_of_one_day_each_have_theirs(store: Store) -> None:
    """They reach as far, so that alone does not tell their datasets apart."""

    def keeps(by: str, column: str) -> dict:
        features = {"ads": {"table": "ad"}, "zone": {"column": column}}
        seen = {"history": {"by": by, "days": 2}, "features": features, "max_length": len(by)}
        return {"sequences": {"seen": seen}, "sparse": {"ad": {"column": "ad_id"}}}

    settings = [
        ("events", {"dedupe": {"key": "event", "days": 3}, "label": {"column": "clicked", "positive": "1"}}),
        ("events", {"dedupe": {"key": "click", "days": 3}, "label": {"column": "clicked", "positive": "1"}}),
        ("events", {"dedupe": {"key": "event", "days": 3}, "label": {"column": "bought", "positive": "1"}}),
        ("histories/seen", keeps("user", "zone")),
        ("histories/seen", keeps("session", "zone")),
        ("histories/seen", keeps("user", "place")),
    ]
    paths = []
    for number, (folder, data) in enumerate([*settings, settings[0]], start=960):
        path = f"datasets/shop/2026-01-02/{number:032x}"
        with store.draft(path, kind="ingest", key=f"{number:032x}", config={"data": data}, inputs={}) as draft:
            with draft.open(f"{folder}/part-00000.parquet") as sink:
                sink.write(b"x")
            draft.commit({})
        age(store, path, 1100 - number)
        paths.append(path)
    result = gc(store)
    assert set(paths) & removed(result) == {paths[0]}, "its settings are those of the last one"
    assert {kept(result)[path] for path in paths[1:]} == {store_gc.AWAITED}


def test_events_stay_for_the_next_day_of_a_backfill_though_later_days_were_ingested_before(store: Store) -> None:
    paths = []
    for number, day in enumerate(("2026-02-01", "2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"), start=970):
        path = f"datasets/shop/{day}/{number:032x}"
        config = {"data": {"dedupe": {"key": "event", "days": 2}}}
        with store.draft(path, kind="ingest", key=f"{number:032x}", config=config, inputs={}) as draft:
            with draft.open("events/part-00000.parquet") as sink:
                sink.write(b"x")
            draft.commit({})
        age(store, path, 1100 - number)
        paths.append(path)
    newest, first, second, third, fourth = paths
    result = gc(store)
    assert set(paths) & removed(result) == {first, second}
    assert {kept(result)[path] for path in (newest, third, fourth)} == {store_gc.AWAITED}


def test_a_dataset_that_was_replaced_or_is_of_no_day_goes(store: Store) -> None:
    again, plain = f"datasets/d/{FIRST + timedelta(days=4)}/{950:032x}", f"datasets/d/{951:032x}"
    for path in (again, plain):
        put(store, path)
        age(store, path, 31)
    result = gc(store)
    assert {again, plain} <= removed(result) and path_of("ingest", 4) in kept(result)


def test_what_may_go_is_decided_without_a_store() -> None:
    old = Folder(path="plans/a", kind="plan", bytes=3, written=0.0, created=0.0)
    run = Folder(path="runs/r", kind="run", bytes=5, written=90 * store_gc.DAY)
    rules = store_gc.Rules(keep=store_gc.DAY, grace=store_gc.HOUR, now=100 * store_gc.DAY)
    nobody = store_gc.Needs(runs={}, keys={}, meant={})
    going, staying = store_gc.may_go(Inventory(folders=(old, run)), nobody, rules)
    assert [each.path for each in going] == ["runs/r", "plans/a"] and staying == []
    named = store_gc.Needs(runs={"r": store_gc.LOCKED_RUN}, keys={}, meant={"a": store_gc.NAMED_BY_RUN})
    going, staying = store_gc.may_go(Inventory(folders=(old, run)), named, rules)
    assert going == [] and [each.reason for each in staying] == [store_gc.LOCKED_RUN, store_gc.NAMED_BY_RUN]


@pytest.mark.parametrize("days", [-40, 40])
def test_an_object_store_whose_clock_differs_is_pruned_by_that_clock(monkeypatch, days: int) -> None:
    """Files are as old as the store says, and a run that begins while things go is seen, whatever this clock shows."""
    store = Store(f"memory://prune-clock-{days}")
    for number in range(2):
        night(store, number, "failed")
    store.write_bytes(f"plans/{79:032x}/plan.json", b"half")
    real, ahead = store.fs.modified, timedelta(days=days)
    monkeypatch.setattr(store.fs, "modified", lambda path: real(path) + ahead)
    assert removed(gc(store)) == set(), "all of it is young"
    rules = store_gc.Rules(keep=0.0, grace=0.0, now=store_time(store))
    found = take_stock(store)
    assert all(abs(each.since - rules.now) < store_gc.DAY for each in found.folders)
    going, _ = store_gc.may_go(found, store_gc.needs_of(store, found, {}, rules), rules)
    write_steps(store, run_of(0), read_steps(store, run_of(0)))  # as every launcher begins
    gone, left = remove(store, going, rules.now)
    assert {each.path for each in left} >= everything(0)
    assert f"plans/{79:032x}" in {each.path for each in gone}
    assert all(store.exists(path) for path in everything(0))


def study(store: Store, name: str, **states: str) -> None:
    """A study with a trial in each of ``states``, by the run's number."""
    store.write_json(f"studies/{name}/study.json", {"study": name})
    for number, (run, state) in enumerate(states.items()):
        trial = TrialRecord(number=number, run=run, state=state, parameters={}, started=1.0)
        store.write_json(trial_path(name, number), trial.to_json())
        store.write_bytes(f"runs/{run}/config.yaml", b"{}")


def test_trials_that_a_study_goes_on_with_stay_and_so_do_its_records_and_what_searches_found(store: Store) -> None:
    study(store, "s", goes_on=TRYING, is_done=DONE)
    put(store, "searches/found", {"ingest": key_of("ingest", 0)})
    store.write_bytes("searching/left/search.state", b"x" * 10)
    for path in ("studies/s/.write-abc", "searches/half/search.json", "searching/x/search.state.partial"):
        store.write_bytes(path, b"half")
    age(store, "", 100)
    result = gc(store)
    assert kept(result)["runs/goes_on"] == store_gc.TRIAL and "runs/is_done" in removed(result)
    assert kept(result)["studies/s"] == store_gc.RECORDS and kept(result)["searches/found"] == store_gc.FOUND
    gone = {"searching/left", "studies/s/.write-abc", "searches/half"}
    assert gone <= removed(result) and not any(store.exists(path) for path in gone)
    assert {"searching/x", "searching/x/search.state.partial"} & removed(result)
    assert store.exists("studies/s/study.json") and store.find("searches/found") is not None
    said = models.removed_from_store(store_gc.collect(store, 30.0, 24.0, dry_run=True))
    assert "1 study, 1 search" in said


def test_a_search_under_way_stays_while_it_is_young_or_locked(store: Store) -> None:
    store.write_bytes("searching/young/search.state", b"x")
    assert kept(gc(store))["searching/young"] == store_gc.YOUNG
    age(store, "", 100)
    with store.locked("searching/young"):
        assert kept(gc(store))["searching/young"] == "in use"
    assert "searching/young" in removed(gc(store))


def test_a_study_whose_trials_cannot_be_read_stops_it(store: Store) -> None:
    study(store, "s", goes_on=TRYING)
    store.write_bytes(trial_path("s", 0), b"{")
    age(store, "", 100)
    with pytest.raises(ArtifactError, match="trials/00000.json"):
        gc(store)
    assert store.exists("runs/goes_on/config.yaml") and all(store.exists(path) for path in everything(0))


def test_an_object_store_is_pruned_alike() -> None:
    store = Store("memory://prune")
    for number in range(3):
        night(store, number, base=number - 1 if number else None)
    model_commands.collect(store, "clicks", 1, 0.0, dry_run=False)
    store.write_bytes(f"plans/{78:032x}/plan.json", b"half")
    assert removed(gc(store)) == set(), "all of it is young"
    result = gc(store, 0, 0)
    assert removed(result) == everything(0) | {f"plans/{78:032x}"}
    assert not any(store.exists(path) for path in removed(result))
    assert all(store.exists(path) for path in everything(1) | everything(2))


def test_an_empty_store_and_mistakes(tmp_path: Path, capsys) -> None:
    assert main(["store", "gc", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to remove\nkept nothing, for 0 versions\n"
    assert main(["store", "gc", "--store", str(tmp_path / "gone")]) == 2
    assert "there is no store at" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["store", "gc", "--store", str(tmp_path), "--keep-days", "-1"])
    assert "'-1' is not an amount; expected a number, 0 or more" in capsys.readouterr().err
