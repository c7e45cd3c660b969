"""A chunk gives back the rows it was given, in every coding, and says what is wrong with a damaged one."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.checkpoint.chunks import (
    HOT,
    RowBlock,
    TableCoding,
    read_block,
    split_by_heat,
    split_by_magnitude,
    write_block,
)
from pipeline.checkpoint.codings import Codings
from pipeline.checkpoint.quantise import LARGEST, Coding
from pipeline.config import CheckpointConfig
from pipeline.core.errors import ArtifactError
from pipeline.specs import TABLE_OPTIMIZERS


def block(ids: list[int] | range, columns: int = 8) -> RowBlock:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(len(ids), columns, generator=generator)
    state = {"adagrad_sum": torch.rand(len(ids), generator=generator)}
    return RowBlock("C3", np.array(list(ids), np.int64), 4, weight, state)


def stored(rows: RowBlock, coding: TableCoding) -> bytearray:
    sink = io.BytesIO()
    write_block(sink, rows, coding)
    return bytearray(sink.getvalue())


@pytest.mark.parametrize("ids", [range(0), range(5, 900), [0, 3, 4, 90, 70_000]])
def test_fp32_comes_back_bit_for_bit(ids) -> None:
    rows = block(ids)
    found = read_block(stored(rows, TableCoding("fp32")), "x")
    assert (found.table, found.column) == ("C3", 4)
    assert np.array_equal(found.ids, rows.ids)
    assert torch.equal(found.weight, rows.weight)
    assert torch.equal(found.state["adagrad_sum"], rows.state["adagrad_sum"])


@pytest.mark.parametrize(
    ("weight", "error"), [("fp16", 2**-10), (Coding(8), 0.01), (Coding(6), 0.05), (Coding(4), 0.2), (Coding(2), 1.0)]
)
def test_smaller_codings_come_back_close(weight, error: float) -> None:
    rows = block(range(500))
    found = read_block(stored(rows, TableCoding(weight, state="bf16")), "x")
    assert (found.weight - rows.weight).abs().max() <= error * rows.weight.abs().max()
    assert torch.allclose(found.state["adagrad_sum"], rows.state["adagrad_sum"], rtol=2**-8)


def of_all_magnitudes() -> RowBlock:
    """Rows of 2^-110 to 2^128, one of zeros and one of equal values."""
    rows = block(range(3, 603))
    powers = torch.randint(-110, 129, (600, 1), generator=torch.Generator().manual_seed(2))
    weight = rows.weight / rows.weight.abs().amax(1, keepdim=True) * 0.999 * 2.0 ** powers.double()
    weight[7], weight[9] = 0.0, 0.001
    return replace(rows, weight=weight.float())


def came_back(rows: RowBlock, coding: TableCoding) -> torch.Tensor:
    """The weights of ``rows`` after they were stored in the chunks that their magnitudes ask for."""
    found = torch.full_like(rows.weight, torch.nan)
    for part, of_part in split_by_magnitude(rows, coding):
        read = read_block(stored(part, of_part), "x")
        found[np.searchsorted(rows.ids, read.ids)] = read.weight
        assert torch.equal(read.state["adagrad_sum"], part.state["adagrad_sum"])
    return found


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_every_row_keeps_its_precision_beside_rows_of_any_magnitude(bits: int) -> None:
    rows = of_all_magnitudes()
    largest = rows.weight.abs().amax(1)
    found = came_back(rows, TableCoding(Coding(bits)))
    spans = rows.weight.amax(1) - rows.weight.amin(1)
    error = (found - rows.weight).abs().amax(1)
    quantised = largest <= LARGEST
    assert torch.equal(found[~quantised], rows.weight[~quantised]) and 50 < quantised.sum() < 550
    # Half a step of the grid, and what float16 leaves of its ends.
    limit = spans / (2**bits - 1) / 2 + 2**-10 * largest
    assert bool((error <= limit)[quantised].all())


@pytest.mark.parametrize("bits", [2, 4])
def test_a_searched_range_is_no_worse_than_the_plain_one_for_rows_of_any_magnitude(bits: int) -> None:
    rows = of_all_magnitudes()
    plain, searched = (
        came_back(rows, TableCoding(coding)).sub_(rows.weight).double().square().sum(1)
        for coding in (Coding(bits), Coding(bits, 25, 0.6, 2))
    )
    assert bool(searched.isfinite().all())
    # The search compares squares, which float32 does not tell apart below 2^-149.
    compared = rows.weight.abs().amax(1) > 2.0**-60
    assert bool((searched <= plain * 1.02)[compared].all())


def test_values_that_half_precision_cannot_hold_are_stored_as_they_are() -> None:
    rows = block(range(40))
    rows.weight[5, 2], rows.weight[9] = 3e38, -65_600.0
    found = came_back(rows, TableCoding("fp16"))
    assert torch.equal(found[[5, 9]], rows.weight[[5, 9]])
    others = [row for row in range(40) if row not in (5, 9)]
    assert torch.equal(found[others], rows.weight[others].half().float())


@pytest.mark.parametrize("weight", ["fp32", "fp16", Coding(4), Coding(8)])
def test_rows_of_usual_magnitudes_are_not_split(weight: str | Coding) -> None:
    rows = block(range(500))
    rows.weight[3], rows.weight[4] = 0.0, 0.001
    coding = TableCoding(weight)
    for given in (rows, replace(rows, weight=torch.zeros(500, 8)), block(range(0))):
        assert split_by_magnitude(given, coding) == [(given, coding)]


def test_states_of_values_and_exact_ones_come_back() -> None:
    rows = block(range(7, 500))
    rows.state["wide"], rows.state["count"] = torch.rand(493, 8), torch.arange(493) + 1000.0
    found = read_block(stored(rows, TableCoding(Coding(8), state="bf16", exact=("count",))), "x")
    assert torch.equal(found.state["count"], rows.state["count"])
    assert found.state["wide"].shape == (493, 8)
    assert torch.allclose(found.state["wide"], rows.state["wide"], rtol=2**-8) and len(found.state) == 3


def test_four_bits_take_an_eighth_and_compression_never_adds() -> None:
    rows = block(range(4096), 64)
    full = len(stored(rows, TableCoding("fp32")))
    assert len(stored(rows, TableCoding(Coding(4), "bf16"))) < 0.16 * full
    assert len(stored(rows, TableCoding(Coding(4), compress=True))) <= 1.01 * len(
        stored(rows, TableCoding(Coding(4), compress=False))
    )


def test_rows_that_repeat_compress() -> None:
    rows = RowBlock("C1", np.arange(0, 8000, 2), 0, torch.zeros(4000, 16), {})
    assert len(stored(rows, TableCoding(Coding(8)))) < 2000


def test_a_chunk_of_another_format_is_refused() -> None:
    data = stored(block(range(10)), TableCoding("fp32"))
    with pytest.raises(ArtifactError, match="x is not a chunk of table rows: format 'nightjar-rows-9'"):
        read_block(data.replace(b"nightjar-rows-1", b"nightjar-rows-9"), "x")


def test_a_wrong_row_count_is_noticed() -> None:
    data = stored(block(range(10)), TableCoding("fp32"))
    with pytest.raises(ArtifactError, match="do not hold 11 rows"):
        read_block(data.replace(b'"rows":"10"', b'"rows":"11"'), "x")


def test_the_hottest_rows_keep_eight_bits() -> None:
    rows = block(range(10, 110))
    (hot, fine), (others, coarse) = split_by_heat(
        rows, coding := TableCoding(Coding(2, 10, 0.3), "bf16", hot=0.07, heat="adagrad_sum")
    )
    assert (fine, coarse) == (replace(coding, weight=HOT), coding)
    sums = rows.state["adagrad_sum"]
    assert len(hot) == 7
    assert sums[hot].min() > sums[others].max()
    assert torch.cat([hot, others]).sort().values.tolist() == list(range(100))
    for part in (hot, others):
        assert torch.equal(part, part.sort().values)


@pytest.mark.parametrize(
    "coding",
    [
        TableCoding("fp32", hot=0.1, heat="adagrad_sum"),
        TableCoding(Coding(8), hot=0.1, heat="adagrad_sum"),
        TableCoding(Coding(4), heat="adagrad_sum"),
        TableCoding(Coding(4), hot=0.1),
        TableCoding(Coding(4), hot=1e-4, heat="adagrad_sum"),
    ],
)
def test_rows_are_not_split_where_none_would_gain(coding: TableCoding) -> None:
    assert split_by_heat(block(range(50)), coding) == [(None, coding)]


def mixed(rows: list[RowBlock], name: str = "rowwise_adagrad", restores: int = 0) -> list[dict[int, list[int]]]:
    """Bits by ``quantise=mixed``: {bits: places} of each block."""
    codings = Codings(CheckpointConfig(quantise="mixed", hot_share=0.0), TABLE_OPTIMIZERS.get(name))
    codings.restores = restores
    choose = codings.of(rows, final=False)
    every = [range(len(each.ids)) for each in rows]
    return [
        {
            part.weight.bits: list(places if at is None else at.tolist())
            for at, part in split_by_heat(each, choose(each))
        }
        for each, places in zip(rows, every, strict=True)
    ]


def test_mixed_gives_a_bit_more_for_four_times_the_heat_and_few_in_the_mean() -> None:
    one, two = block(range(3000), 4), block(range(1000), 4)
    heats = torch.logspace(-6, 6, 4000, base=10.0)[torch.randperm(4000, generator=torch.Generator().manual_seed(3))]
    one.state["adagrad_sum"], two.state["adagrad_sum"] = heats.split([3000, 1000])
    bits = torch.zeros(4000, dtype=torch.int64)
    for first, parts in zip((0, 3000), mixed([one, two]), strict=True):
        for each, places in parts.items():
            bits[first + torch.tensor(places)] = each
    least = [float(heats[bits == each].min()) for each in (3, 4, 6, 8)]
    assert bits[heats.argsort()].diff().min() >= 0 and bits.min() == 2
    assert [after / before for before, after in zip(least, least[1:], strict=False)] == pytest.approx(
        [4, 4, 16], rel=0.01
    )
    assert 2.74 < bits.float().mean() <= 2.75


def test_mixed_has_two_bits_for_rows_that_were_never_trained_and_the_rule_where_no_heat_is_known() -> None:
    cold = block(range(5))
    cold.state["adagrad_sum"].zero_()
    assert mixed([cold]) == [{2: [0, 1, 2, 3, 4]}]
    cold.state.clear()
    assert mixed([cold]) == [{4: [0, 1, 2, 3, 4]}]
    assert mixed([block(range(5))], restores=21) == [{8: [0, 1, 2, 3, 4]}]


def test_sums_of_rows_compress_and_come_back_bit_for_bit() -> None:
    rows = block(range(8000), 4)
    rows.state["adagrad_sum"][1000:] = 0.0
    data = stored(rows, TableCoding(Coding(2)))
    assert len(data) < 8000 * (1 + 4) + 4000 * 1.1 + 1000
    assert torch.equal(read_block(data, "x").state["adagrad_sum"], rows.state["adagrad_sum"])
