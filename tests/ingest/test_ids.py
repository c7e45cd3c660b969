"""Ids of single fields and lists, without a log: what is missing keeps its place and shifts nothing."""

import numpy as np
import polars as pl

from pipeline.ingest.ids import as_bits, as_lists, as_text, of_bits


def test_lists_of_numbers_become_lists_of_text_row_by_row() -> None:
    lists = pl.Series("c", [[1, 2], None, [3, None], [], [4]], dtype=pl.List(pl.Int64))
    assert as_text(lists).to_list() == [["1", "2"], [], ["3", None], [], ["4"]]
    words = pl.Series("c", [["a"], None, []], dtype=pl.List(pl.String))
    assert as_text(words).to_list() == [["a"], None, []]
    assert as_text(pl.Series("c", [1, None])).to_list() == ["1", None]


def test_offsets_cut_values_into_rows() -> None:
    assert as_lists(pl.Series("c", [7, 8, 9]), np.array([0, 2, 2, 3])).to_list() == [[7, 8], [], [9]]


def test_numbers_as_bits_come_back_and_both_zeros_are_one() -> None:
    numbers = pl.Series([1.5, None, -0.0, 0.0, -2.0])
    bits = as_bits(numbers)
    assert bits.null_count() == 1 and bits[2] == bits[3] == 0
    np.testing.assert_array_equal(of_bits(bits), [1.5, np.nan, 0.0, 0.0, -2.0])
