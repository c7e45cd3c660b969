"""``nightjar price``: prices and nights, sealing a prediction, its run, and the list of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.compose import compose, to_yaml
from pipeline.plugins.capacity import rates, rehearsal
from pipeline.records.result import Evaluation, IngestPart, Result, StageOutcome, TrainPart
from pipeline.store import Store
from tests import commands
from tests.cli.test_nights_ahead import SETTINGS, dataset, publish
from tests.few_features import FEW

SMALL = ("experiment=demo", *FEW, "data.synthetic.rows=3000", "hardware=laptop")
PRICES = """\
currency: EUR
hardware:
  laptop: {on_demand: 0.1, spot: 0.05, hosts: [1, 2]}
  big: {file: cpu_cluster, on_demand: 2, hosts: [1]}
"""


@pytest.fixture
def prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rates, "SECONDS", 0.02)
    (tmp_path / "prices.yaml").write_text(PRICES)
    return "prices.yaml"


def recorded_night(store: Store, day: str, *settings: str) -> None:
    """Write the result of a night that took 1,000 s of training for 40 steps, and its configuration if ``settings``."""
    if settings:
        config = compose([*settings, f"run=clicks-{day}", f"data.day={day}"], night=True)
        store.write_bytes(f"runs/clicks-{day}/config.yaml", to_yaml(config).encode())
    seconds = {"ingest": 9.0, "plan": 0.5, "partition": 0.1, "train": 1002.0, "evaluate": 10.0, "publish": 20.0}
    stages = {name: StageOutcome(status="done", seconds=took, artifact=f"{name}/k") for name, took in seconds.items()}
    result = Result(
        run=f"clicks-{day}",
        status="done",
        stages=stages,
        ingest=IngestPart(rows=900),
        train=TrainPart(steps=40, seconds=1000.0),
        eval=Evaluation(samples=100),
    )
    store.write_json(f"runs/clicks-{day}/result.json", result.to_json())


def test_a_prediction_is_sealed_its_run_says_how_far_off_it_was_and_a_change_is_noticed(
    nightjar, prices, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    assert nightjar("ingest", *SMALL, "run=data").returncode == 0
    sealed = nightjar("price", "--seal", *SMALL, "run=one")
    assert sealed.returncode == 0 and "SHA-256" in sealed.stdout and "a rehearsal of 38 steps" in sealed.stdout
    assert sorted(path.name for path in Path("store/runs").iterdir()) == ["data"]
    assert "rehearsal" not in Path("store/index.html").read_text()
    again = nightjar("price", "--seal", *SMALL, "run=one", "--json")
    record = json.loads(again.stdout)
    assert again.returncode == 0 and record["sha256"] in sealed.stdout and record["path"].endswith("/1.json")
    assert "is sealed already" in nightjar("price", "--seal", *SMALL, "run=one").stdout
    (waiting,) = json.loads(nightjar("price", "--sealed", "--json").stdout)["sealed"]
    assert waiting["state"] == "no run yet" and waiting["model"] == "dlrm"

    assert commands.nightjar("run", *SMALL, "run=one", cwd=tmp_path).returncode == 0
    part = json.loads(nightjar("result", "one", "--json").stdout)["prediction"]
    assert part["sha256"] == record["sha256"] and set(part["seconds"]) == {"train", "evaluate"}
    assert part["seconds"]["train"]["predicted_s"] == record["prediction"]["seconds"]["train"] > 0
    assert (
        "off by" in nightjar("result", "one").stdout
        and "The sealed prediction" in Path("store/runs/one/report.html").read_text()
    )
    listed = nightjar("price", "--sealed", "--markdown")
    assert listed.returncode == 0 and f"| {record['sha256'][:16]} |" in listed.stdout
    assert "1 sealed prediction, 1 compared with their runs: median error" in listed.stdout
    done = nightjar("price", "--seal", *SMALL, "run=one")
    assert done.returncode == 2 and "has trained already" in done.stderr

    path = tmp_path / "store" / record["path"]
    path.write_text(path.read_text().replace('"steps": ', '"steps": 1'))
    changed = nightjar("price", "--sealed")
    assert changed.returncode == 7 and "is not what was sealed" in changed.stdout


def test_the_nights_of_a_model_are_priced_by_its_last_one(nightjar, prices, tmp_path, monkeypatch) -> None:
    # These datasets have no files to read; a reader's rate is measured by test_scale.
    fast = rates.Rates(rows_per_s=1e9, row_bytes=100.0, read_gb_per_s=1e3, checkpoint_gb_per_s=1e3)
    monkeypatch.setattr(rates, "measured_rates", lambda *given: (fast, {}))
    store, before = Store(str(tmp_path / "store")), None
    for number, rows in enumerate((1_000, 1_200, 1_400, 1_600)):
        before = dataset(store, number, rows, before)
        publish(store, number, before)
    recorded_night(store, "2026-01-04")
    known = sorted(str(path) for path in Path("store").rglob("*"))
    command = ("price", prices, *SETTINGS, "--start", "23:30", "--by", "00:30", "--nights", "6")
    done = nightjar(*command, "--json", "--html", "price.html")
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert record["limit_s"] == 3600 and record["source"] == "run clicks-2026-01-04"
    assert [(each["offer"], each["hosts"]) for each in record["offers"]] == [("laptop", 1), ("laptop", 2), ("big", 1)]
    nights = record["offers"][0]["nights"]
    assert [night["night"] for night in nights] == [0, 2, 4, 6] and "spot_cost" not in record["offers"][2]
    # 900 rows in steps of 256 are four, each of 25 s; the night's 40 took 1,000 s.
    assert nights[0]["seconds"]["train"] == pytest.approx(2.0 + 4 * 25, rel=0.02)
    first = record["choices"][0]
    assert (first["kind"], first["of"], first["offer"], first["hosts"]) == ("on_demand", "tonight", "laptop", 1)
    assert "Time of tonight" in Path("price.html").read_text()
    assert sorted(str(path) for path in Path("store").rglob("*")) == known, "nothing is written"
    text = nightjar(*command)
    assert "Cheapest tonight, on demand: laptop x 1" in text.stdout and "next wall: none until night 6" in text.stdout
    late = nightjar("price", prices, *SETTINGS, "--start", "02:00", "--by", "02:01", "--nights", "2")
    assert late.returncode == 4 and "No offer fits and ends in time tonight." in late.stdout


def test_the_first_nights_are_priced_without_growth_by_the_settings_that_they_had(
    nightjar, prices, tmp_path, monkeypatch
) -> None:
    fast = rates.Rates(rows_per_s=1e9, row_bytes=100.0, read_gb_per_s=1e3, checkpoint_gb_per_s=1e3)
    monkeypatch.setattr(rates, "measured_rates", lambda *given: (fast, {}))
    store = Store(str(tmp_path / "store"))
    publish(store, 0, dataset(store, 0, 1_000, None))
    recorded_night(store, "2026-01-01", *SETTINGS)

    def priced(*settings: str) -> dict[str, Any]:
        done = nightjar("price", prices, *SETTINGS, *settings, "--nights", "4", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    same, doubled = priced(), priced("train.global_batch=512")
    assert "fewer than 3 nights" in same["notes"][1] and same["source"] == "run clicks-2026-01-01"
    # How far a step was off its prediction is a fact of the night, whatever is asked for now.
    assert same["rules"][0] == doubled["rules"][0]
    nights = same["offers"][0]["nights"]
    assert nights[0]["seconds"]["train"] == pytest.approx(2.0 + 4 * 25, rel=0.02)
    assert nights[0]["seconds"] == nights[-1]["seconds"]


def test_mistakes_say_what_is_expected(nightjar, prices, tmp_path) -> None:
    (tmp_path / "wrong.yaml").write_text("currency: EUR\nhardware: {moon: {on_demand: 1}}")
    assert nightjar("ingest", *SMALL, "run=data").returncode == 0
    for arguments, code, expected in (
        (("price",), 2, "no file of prices is given"),
        (("price", prices, "other.yaml"), 2, "2 files of prices are given"),
        (("price", "none.yaml", *SMALL), 2, "prices none.yaml cannot be read"),
        (("price", prices, "--by", "25:00"), 2, "is not a time of day"),
        (("price", prices, "--nights", "0"), 2, "is not a number of nights"),
        (("price", "--seal", "--sealed"), 2, "expected one of them"),
        (("price", "--markdown", prices), 2, "--markdown is for --sealed"),
        (("price", "--seal", prices), 2, "--seal takes no file of prices"),
        (("price", "~data.checks.hold"), 2, "no file of prices is given"),
        (("price", "--seal", "--by", "06:00"), 2, "--by is for a file of prices, but --seal is given"),
        (("price", "--sealed", "--html", "x.html"), 2, "--html is for a file of prices, but --sealed is given"),
        (("price", "--sealed", "train.lr=1"), 2, "--sealed knows store= only"),
        (("price", "--sealed", "store=nowhere"), 2, "there is no store at nowhere"),
        (("price", "--seal", *SMALL, "stages=[ingest,plan]"), 2, "does not train"),
        (("price", "--seal", *SMALL, "seed=3"), 7, "no dataset of"),
    ):
        done = nightjar(*arguments)
        assert (done.returncode, expected in done.stderr) == (code, True), (arguments, done.stderr)
