"""What features are worth to a version, and a feature that broke between two nights."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config import GateConfig
from pipeline.config.compose import compose
from pipeline.evaluation import evaluate
from pipeline.evaluation.gate.checks.importance import IMPORTANCE, NAME
from pipeline.ingest.stage import ingest
from pipeline.ingest.synthetic import write_tsv
from pipeline.records import Former, GateRecord, Importance, read
from pipeline.report.gate import gate_markdown, gate_page
from pipeline.serving.scores import importance, sampled
from pipeline.specs import GateInputs
from pipeline.store import Store
from pipeline.training.parquet import SplitReader
from tests.commands import nightjar
from tests.publishing.test_nights import SMALL

BARE = {"rows": 1, "clicks": 1, "click_rate": 0.5, "confidence": 0.95, "predictions_not_finite": {}}


class FirstDense:
    """A model that knows one number and nothing else."""

    description = SimpleNamespace(dense=("I1",), sparse=(), event_columns=())

    def score(self, dense, ids):
        return 3 * dense[:, 0]


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> SplitReader:
    """Held-out rows of planted logs."""
    folder = tmp_path_factory.mktemp("rows")
    made, world = Store(str(folder)), compose(["data=synthetic", "data.synthetic.rows=20000"])
    with made.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        dataset = draft.commit(ingest(world.data, world.ingest, world.seed, draft))
    return SplitReader(made, dataset, "test")


def test_only_what_the_model_looks_at_is_worth_something(split: SplitReader) -> None:
    groups = {"I1": ["I1"], "C1": ["C1"], "both": ["I1", "C1"]}
    worth = importance(split, FirstDense(), groups, 2000, 0)
    assert worth["C1"] == Importance(rise=0.0, error=0.0)
    assert worth["I1"].rise == pytest.approx(by_hand(split, 2000, 0), rel=1e-6)
    assert worth["I1"].error > 0
    assert worth["both"] == worth["I1"]
    assert importance(split, FirstDense(), groups, 2000, 0) == worth
    assert importance(split, FirstDense(), groups, 2000, 1) != worth


def by_hand(split: SplitReader, rows: int, seed: int) -> float:
    """The rise of NE of ``FirstDense`` where I1 is shuffled."""
    columns = sampled(split, rows)
    values, clicked = 3 * columns.dense[0].astype(np.float64), columns.labels == 1
    shuffled = values[np.random.default_rng(seed).permutation(len(values))]
    return evaluate(clicked, shuffled)["ne"] - evaluate(clicked, values)["ne"]


def test_the_rows_are_spread_over_the_held_out_ones(split: SplitReader) -> None:
    labels = sampled(split, 500).labels
    assert 500 <= len(labels) <= 1000
    assert np.array_equal(sampled(split, 10**9).labels, split.column("label"))


def asked(before: dict, now: dict):
    def known(figures: dict) -> dict:
        return {name: Importance(rise=rise, error=0.0002) for name, rise in figures.items()}

    former = Former(ne=0.8, calibration=1.0, calibration_by_prediction=0.0, importance=known(before))
    record = GateRecord(**BARE, former=former, importance=known(now))
    return record, list(IMPORTANCE.decide(GateInputs(record=record, settings=GateConfig())))


def test_a_feature_that_no_longer_carries_is_named_first() -> None:
    before = {"a": 0.02, "b": 0.05, "c": 0.0005, "d": 0.004}
    _, (check,) = asked(before, {"a": 0.0, "b": 0.049, "c": 0.0, "d": 0.0001})
    assert check.passed and check.warned and check.name == NAME
    assert "'a' +0.0000, was +0.0200; 'd' +0.0001, was +0.0040." in check.words
    _, (check,) = asked(before, {"a": 0.02, "b": 0.05, "c": 0.04, "d": 0.004})
    assert check.warned and ": 'c' +0.0400, was +0.0005." in check.words


def test_what_chance_explains_is_no_finding() -> None:
    before = {"a": 0.02, "b": 0.001}
    _, (check,) = asked(before, {"a": 0.018, "b": 0.0})
    assert check.passed and not check.warned and "'a' carries most" in check.words
    record = GateRecord(**BARE)
    assert list(IMPORTANCE.decide(GateInputs(record=record, settings=GateConfig()))) == []


@pytest.mark.slow
def test_a_feature_that_is_constant_from_a_day_on_is_first_on_that_nights_page(tmp_path: Path) -> None:
    world = compose(["data.synthetic.rows=40000", "data.synthetic.ids_per_feature=60", "data.synthetic.days=1"])
    write_tsv(world.data.synthetic, world.seed, str(tmp_path / "all.tsv"))
    lines = (tmp_path / "all.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "mon.tsv").write_text("".join(lines[:20_000]))
    store = Store(str(tmp_path / "store"))
    settings = [*SMALL, f"store={store.url}", "gate.slices=[]"]
    done = nightjar("run", *settings, f"data.path={tmp_path}/mon.tsv", "run=mon")
    assert done.returncode == 0, done.stdout + done.stderr
    first = record_of(store, "mon")
    assert first.importance is not None and set(first.importance) == {f"I{n}" for n in range(1, 14)} | {
        f"C{n}" for n in range(1, 27)
    }
    broken = max((name for name in first.importance if name[0] == "C"), key=lambda name: first.importance[name].rise)
    assert first.importance[broken].rise > 0.001
    place = 13 + int(broken[1:])
    with (tmp_path / "tue.tsv").open("w") as sink:
        for line in lines[20_000:]:
            cells = line.rstrip("\n").split("\t")
            cells[place] = "ffffffff"
            sink.write("\t".join(cells) + "\n")
    warm = ["checkpoint.init_from=mon", "checkpoint.allow=[dataset]"]
    done = nightjar("run", *settings, f"data.path={tmp_path}/tue.tsv", "run=tue", *warm)
    assert done.returncode in (0, 6), done.stdout + done.stderr
    found = record_of(store, "tue")
    (check,) = (check for check in found.checks if check.name == NAME)
    assert check.warned and f": '{broken}' +0.0000" in check.words
    assert any(broken in words for words in found.warnings)
    text = gate_markdown(found)
    rows = text[text.index("| feature | increase of ne |") :].splitlines()
    assert rows[2].startswith(f"| {broken} |")
    assert "Permutation importance" in gate_page(found)


def record_of(store: Store, run: str) -> GateRecord:
    artifact = store.read_json(f"runs/{run}/result.json")["stages"]["publish"]["artifact"]
    return read(GateRecord, store, f"{artifact}/gate.json")
