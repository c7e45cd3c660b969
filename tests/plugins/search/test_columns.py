"""Tables turned to their principal axes, and choices that begin by the log loss of each."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config import Config
from pipeline.plugins.search.architecture import FARTHEST, Choices, Costs
from pipeline.plugins.search.learning import Learner
from pipeline.plugins.search.parts import SPECS
from pipeline.plugins.search.rows import SearchBatch
from pipeline.records import SparseColumn
from tests.plugins.search.cases import SCHEMA, config

SHARED = replace(SCHEMA, sparse=(*SCHEMA.sparse, SparseColumn(name="d", rows=10, table="a")))  # of the table of a
B = 64


def learner_of(whole: Config) -> Learner:
    """A learner with the parts widths and interactions, for features of which two share a table."""
    parts = [(part, list(part.decisions(whole, SHARED))) for part in SPECS[:2]]
    choices = Choices([each for _, own in parts for each in own], seed=1)
    learner = Learner(whole, SHARED, choices, total=10, start=0.0)
    for part, own in parts:
        part.attach(learner.net, own)
    return learner


def rows() -> SearchBatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.cat([torch.randint(0, column.rows, (B,), generator=generator) for column in SHARED.sparse])
    return SearchBatch(
        dense=torch.randn(B, 1, generator=generator),
        ids=ids,
        lengths=torch.ones(len(ids), dtype=torch.int64),
        labels=torch.randint(0, 2, (B,), generator=generator).float(),
        weights=torch.full((B,), 1 / B),
    )


def vectors(learner: Learner, columns: int) -> torch.Tensor:
    """Of every row of the table of b, by its first ``columns``."""
    low, high = learner.tables.ends["a"], learner.tables.ends["b"]
    return learner.tables.rows.data[low:high, :columns] @ learner.net.project.data[1, :columns]


def test_sorting_columns_keeps_the_model_and_puts_the_best_first() -> None:
    learner, batch = learner_of(config()), rows()
    low, high = learner.tables.ends["a"], learner.tables.ends["b"]
    with torch.no_grad():  # one direction alone, along no column
        learner.tables.rows[low:high] = torch.randn(high - low, 1) @ torch.randn(1, 8)
        before = learner.net(batch.dense, learner.tables(batch.ids, batch.lengths), learner.choices.whole())
    whole = vectors(learner, 8)
    assert not torch.allclose(vectors(learner, 1), whole, atol=0.1)
    learner.sort_columns()
    with torch.no_grad():
        after = learner.net(batch.dense, learner.tables(batch.ids, batch.lengths), learner.choices.whole())
    assert torch.allclose(after, before, atol=2e-2 if learner.net.top.dtype else 1e-5)
    assert torch.allclose(vectors(learner, 8), whole, atol=1e-5)
    assert torch.allclose(vectors(learner, 1), whole, atol=1e-5)


def test_choices_are_measured_beside_the_configured_model() -> None:
    learner, batch = learner_of(config()), rows()
    with torch.no_grad():
        learner.tables.rows[:, 2:] = 0  # columns that nothing is in
        learner.tables.rows[:, :2] *= 20
    found = learner.compare([batch, batch], learner.choices.whole())
    assert set(found) == {each.name for each in learner.choices.decisions}
    for table in SHARED.tables:  # widths 8, 4, 2, 1
        losses = found[f"width of {table.name}"]
        assert torch.allclose(losses[:3], torch.zeros(3), atol=1e-6) and losses[3].abs() > 1e-4
    assert found["a x b"][0] == 0 and found["a x b"][1].abs() > 1e-4


def test_choices_are_measured_beside_those_that_are_the_likeliest() -> None:
    learner, batch = learner_of(config()), rows()
    with torch.no_grad():
        learner.tables.rows *= 20
        learner.choices.logits[0, 2] = 1.0
    likeliest = learner.choices.likeliest()
    assert likeliest["width of a"].tolist() == [0, 0, 1, 0] and likeliest["a x b"].tolist() == [1, 0]
    before, after = (learner.compare([batch], gates) for gates in (learner.choices.whole(), likeliest))
    assert after["width of a"][2] == 0
    assert torch.allclose(
        after["width of a"][0], -before["width of a"][2], rtol=1e-2 if learner.net.top.dtype else 1e-4
    )
    assert not torch.allclose(after["a x b"][1], before["a x b"][1])


def test_the_likeliest_choice_is_the_one_of_the_lowest_loss() -> None:
    learner = learner_of(config())
    learner.choices.measured("width of b", torch.tensor([0.7, 0.6995, 0.7005, 9.0]), 2e-4)
    found = learner.choices.by_name()
    assert found["width of b"].index(max(found["width of b"])) == 1
    assert found["width of b"][1] / found["width of b"][3] == pytest.approx(math.exp(FARTHEST), rel=1e-4)
    assert found["width of a"] == pytest.approx([0.25] * 4)


def test_gradients_move_no_choice_that_is_measured() -> None:
    parts = [(part, list(part.decisions(config(), SHARED))) for part in SPECS]
    choices = Choices([each for _, own in parts for each in own], seed=1)
    learner = Learner(config(), SHARED, choices, total=10, start=0.0)
    for part, own in parts:
        part.attach(learner.net, own)
    learner.learn_choices(rows(), Costs(start=0.0, table=torch.rand(choices.logits.shape)), 1.0)
    moved = {each.name for each, row in zip(choices.decisions, choices.logits, strict=True) if row.any()}
    assert moved == {each.name for each in choices.decisions} - learner.net.measured
    assert moved == {each.name for each in parts[2][1]}


def test_decisions_are_whole_in_a_draw_that_says_so() -> None:
    learner = learner_of(config())
    drawn = [learner.choices.draw(1.0, {"width of a", "width of b"}) for _ in range(20)]
    assert all(gates[f"width of {name}"].tolist() == [1.0, 0.0, 0.0, 0.0] for gates in drawn for name in "ab")
    assert len({tuple(gates["a x b"].tolist()) for gates in drawn}) == 2
