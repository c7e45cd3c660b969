"""Scores of scikit-learn's models, through ``nightjar judge`` and through the whole pipeline's gate: one verdict.

``recorded/foreign.parquet`` has held-out rows with scores that no code of ours made (``record_foreign.py``). In the
pipeline each of these models is a version: its ranking model hands one column of the log on as its logit. So ingestion,
training, publishing and serving bring the very same scores to the gate, by ways that ``nightjar judge`` does not share.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.config import ModelConfig
from pipeline.config.fields import setting
from pipeline.records import GateRecord, read
from pipeline.specs import MODELS, ModelInputs
from pipeline.store import Store

RECORDED = Path(__file__).parent / "recorded" / "foreign.parquet"
STAGES = "[ingest,plan,partition,train,evaluate,publish]"
RUN = [
    f"stages={STAGES}",
    f"launch.inline={STAGES}",
    "data=parquet",
    "data.name=foreign",
    "data.split.by=day",
    "data.day_column=day",
    "data.sparse_defaults.min_count=1",
    "+data.sparse.country={}",
    "model=given",
    "model.embedding_dim=4",
    "train.threads_per_rank=1",
    "train.global_batch=2048",
    "train.warmup_steps=0",
    "train.precision=fp32",
    "train.guard.collapse=false",
    "publish.quantise=fp32",
    "gate.importance_rows=0",
    "gate.best_of_last=1",
    "gate.min_baseline_gain=null",
    "gate.min_coverage=null",
    "gate.max_ne_drift=null",
]
# Of NE: what ten thousand rows can tell of two models of other kinds.
LIMITS = ["gate.max_ne_increase=0.01"]


@dataclass(kw_only=True)
class GivenConfig(ModelConfig):
    """A ranking model that knows its logit."""

    name: str = setting("given", choices=("given",), doc="Ranking model to train.")
    column: str = setting("logistic", doc="Dense feature that is the logit.")


class GivenModel:
    """``given`` as a choice of ``model``."""

    name = "given"
    config = GivenConfig

    def build(self, config: GivenConfig, inputs: ModelInputs):
        import torch
        from torch import Tensor, nn

        from pipeline.models.layers import Ranker

        place = inputs.dense.index(config.column)

        class Given(Ranker):
            def __init__(self) -> None:
                super().__init__()
                self.nothing = nn.Parameter(torch.zeros(1))

            def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
                return dense[:, place].float() + 0.0 * (self.nothing + embeddings.float().sum((1, 2)))

            def start_at(self, logit: float) -> None:
                pass

        return Given()


@pytest.fixture(scope="module")
def scores() -> pl.DataFrame:
    """The recorded rows; the logits as float32 under the names of the models."""
    frame = pl.read_parquet(RECORDED)
    logits = {}
    for name in names_of_models(frame):
        p = np.clip(frame[name].to_numpy().astype(np.float64), 2.0**-53, 1 - 2.0**-25)
        logits[name] = pl.Series((np.log(p) - np.log1p(-p)).astype(np.float32))
    noise = np.random.default_rng(0).normal(0, 0.02, frame.height).astype(np.float32)
    return frame.with_columns(**logits, nearly=logits["logistic"] + pl.Series(noise))


def names_of_models(frame: pl.DataFrame) -> list[str]:
    return [name for name, kind in frame.schema.items() if kind == pl.Float32]


@dataclass
class Pipeline:
    """A store of versions that hand columns of ``log.parquet`` in ``folder`` on, and what its gate says of them."""

    folder: Path
    dense: list[str]

    def publish(self, column: str, line: str, *more: str) -> GateRecord:
        """Run all stages; the gate's record of a version of ``line`` whose logit is ``column``."""
        run, store = f"{column}-{line}", Store(f"{self.folder}/store")
        places = [f"data.path={self.folder}/log.parquet", f"store={store.url}", f"run={run}", f"publish.model={line}"]
        assert main(["run", *RUN, *places, *self.dense, f"model.column={column}", *more]) == 0
        result = store.read_json(f"runs/{run}/result.json")
        return read(GateRecord, store, f"{result['stages']['publish']['artifact']}/gate.json")

    def judge(self, candidate: str, incumbent: str) -> GateRecord:
        """The record of a candidate beside an incumbent, which is published first, whatever it is like."""
        line = f"beside-{incumbent}"
        current = Path(f"{self.folder}/store/models/{line}/current.json")
        if not current.exists():
            self.publish(incumbent, line, "gate.force='it serves'")
        version = json.loads(current.read_text())["version"]
        return self.publish(candidate, line, *LIMITS, "gate.slices=[country]", f"publish.judge_beside={version}")


@pytest.fixture(scope="module")
def pipeline(scores: pl.DataFrame, tmp_path_factory) -> Iterator[Pipeline]:
    """A log of two days, of which the second one, which is held out, has the recorded rows in their order."""
    folder = tmp_path_factory.mktemp("foreign")
    days = [scores.head(3000).with_columns(day=pl.lit("2026-01-01")), scores.with_columns(day=pl.lit("2026-01-02"))]
    pl.concat(days).with_columns(pl.col("label").cast(pl.String)).write_parquet(folder / "log.parquet")
    with MODELS.added(GivenModel()):
        yield Pipeline(folder, [f"+data.dense.{name}={{transform: none}}" for name in names_of_models(scores)])


Judge = Callable[[str, str], tuple[int, GateRecord]]


@pytest.fixture(scope="module")
def judge_logits(scores: pl.DataFrame, tmp_path_factory) -> Judge:
    """Exit code and record of ``nightjar judge`` on the logits of two models."""
    path = tmp_path_factory.mktemp("logits") / "logits.parquet"
    scores.write_parquet(path)

    @functools.cache
    def judged(candidate: str, incumbent: str) -> tuple[int, GateRecord]:
        columns = ["--score", candidate, "--incumbent-score", incumbent, "--slice", "country", "--json", *LIMITS]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["judge", str(path), "--logits", *columns])
        return code, GateRecord.from_json(json.loads(out.getvalue()))

    return judged


NE, SLICE_NE, SLICE_CALIBRATION = "NE against the incumbent", "slice: NE", "slice: calibration"
# Candidate and incumbent, and the checks that hold the candidate, of slices without their values.
PAIRS = {
    ("sgd", "without_items"): (),  # clearly better
    ("sgd", "logistic"): (),  # as good
    ("nearly", "logistic"): (),  # a little worse, within the limit
    ("logistic", "logistic"): (),
    ("logistic", "bayes"): (),
    ("without_items", "logistic"): (NE, SLICE_NE),
    ("trees", "logistic"): (NE, "prediction shift", SLICE_NE),
    ("bayes", "logistic"): ("NE", "calibration", NE, "prediction shift", SLICE_CALIBRATION, SLICE_NE),
    ("balanced", "logistic"): ("calibration", NE, "prediction shift", SLICE_CALIBRATION, SLICE_NE),
    ("not_of_jp", "without_items"): (SLICE_CALIBRATION, SLICE_NE),  # better as a whole
}
AT_ONCE = {("nearly", "logistic"), ("balanced", "logistic")}
# What a night asks besides, of weights, features, tables and former nights: all of it passes here.
OF_NIGHTS = {
    "finite weights",
    "click rate",
    "labels",
    "serving",
    "coverage against former days",
    "importance of features",
}
FIGURES = (
    "rows",
    "clicks",
    "click_rate",
    "confidence",
    "predictions_not_finite",
    "candidate",
    "incumbent",
    "change",
    "shift",
    "reliability",
    "histogram",
    "power",
    "verdict",
    "reasons",
    "warnings",
)


def pairs() -> Iterator[Any]:
    """In ``make test`` one that passes and one that is held, for every reason there is."""
    for pair in PAIRS:
        yield pytest.param(pair, id="-".join(pair), marks=() if pair in AT_ONCE else pytest.mark.slow)


@pytest.mark.parametrize("pair", pairs())
def test_the_gate_of_the_pipeline_and_the_command_agree(
    pipeline: Pipeline, judge_logits: Judge, pair: tuple[str, str]
) -> None:
    """To the last bit: figures, intervals, plots and words."""
    gate = pipeline.judge(*pair)
    code, judged = judge_logits(*pair)
    assert code == (6 if PAIRS[pair] else 0)
    for figure in FIGURES:
        assert getattr(judged, figure) == getattr(gate, figure), figure
    assert by_value(judged) == by_value(gate) and len(by_value(gate)) == 4
    failed = (check.name.partition(",")[0] for check in gate.checks if not check.passed)
    assert tuple(dict.fromkeys(failed)) == PAIRS[pair]
    of_night = [check for check in gate.checks if check not in judged.checks]
    assert {check.name for check in of_night} <= OF_NIGHTS
    assert [check for check in judged.checks if check not in gate.checks] == []


def by_value(record: GateRecord) -> dict:
    return {part.value: part for part in record.slices or ()}


def test_probabilities_get_the_verdict_of_their_logits(judge_logits: Judge, tmp_path: Path, nightjar) -> None:
    """But for the last digits: as float32, and in CSV in another order with a key."""
    recorded = pl.read_parquet(RECORDED).with_row_index("row")
    for candidate, incumbent in PAIRS:
        if "nearly" in (candidate, incumbent):
            continue
        columns = ["--slice", "country", "--json", *LIMITS]
        expected, theirs = judge_logits(candidate, incumbent)
        recorded.select("row", "label", "country", score=candidate).write_parquet(tmp_path / "new.parquet")
        other = recorded.select("row", score=incumbent).sample(fraction=1, shuffle=True, seed=1)
        other.write_csv(tmp_path / "old.csv")
        found = nightjar("judge", f"{tmp_path}/new.parquet", f"{tmp_path}/old.csv", "--key", "row", *columns)
        assert found.returncode == expected, found.stderr
        ours = GateRecord.from_json(json.loads(found.stdout))
        assert [(check.name, check.passed) for check in ours.checks] == [
            (check.name, check.passed) for check in theirs.checks
        ]
        assert ours.change is not None and theirs.change is not None
        assert ours.change.ne == pytest.approx(theirs.change.ne, abs=2e-6)
