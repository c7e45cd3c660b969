"""Ids of single fields and lists, without a log: what is missing keeps its place and shifts nothing."""

import numpy as np
import polars as pl

from pipeline.config import SparseFeature
from pipeline.ingest.ids import (
    as_bits,
    as_lists,
    as_text,
    check_ids,
    estimated_distinct,
    hash_rows,
    hash_rows_of,
    of_bits,
    second_rows_of,
)
from pipeline.ingest.schema import SparseSpec
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.values import RejectedRows

from .conftest import csv_config


def test_lists_of_numbers_become_lists_of_text_row_by_row() -> None:
    lists = pl.Series("c", [[1, 2], None, [3, None], [], [4]], dtype=pl.List(pl.Int64))
    assert as_text(lists).to_list() == [["1", "2"], [], ["3", None], [], ["4"]]
    words = pl.Series("c", [["a"], None, []], dtype=pl.List(pl.String))
    assert as_text(words).to_list() == [["a"], None, []]
    assert as_text(pl.Series("c", [1, None])).to_list() == ["1", None]


def feature(**settings) -> SparseSpec:
    return data_spec(csv_config("x", sparse={"c": SparseFeature(**settings)}).data).sparse[0]


def test_ids_that_are_no_whole_numbers_reject_their_rows() -> None:
    ids = pl.Series("id:c", ["7", "-7", "+07", None, "", "7.0", "1e3", "x"])
    hashes = pl.Series("hash:c", [1, 2, 3, None, 5, 6, 7, 8], dtype=pl.UInt64)
    rejected = RejectedRows(np.arange(1, 9))
    check_ids([ids, hashes], feature(integer=True), rejected)
    assert [reject.line for reject in rejected.rejects] == [5, 6, 7, 8]
    assert rejected.rejects[-1].reason == "c is 'x', expected a whole number"

    lists = pl.Series("id:c", [["7", "8"], ["7", "x", "y"], [], None, [None]], dtype=pl.List(pl.String))
    hashes = pl.Series("hash:c", [[1, 2], [1, 2, 3], [], None, [None]], dtype=pl.List(pl.UInt64))
    rejected = RejectedRows(np.arange(1, 6))
    check_ids([lists, hashes], feature(integer=True, required=True, separator="|"), rejected)
    assert [(reject.line, reject.reason) for reject in rejected.rejects] == [
        (3, "c is missing"),
        (4, "c is missing"),
        (2, "c is 'x', expected a whole number"),
    ]


def test_offsets_cut_values_into_rows() -> None:
    assert as_lists(pl.Series("c", [7, 8, 9]), np.array([2, 0, 1])).to_list() == [[7, 8], [], [9]]


def test_numbers_as_bits_come_back_and_both_zeros_are_one() -> None:
    numbers = pl.Series([1.5, None, -0.0, 0.0, -2.0])
    bits = as_bits(numbers)
    assert bits.null_count() == 1 and bits[2] == bits[3] == 0
    np.testing.assert_array_equal(of_bits(bits), [1.5, np.nan, 0.0, 0.0, -2.0])


def test_hashes_are_those_of_every_release() -> None:
    """Rows of tables, shares of days and repeated rows follow them: stores of earlier releases go on."""
    words = [np.array(values, np.uint64) for values in ([0, 1, 2**63], [5, 5, 7])]
    assert hash_rows(words).tolist() == [0x266BFBC0DF43E7B8, 0xAB82960C78270AE1, 0x997F1CB4C64FAC04]
    ids = pl.Series([1, 2, 2**64 - 1], dtype=pl.UInt64)
    assert hash_rows_of(ids, 1000).to_list() == [3, 4, 2 + (2**64 - 1) % 998]
    assert second_rows_of(ids, 1000).to_list() == [293, 966, 359]


def test_distinct_ids_are_counted_up_to_the_limit_and_estimated_from_there_on() -> None:
    assert estimated_distinct(np.array([1, 2, 3], np.uint64), kept=4) == 3
    # The third smallest is half of all there could be: two others below it, so four in all.
    assert estimated_distinct(np.array([2**60, 2**62, 2**63], np.uint64), kept=3) == 4
