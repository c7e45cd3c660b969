"""Reliability bins: they cover every row once, agree with the totals, and do not depend on order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.evaluation import evaluate, reliability
from pipeline.records import Curve


@st.composite
def cases(draw):
    rows = draw(st.integers(2, 80))
    labels = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows).filter(lambda found: 0 < sum(found) < rows))
    logits = draw(st.lists(st.integers(-4, 4) | st.floats(-9, 9, allow_subnormal=False), min_size=rows, max_size=rows))
    return np.array(labels), np.array(logits, dtype=np.float64)


@given(cases(), st.integers(1, 30))
def test_bins_cover_all_rows_and_add_up_to_the_calibration(case, bins):
    labels, logits = case
    found = reliability(labels, logits, bins)
    predicted, observed, rows = (np.array(values) for values in (found.predicted, found.observed, found.rows))
    assert rows.sum() == len(labels) and len(rows) <= bins and (rows > 0).all()
    assert (observed * rows).sum() == pytest.approx(labels.sum())
    assert (predicted * rows).sum() / labels.sum() == pytest.approx(evaluate(labels, logits)["calibration"])
    assert (np.diff(predicted) > -1e-12).all()


@given(cases(), st.integers(1, 30), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_bit(case, bins, random):
    labels, logits = case
    order = list(range(len(labels)))
    random.shuffle(order)
    assert reliability(labels, logits, bins) == reliability(labels[order], logits[order], bins)


@given(cases(), st.integers(1, 30))
def test_a_bin_has_the_clicks_of_its_own_rows(case, bins):
    labels, logits = case
    found, at = reliability(labels, logits, bins), 0
    order = np.argsort(logits)
    for observed, rows in zip(found.observed, found.rows, strict=True):
        assert observed == labels[order[at : at + rows]].sum() / rows
        at += rows


def test_equal_logits_share_one_bin():
    assert reliability([0, 1, 1, 0], [0.0, 0.0, 0.0, 0.0], bins=4) == Curve(predicted=[0.5], observed=[0.5], rows=[4])


def test_bins_are_of_equal_size_without_ties():
    logits = np.random.default_rng(4).permutation(100) / 10 - 5
    assert reliability(logits > 0, logits, bins=10).rows == [10] * 10


def test_one_class_is_a_data_error():
    with pytest.raises(DataError, match="expected both classes"):
        reliability([1, 1], [0.0, 1.0])
