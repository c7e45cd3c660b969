"""What the events of an example row weigh: seen on the way, whatever the block; the first row of a fitting length."""

import numpy as np
import pytest
import torch

from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.models.layers import Jagged
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, SequenceColumn, SequenceGroup, SparseColumn
from pipeline.training.predict import MOST_EVENTS, watching
from pipeline.training.sequence_vectors import LookedUpEmbeddings, build_sequence_encoders

DIM = 8


def histories(block, most=None, **options):
    """The module of one sequence of items, with ``most`` events at a time."""
    column = SequenceColumn(name="seen__item", rows=9, table="item")
    schema = DatasetSchema(
        dense=(),
        sparse=(SparseColumn(name="item", rows=9),),
        rows={},
        files={},
        groups={},
        sequences=(SequenceGroup(name="seen", columns=(column,), max_length=40),),
    )
    chosen = SequenceModel(block=block, options=SequenceOptions(**options))
    made = build_sequence_encoders(DlrmConfig(embedding_dim=DIM, sequences={"seen": chosen}), schema, 1, most)
    assert made is not None
    return made.eval()


def batch(lengths):
    generator = torch.Generator().manual_seed(2)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    taken = LookedUpEmbeddings(
        len(lengths),
        {"item": torch.randn(len(lengths), DIM, generator=generator)},
        {"seen__item": torch.randn(len(rows), DIM, generator=generator)},
    )
    return taken, (rows,)


def seen(module, lengths, rows=None):
    with torch.no_grad(), watching(module) as watched:
        vectors = module(*batch(lengths))
        module(*batch([1, 1]))  # later batches are not looked at
    return watched.examples(len(lengths) if rows is None else rows).get("seen"), vectors


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("block", ["din", "sasrec", "bst", "hstu"])
def test_the_weights_of_a_row_are_those_of_its_events(block, most):
    lengths = [2, 5, 1, 5]
    example, vectors = seen(histories(block, most), lengths)
    assert example is not None and example.row == 1 and len(example.weights) == 5
    assert (example.target is not None) == (block in ("bst", "hstu"))
    if block == "din":  # the vector is the sum that they weigh
        module = histories(block)
        taken, (rows,) = batch(lengths)
        events = taken.events["seen__item"] + module.vectors["seen"].places[Jagged.of(rows, 4).ages]
        own = torch.from_numpy(example.weights)[:, None] * events[rows == 1]
        torch.testing.assert_close(own.sum(0), vectors[1, 0])
    if block in ("sasrec", "bst"):
        assert np.isclose(example.weights.sum() + (example.target or 0.0), 1.0, atol=1e-5)


def test_a_row_of_a_length_that_a_picture_can_show_is_taken_and_none_that_fills_the_batch_up():
    assert seen(histories("din"), [3, 20, MOST_EVENTS, 7])[0].row == 2
    assert seen(histories("din"), [30, 20, 25])[0].row == 1
    assert seen(histories("din"), [3, 5, 12], rows=2)[0].row == 1


def test_a_sum_weighs_nothing_and_nothing_stays_behind():
    assert seen(histories("sum"), [3, 4])[0] is None
    module = histories("din")
    seen(module, [2])
    assert not any(each._forward_hooks for each in module.modules())
    with watching(None) as watched:
        assert watched.examples(1) == {}
