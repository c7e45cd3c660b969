"""What the publish stage puts beside a candidate: the best of the last versions, or a simple model."""

import dataclasses

import numpy as np
import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, UnreachableError
from pipeline.evaluation import evaluate
from pipeline.ingest.stage import ingest
from pipeline.publishing.versions import version_path
from pipeline.records import Best
from pipeline.serving.incumbent_features import NotComparableError
from pipeline.stages.release_gate import _open_best, _open_ledger, _score_baseline
from pipeline.store import Store
from pipeline.training.parquet import SplitReader
from tests.publishing.made import config
from tests.publishing.test_line import V, put


@pytest.fixture
def store(tmp_path) -> Store:
    """Four versions, each a little worse than the one before it; the last one serves."""
    made = Store(str(tmp_path))
    put(made, 1)
    for number in (2, 3, 4):
        put(made, number, 0.0015, number - 1)
    return made


def best(store: Store, opened=lambda version: version, **gate) -> tuple[Best, dict]:
    """What the record says of the best version, and the models to score."""
    settings = config(model="m")
    settings = dataclasses.replace(settings, gate=dataclasses.replace(settings.gate, **gate))
    models: dict = {}
    return _open_best(settings, store, V[4], opened, models), models


def test_a_budget_spends_nothing_on_a_day_to_come(store: Store) -> None:
    settings = config(model="m")
    settings.gate, settings.data = dataclasses.replace(settings.gate, budget=1.0), dataclasses.replace(settings.data)
    settings.data.day = "2026-01-01..2206-02-07"
    with pytest.raises(ConfigError, match="data.day=2206-02-07 is in the future"):
        _open_ledger(settings, store)


def test_the_best_of_the_last_versions_is_scored_too(store: Store) -> None:
    assert best(store) == (Best(version=V[1]), {"best": V[1]})
    assert best(store, best_of_last=2) == (Best(version=V[3]), {"best": V[3]})


def test_one_that_is_gone_is_said_and_the_next_best_is_taken(store: Store) -> None:
    store.fs.rm(store.full(version_path("m", V[1])), recursive=True)
    assert best(store) == (
        Best(version=V[2], notes=(f"{V[1]}, which was better by its record, is gone",)),
        {"best": V[2]},
    )


def test_one_that_is_damaged_or_cannot_be_scored_fails_no_night(store: Store) -> None:
    store.write_bytes(f"{version_path('m', V[1])}/gate.json", b'{"verdict": "PASS"}')

    def opened(version: str) -> str:
        if version == V[2]:
            raise NotComparableError("it needs feature 'x'")
        return version

    found, models = best(store, opened)
    assert found.version == V[3] and models == {"best": V[3]}
    assert found.notes[0].startswith(f"{V[1]}, which was better by its record, cannot be scored: ")
    assert found.notes[1] == f"{V[2]}, which was better by its record, cannot be scored: it needs feature 'x'"


def test_a_store_that_does_not_answer_is_no_verdict_on_a_version(store: Store) -> None:
    def opened(version: str) -> str:
        raise UnreachableError("no answer")

    with pytest.raises(UnreachableError):
        best(store, opened)


def test_a_simple_model_learns_from_the_train_rows_and_scores_the_held_out_ones(tmp_path) -> None:
    """Dense features of other scales, a list and missing values; it finds most of what the truth has to give."""
    made = Store(str(tmp_path))
    settings = compose(["data=synthetic", "data.synthetic.rows=30000", "data.synthetic.ids_per_feature=50"])
    with made.draft("datasets/d", kind="dataset", key="d", config={}, inputs={}) as draft:
        dataset = draft.commit(ingest(settings.data, settings.ingest, settings.seed, draft))
    test = SplitReader(made, dataset, "test")
    logits = _score_baseline(settings, made, dataset, test)
    figures = evaluate(test.column("label"), logits, test.true_probability())
    assert (1 - figures["ne"]) / (1 - figures["bayes_ne"]) > 0.6 and abs(figures["calibration"] - 1) < 0.1
    assert np.array_equal(logits, _score_baseline(settings, made, dataset, test)), "the same bits each time"
    off = dataclasses.replace(settings, gate=dataclasses.replace(settings.gate, min_baseline_gain=None))
    assert _score_baseline(off, made, dataset, test) is None
