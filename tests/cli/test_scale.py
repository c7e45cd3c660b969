"""``nightjar scale``: arguments, messages, JSON, the page, and that the store stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.plugins.capacity import rates

SMALL = ("experiment=demo", "data.synthetic.rows=2000", "hardware=laptop")


@pytest.fixture
def in_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nightjar) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rates, "SECONDS", 0.02)
    assert nightjar("ingest", *SMALL, "run=data").returncode == 0
    return tmp_path / "store"


def files(store: Path) -> list[str]:
    return sorted(str(path) for path in store.rglob("*"))


@pytest.mark.measures
def test_worlds_are_predicted_and_the_store_stays_as_it_is(nightjar, in_store, tmp_path) -> None:
    before = files(in_store)
    done = nightjar("scale", *SMALL, "train.global_batch=64", "--ranks", "8,128", "--json", "--html", "scale.html")
    assert done.returncode == 0
    record = json.loads(done.stdout)
    small, large = record["worlds"]
    assert (small["ranks"], small["hosts"], small["fits"], large["fits"]) == (8, 8, True, False)
    assert "fewer than 128 ranks" in large["problem"] and record["wall"]["ranks"] == 128
    assert {"reader", "row", "store", "checkpoint"} <= set(record["measured"])
    assert not set(record["measured"]) & set(record["assumed"])
    assert "hardware=laptop" in record["assumed"]["dense_gflop_per_s"]["source"]
    assert files(in_store) == before
    page = (tmp_path / "scale.html").read_text()
    assert "Samples per second" in page and "no plan: overhead" in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")


def test_the_text_names_bound_wall_and_what_was_assumed(nightjar, in_store) -> None:
    done = nightjar("scale", *SMALL, "--ranks", "2,4", "--per-rank", "256", "--store-gb-per-s", "0.000001")
    assert done.returncode == 0
    assert "The next wall: store, at 4 ranks. What moves it: store=<one that serves more>." in done.stdout
    assert "measured on this machine" in done.stdout and "--store-gb-per-s" in done.stdout
    assert "256 samples a step on each rank" in done.stdout


def test_nothing_that_fits_is_exit_code_4(nightjar, in_store) -> None:
    done = nightjar("scale", *SMALL, "train.global_batch=64", "--ranks", "128")
    assert (done.returncode, "train.global_batch=8192" in done.stdout) == (4, True)


def test_bad_arguments_and_a_missing_dataset_say_what_is_expected(nightjar, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, expected in (
        (("--ranks", "8,x"), "'8,x' is no list of ranks, expected 1 to 65,536, such as 8,64,512"),
        (("--per-rank", "0"), "'0' is no number of samples"),
        (("--store-gb-per-s", "-1"), "'-1' is no rate, expected GB/s above 0"),
    ):
        done = nightjar("scale", *SMALL, *arguments)
        assert (done.returncode, expected in done.stderr) == (2, True)
    done = nightjar("scale", *SMALL)
    assert done.returncode == 7 and "hint: nightjar ingest experiment=demo data.synthetic.rows=2000" in done.stderr
