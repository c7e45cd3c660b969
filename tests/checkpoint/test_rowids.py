"""Row numbers survive their coding, stay small, and damage is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.chunks import decode_ids, encode_ids
from pipeline.core.errors import ArtifactError


@given(st.sets(st.integers(0, 2**40), max_size=200))
def test_any_rising_numbers_come_back(numbers: set[int]) -> None:
    ids = np.array(sorted(numbers), np.int64)
    assert np.array_equal(decode_ids(encode_ids(ids), len(ids)), ids)


def test_a_quarter_of_a_table_takes_little_more_than_a_byte_each() -> None:
    ids = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < 0.25)
    assert len(encode_ids(ids)) < 1.01 * len(ids)


def test_numbers_that_do_not_rise_are_refused() -> None:
    for wrong in ([3, 3], [4, 2], [-1, 5]):
        with pytest.raises(ValueError, match="rise strictly"):
            encode_ids(np.array(wrong, np.int64))


def test_missing_bytes_are_named() -> None:
    data = encode_ids(np.array([5, 1000, 70000], np.int64))
    with pytest.raises(ArtifactError, match="expected 3"):
        decode_ids(data[:-1], 3)
