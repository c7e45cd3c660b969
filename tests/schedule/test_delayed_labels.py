"""Three nights whose clicks come late, published with a calibrator: which rows train, fit the curve, and are judged."""

import contextlib
import io
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline import cli
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibration_curves import applied
from pipeline.evaluation.metrics import sigmoid
from pipeline.ingest.days import day_dataset
from pipeline.ingest.record_transform import RecordTransform
from pipeline.publishing.served import ServedModel
from pipeline.records import CalibratorRecord, GateRecord, read
from pipeline.stages.release_gate import chosen_rows
from pipeline.store import Artifact, Store
from pipeline.training.parquet import SplitReader

pytestmark = pytest.mark.slow

DAYS = [date(2026, 1, day) for day in (1, 2, 3)]
ROWS, HELD, JUDGED = 2400, 18, 21  # rows a day; the hours from which on rows are held out, and judged
SETTINGS = (
    "data=csv",
    "data.name=shop",
    "data.label.column=click",
    "data.timestamp=time",
    "data.dedupe.key=event",
    "data.label.window_days=2",
    "+data.dense.price={}",
    "+data.sparse.user={rows: 60}",
    "+data.sparse.ad={rows: 30}",
    "+data.tasks.buy={given: click}",
    "data.split.by=hours",
    "data.split.test_hours=6",
    "train.threads_per_rank=1",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "train.global_batch=128",
    "train.epochs=2",
    "train.warmup_steps=2",
    "train.precision=fp32",
    "train.lr=0.01",
    "train.sparse_lr=0.1",
    "launch.inline=[ingest,plan,partition,train,evaluate,publish]",
    "nightly.wait_minutes=0",
    "gate.replicates=50",
    "gate.min_rows=100",
    "gate.max_calibration_error=null",
    "gate.max_ne=null",
    "gate.min_baseline_gain=null",
    "gate.max_ne_increase=null",
    "gate.max_psi=null",
    "gate.max_label_shift=null",
    "gate.max_ne_drift=null",
    "+gate.tasks.buy={max_ne: null, max_increase: null}",
    "publish.quantise=fp32",
    "publish.calibrator.method=platt",
)


def write_world(folder: Path) -> pl.DataFrame:
    """Three days of logs and of clicks that came later; every row with its true label and the day that tells it."""
    rng, size = np.random.default_rng(3), ROWS * len(DAYS)
    user, ad, price = rng.integers(0, 40, size), rng.integers(0, 20, size), rng.lognormal(1, 1, size).round(2)
    odds = np.sin(user) + np.cos(ad) - 0.5 - 0.2 * np.log(price)
    click = rng.random(size) < 1 / (1 + np.exp(-odds))
    late = click & (rng.random(size) < 0.3)
    own = np.repeat(np.arange(len(DAYS)), ROWS)
    rows = pl.DataFrame(
        {
            "event": [f"e{number}" for number in range(size)],
            "user": user,
            "ad": ad,
            "price": price,
            "true": click,
            "day": own,
            "told": np.where(late, own + rng.integers(1, 3, size), own),
            "buy": click & (rng.random(size) < 0.5),
            "hour": np.tile(np.arange(ROWS) * 24 // ROWS, len(DAYS)),
        }
    )
    (folder / "logs").mkdir()
    (folder / "clicks").mkdir()
    for number, day in enumerate(DAYS):
        known = rows.filter(day=number).with_columns(click=pl.col("true") & (pl.col("told") == number))
        log = known.select(
            time=pl.col("hour").map_elements(
                lambda hour, day=day: f"{datetime.combine(day, datetime.min.time()) + timedelta(hours=hour)}",
                return_dtype=pl.String,
            ),
            click=pl.col("click").cast(pl.Int8),
            buy=(pl.col("buy") & pl.col("click")).cast(pl.Int8),
            event="event",
            user="user",
            ad="ad",
            price="price",
        )
        log.write_csv(folder / "logs" / f"{day}.csv")
        came = rows.filter((pl.col("told") == number) & (pl.col("day") < number))
        came.select("event").write_csv(folder / "clicks" / f"{day}.csv")
    return rows


@dataclass
class Nights:
    """The ``folder`` of three nights, all ``rows`` of their logs, and what was said."""

    folder: Path
    rows: pl.DataFrame
    said: str = ""

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "store"))

    def call(self, *arguments: str) -> int:
        out = io.StringIO()
        where = [
            f'data.path="{self.folder}/logs/{{day}}.csv"',
            f"store={self.folder}/store",
            f'data.label.late_path="{self.folder}/clicks/{{day}}.csv"',
        ]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.main([*arguments, *where, *SETTINGS])
        self.said += out.getvalue()
        return code

    def dataset(self, night: int) -> Artifact:
        dataset = day_dataset(self.store, "shop", str(DAYS[night]))
        assert dataset is not None
        return dataset

    def split(self, dataset: Artifact, split: str) -> pl.DataFrame:
        folder = Path(self.store.full(dataset.path)) / split
        return pl.concat([pl.read_parquet(file) for file in sorted(folder.glob("*.parquet"))])

    def result(self, night: int) -> dict:
        result: dict = self.store.read_json(f"runs/shop-{DAYS[night]}/result.json")
        return result

    def version(self, night: int) -> Path:
        return Path(self.store.full(self.result(night)["model"]["uri"]))

    def scores(self, night: int, log: int) -> pl.DataFrame:
        """What ``nightjar predict`` says of the log of a day with the version of a night."""
        out = self.folder / "scores.parquet"
        flags = ["--model", "shop", "--store", self.store.url, "--version", self.version(night).name]
        assert cli.main(["predict", f"{self.folder}/logs/{DAYS[log]}.csv", *flags, "--out", str(out)]) == 0
        return pl.read_parquet(out)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    folder = tmp_path_factory.mktemp("delayed")
    nights = Nights(folder, write_world(folder))
    for day in DAYS:
        assert nights.call("nightly", f"date={day}") == 0, nights.said
    return nights


def came_on(rows: pl.DataFrame, night: int, day: int) -> pl.DataFrame:
    """The rows of ``day`` whose click was told in ``night``."""
    return rows.filter((pl.col("told") == night) & (pl.col("day") == day) & pl.col("true"))


def test_a_late_click_trains_its_row_once_in_the_night_that_brings_it(nights: Nights) -> None:
    trained = pl.col("hour") < HELD
    for night in (1, 2):
        counts = {day: came_on(nights.rows, night, day).filter(trained).height for day in range(night)}
        corrected = {str(DAYS[day]): count for day, count in counts.items()}
        part, train = nights.result(night)["ingest"], nights.split(nights.dataset(night), "train")
        assert part["rows_corrected"] == corrected and min(counts.values()) > 30
        assert part["rows_train"] == train.height == ROWS * HELD // 24 + sum(counts.values())
        assert nights.result(night)["train"]["samples"] == 2 * train.height, "two epochs"
        again = train.filter(pl.col("split_hour").is_not_null() & (pl.col("day") < train["day"].max()))
        assert again.height == sum(counts.values()) and again["label"].to_list() == [1.0] * again.height
        assert again["buy__label"].is_nan().all(), "what follows a click was not known to follow"
        assert (again["split_hour"] < HELD).all(), "rows that are held out stay so"
        own = nights.rows.filter(day=night, told=night)
        assert (
            int(train.filter(pl.col("day") == train["day"].max())["label"].sum()) == own.filter(trained)["true"].sum()
        )


def test_the_day_itself_has_the_right_labels_once_it_is_ingested_again(nights: Nights) -> None:
    before = nights.dataset(0)
    assert nights.call("ingest", f"data.day={DAYS[0]}", "run=again") == 0, nights.said
    after = nights.dataset(0)
    assert after.key != before.key and after.summary["replaces"] == before.path
    mine, late = nights.rows.filter(day=0), nights.rows.filter((pl.col("day") == 0) & (pl.col("told") > 0))
    for split, where in (("train", pl.col("hour") < HELD), ("test", pl.col("hour") >= HELD)):
        rows = nights.split(after, split)
        assert rows["label"].sum() == mine.filter(where)["true"].sum()
        assert rows["buy__label"].is_nan().sum() == late.filter(where).height
    assert (after.summary["labels_until"], after.summary["labels_final"]) == (str(DAYS[2]), str(DAYS[2]))


def test_the_curve_is_fitted_on_rows_that_neither_training_nor_the_verdict_uses(nights: Nights) -> None:
    hour = ROWS // 24
    for night in range(3):
        record = read(CalibratorRecord, nights.store, f"{nights.result(night)['model']['uri']}/calibrator.json")
        gate = read(GateRecord, nights.store, f"{nights.result(night)['model']['uri']}/gate.json")
        assert (record.curves["click"].rows, gate.rows) == ((JUDGED - HELD) * hour, (24 - JUDGED) * hour)
        test = nights.split(nights.dataset(night), "test")
        assert test["split_hour"].unique().sort().to_list() == [*range(HELD, 24)]
        known = nights.rows.filter((pl.col("day") == night) & (pl.col("told") == night))
        fitting = known.filter(pl.col("hour").is_between(HELD, JUDGED - 1))
        assert record.curves["click"].clicks == fitting["true"].sum()
        young = any("are final with those of" in words for words in gate.warnings)
        assert young, "the night judges labels that may still change, and says so"


def test_rows_of_a_single_test_hour_are_divided_by_hash(nights: Nights) -> None:
    split = SplitReader(nights.store, nights.dataset(2), "test")
    by_hash = chosen_rows(split, 0.3, 1)
    assert np.array_equal(chosen_rows(split, 0.3, 1, np.full(split.rows, 23.0)), by_hash)
    assert by_hash.mean() == pytest.approx(0.3, abs=0.1)
    hours = split.column("split_hour")
    for share, last in ((0.01, HELD), (0.3, HELD + 1), (0.99, 22)):
        assert hours[chosen_rows(split, share, 1, hours)].max() == last, "some hours fit, some are judged"


def test_the_gate_judges_both_versions_with_their_curves_as_predict_scores(nights: Nights) -> None:
    gate = read(GateRecord, nights.store, f"{nights.result(2)['model']['uri']}/gate.json")
    judged = nights.rows.filter(day=2)["hour"].to_numpy() >= JUDGED
    for night, figures in ((2, gate.candidate), (1, gate.incumbent)):
        assert figures is not None
        scores = nights.scores(night, 2).filter(pl.Series(judged))
        told = evaluate(
            scores["label"].to_numpy(), np.log(scores["probability"] / (1 - scores["probability"])).to_numpy()
        )
        assert figures.ne.point == pytest.approx(told["ne"], rel=1e-4)
        assert figures.calibration.point == pytest.approx(told["calibration"], rel=1e-4)
    assert gate.calibrated is not None and gate.calibrated.before is not None
    assert gate.calibrated.before.ne.point != gate.candidate.ne.point if gate.candidate else False


def test_predict_and_a_served_model_of_single_records_calibrate_alike(nights: Nights) -> None:
    version = nights.version(2)
    record = CalibratorRecord.from_json(nights.store.read_json(f"{nights.result(2)['model']['uri']}/calibrator.json"))
    log = pl.read_csv(nights.folder / "logs" / f"{DAYS[2]}.csv").head(50)
    inputs = RecordTransform.read(nights.store, nights.dataset(2).path)(log.to_dicts())
    plain, served = ServedModel(version, 1 << 20, calibrate=False), ServedModel(version, 1 << 20)
    dense = np.ascontiguousarray(inputs.select(served.description.dense).to_numpy().astype(np.float32))
    ids = {name: inputs[name].to_numpy() for name in served.description.sparse}
    raw, ours = plain.score(dense, ids), served.score(dense, ids)
    assert not np.allclose(raw[:, 0], ours[:, 0], atol=1e-3)
    for place, task in enumerate(("click", "buy")):
        assert ours[:, place] == pytest.approx(applied(record.curves[task], raw[:, place]), abs=1e-5)
    scores = nights.scores(2, 2).head(50)
    assert scores["probability"].to_numpy() == pytest.approx(sigmoid(ours[:, 0]), abs=1e-6)
    assert scores["buy"].to_numpy() == pytest.approx(sigmoid(ours[:, 1]), abs=1e-6)
