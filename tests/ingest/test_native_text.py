"""The compiled steps on text give what Polars and xxhash give, to the bit, or leave the block to them."""

import random

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import xxhash

from pipeline.core.kernels import LOADED, load_kernels
from pipeline.ingest import text as ingest_text
from pipeline.ingest.ids import hash_ids
from pipeline.ingest.text import TextLayout, count_byte, read_lines

KERNELS = load_kernels("fields")
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")

NAMES = ("label", "x", "a", "y", "b")
NUMBERS = frozenset({"x", "y"})


def read(block, numbers=NUMBERS):
    layout = TextLayout(names=NAMES, separator="\t", quote=None, numbers=numbers)
    return read_lines(block.encode(), 1, layout)


@pytest.fixture
def polars(monkeypatch):
    """Call a function without the kernels."""

    def call(work):
        with monkeypatch.context() as patch:
            patch.setitem(LOADED, "fields", None)
            return work()

    return call


def numbers(rng):
    whole, point = rng.choice(["0", "-0", "7", "007", "-12", "999999999999999"]), rng.randint(1, 14)
    digits = str(rng.randrange(10**point)).zfill(point)
    return rng.choice(["", whole, f"{rng.randrange(1000)}.{digits[:11]}", f"-0.{digits}", "3.0"])


def words(rng):
    return "".join(rng.choice("abc 019-.#") for _ in range(rng.choice([0, 1, 7, 8, 9, 12, 13, 16, 40])))


def log(rows, seed):
    rng = random.Random(seed)
    lines = [[rng.choice("01"), numbers(rng), words(rng), numbers(rng), words(rng)] for _ in range(rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


@pytest.mark.parametrize(("rows", "seed"), [(1, 1), (9, 2), (3000, 3)])
def test_text_and_numbers_are_those_of_polars(polars, monkeypatch, rows, seed):
    block = log(rows, seed)
    theirs, lines, _ = polars(lambda: read(block))
    monkeypatch.setattr(ingest_text, "_read", None)  # what a block needs that Polars reads
    ours, own_lines, rejects = read(block)
    assert ours.schema["x"] == pl.Float64 and ours.schema["a"] == pl.String and not rejects
    numbers = theirs.select(
        pl.col(sorted(NUMBERS)).cast(pl.Float64, strict=False)
    )  # as parsing does with a block of blanks
    for name in sorted(NUMBERS):
        assert ours[name].equals(numbers[name])
        mine, other = (each.fill_null(1.0).to_numpy().view(np.uint64) for each in (ours[name], numbers[name]))
        np.testing.assert_array_equal(mine, other)  # of -0, too
    assert ours.drop(NUMBERS).equals(theirs.drop(NUMBERS))
    np.testing.assert_array_equal(own_lines, lines)


@pytest.mark.parametrize(
    "line",
    [
        "1\t1e3\ta\t2\tb",
        "1\t+1\ta\t2\tb",
        "1\t 1\ta\t2\tb",
        "1\t.5\ta\t2\tb",
        "1\t5.\ta\t2\tb",
        "1\t-\ta\t2\tb",
        "1\t1.2.3\ta\t2\tb",
        "1\tnan\ta\t2\tb",
        "1\t1234567890123456\ta\t2\tb",
        "1\t1\té\t2\tb",
        "1\t1\ta\rc\t2\tb",
        "1\t1\r\ta\t2\tb",
        "1\t1\ta\t2",
        "1\t1\ta\t2\tb\tc",
        "",
    ],
)
def test_all_else_is_left_to_a_closer_look(polars, line):
    block = f"0\t3\tk\t4\tl\n{line}\n0\t5\tm\t6\tn\n"
    assert KERNELS.split(block.encode(), 9, [name in NUMBERS for name in NAMES]) is None
    (ours, lines, rejects), (theirs, _, theirs_too) = read(block), polars(lambda: read(block))
    assert ours.equals(theirs) and [each.line for each in rejects] == [each.line for each in theirs_too]
    assert len(lines) + len(rejects) == 3


def test_long_texts_do_not_keep_the_block():
    block = ("x\t" + "y" * 20 + "\n").encode() * 3 + b"x" * 1_000_000 + b"\tz\n"
    first, second = KERNELS.split(block, 9, [False, False])
    assert second.to_pylist() == ["y" * 20] * 3 + ["z"] and len(first[3].as_py()) == 1_000_000
    assert sum(len(each) for each in second.buffers() if each is not None) < 200


def test_bytes_are_counted(polars):
    block = random.Random(5).randbytes(300_001) + b"\n" * 1000
    assert count_byte(block, 10) == polars(lambda: count_byte(block, 10)) == block.count(b"\n")
    assert count_byte(memoryview(block)[:999], 7) == block[:999].count(7)
    assert count_byte(b"", 10) == 0


@pytest.mark.parametrize("size", [*range(36), 63, 64, 65, 100, 1000])
def test_hashes_are_xxhash64(polars, size):
    rng = random.Random(size)
    ids = ["".join(rng.choice("aé€x1") for _ in range(size)) for _ in range(20)] + [None, "", "none"]
    missing = ("", "none")
    expected = [None if each is None or each in missing else xxhash.xxh64_intdigest(each.encode(), 77) for each in ids]
    for series in (pl.Series(ids), pl.Series(["first", *ids]).slice(1), pl.concat([pl.Series(ids)], rechunk=False)):
        assert hash_ids(series, 77, missing).to_list() == expected
    assert polars(lambda: hash_ids(pl.Series(ids), 77, missing).to_list()) == expected


def test_hashes_of_no_texts():
    assert KERNELS.hash(pa.array([], pa.string_view()), 1).to_pylist() == []
    assert hash_ids(pl.Series([None, None], dtype=pl.String), 1).to_list() == [None, None]
