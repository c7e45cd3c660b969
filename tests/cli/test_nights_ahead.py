"""``nightjar what-if --nights`` on a store whose nights are manifests and schemas: results, messages, exit codes."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest

from pipeline.publishing.promotion import promote, roll_back
from pipeline.publishing.versions import version_path
from pipeline.records import DatasetSchema, DenseProfile, FeatureProfile, Profile, SparseColumn
from pipeline.store import Store

FIRST = date(2026, 1, 1)
SETTINGS = (
    "data=delta",
    "data.path=clicks",
    "data.timestamp=time",
    "+data.dense.price={}",
    "hardware=laptop",
    "+data.sparse.user={rows: 4000}",
    "+data.sparse.kind={mapping: hash, rows: 50}",
    "train.global_batch=256",
    "publish.model=clicks",
)


def dataset(store: Store, number: int, rows: int, before: str | None) -> str:
    path = f"datasets/delta/{FIRST + timedelta(days=number)}/key{number}"
    config = {"data": {"mapping_from": before}}
    tables = {"user": rows, "kind": 50}
    with store.draft(path, kind="ingest", key=f"key{number}", config=config, inputs={}) as draft:
        columns = tuple(SparseColumn(name=name, rows=size) for name, size in tables.items())
        schema = DatasetSchema(dense=("price",), sparse=columns, rows={"train": 900}, files={}, groups={})
        draft.write_json("schema.json", schema.to_json())
        sparse = {
            name: FeatureProfile(
                rows=size, distinct=size, missing_share=0.0, pooling=1.0, hot_rows=[1, size], hot_share=[0.2, 1.0]
            )
            for name, size in tables.items()
        }
        dense = {"price": DenseProfile(missing_share=0.0, minimum=0.0, maximum=1.0, mean=0.5, std=0.1)}
        draft.write_json(
            "profile.json", Profile(rows={"train": 900}, label_rate={}, dense=dense, sparse=sparse).to_json()
        )
        draft.commit({})
    return path


def publish(store: Store, number: int, path: str) -> None:
    version, day = f"v{number + 1:05d}-0000000{number}", path.split("/")[2]
    folder = version_path("clicks", version)
    with store.draft(folder, kind="model", key=f"m{number}", config={}, inputs={"plan": "p"}) as draft:
        draft.commit({"run": f"clicks-{day}", "dataset": path, "checkpoint": f"runs/clicks-{day}/checkpoints/c/step-9"})
    promote(store, "clicks", version, by="publish")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Five nights, each of which adds 200 users; the fifth, with 900 more, was rolled back."""
    store, before = Store(str(tmp_path)), None
    for number, rows in enumerate((1_000, 1_200, 1_400, 1_600, 2_500)):
        before = dataset(store, number, rows, before)
        publish(store, number, before)
    roll_back(store, "clicks", "a bad day")
    return store


def test_the_next_nights_of_a_model(nightjar, store) -> None:
    known = sorted(store.names("datasets/delta"))
    done = nightjar("what-if", *SETTINGS, f"store={store.url}", "--nights", "30", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = json.loads(done.stdout)
    assert record["read"] == ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"] and record["model"] == "clicks"
    user = record["tables"]["user"]
    assert (user["trend"], user["full"]["night"], user["limit"]) == ("steady", 12, 4000)
    assert user["rows"]["10"] == [3600, 3600, 3600] and record["tables"]["kind"]["trend"] == "fixed"
    assert [plan["night"] for plan in record["plans"]] == [0, 10, 20, 30] and record["fits"]
    assert record["plans"][1]["day"] == "2026-01-14"
    assert sorted(store.names("datasets/delta")) == known


def test_the_page_has_figures_of_rows_and_memory(nightjar, store, tmp_path) -> None:
    page = tmp_path / "nights.html"
    done = nightjar("what-if", *SETTINGS, f"store={store.url}", "--nights", "9", "--html", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.count("<figure>") == 2 and "Rows of user over the nights, 3,400 in the end" in text
    assert "<title>upper end of the interval</title>" in text and "<script" not in text and "no tier is full" in text
    lost = nightjar("what-if", *SETTINGS, f"store={store.url}", "--nights", "9", "--html", str(page / "p.html"))
    assert lost.returncode == 7 and "refuses writing" in lost.stderr
    alone = nightjar("what-if", *SETTINGS, "--html", str(page))
    assert alone.returncode == 2 and "--html is for --nights, which is not given" in alone.stderr


def test_several_settings_as_text_and_the_exit_code_where_nothing_fits(nightjar, store) -> None:
    small = ("hardware.ddr_gib=0.002,4", "--nights", "3", f"store={store.url}")
    done = nightjar("what-if", *SETTINGS, *small)
    assert done.returncode == 0 and "laptop, 1 rank: hardware.ddr_gib=4" in done.stdout
    assert "DDR is full tonight already: nothing fits any more" in done.stdout
    assert nightjar("what-if", *SETTINGS, "hardware.ddr_gib=0.002", "--nights", "3", *small[3:]).returncode == 4


def test_what_is_missing_is_named(nightjar, store, tmp_path) -> None:
    at = (f"store={store.url}", "--nights", "30")
    other = nightjar("what-if", *SETTINGS, "publish.model=views", *at)
    assert other.returncode == 7 and "no version of model 'views' in store" in other.stderr
    renamed = nightjar("what-if", *[text.replace("sparse.user", "sparse.member") for text in SETTINGS], *at)
    assert renamed.returncode == 2 and "member of the settings is not in it; its user is not in the" in renamed.stderr
    for _ in range(2):
        roll_back(store, "clicks", "worse still")
    few = nightjar("what-if", *SETTINGS, *at)
    assert few.returncode == 7 and "model 'clicks' has 2 nights (2026-01-01, 2026-01-02)" in few.stderr
    for wrong in ("0", "400", "many"):
        done = nightjar("what-if", *SETTINGS, "--nights", wrong)
        assert done.returncode == 2 and f"'{wrong}' is no number of nights, expected 1 to 365" in done.stderr
    specs = nightjar("what-if", "experiment=dlrmv2", "publish.model=clicks", *at)
    assert specs.returncode == 2 and "data.format=tables describes tables, which no log fills" in specs.stderr
