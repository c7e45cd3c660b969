"""Quantisation error, packing and the choice of bits, by the compiled library and by torch."""

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.quantise import (
    Coding,
    bits_for_restores,
    choose_coding,
    decode,
    encode,
    packed_bytes,
)
from pipeline.core.kernels import LOADED
from pipeline.plugins.cpu_kernels.quantisation_kernels import QuantisationKernels
from tests import compile


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library, built as an installation builds it; None where there is no C compiler."""
    return compile.built("rowcodes", tmp_path_factory.mktemp("native"))


@pytest.fixture
def library(built: Path | None, request: pytest.FixtureRequest) -> QuantisationKernels:
    """The library with the instruction sets of the test's ``level``, all of them by default."""
    if built is None:
        pytest.skip("there is no C compiler")
    return QuantisationKernels(built, getattr(request, "param", 2))


@pytest.fixture(params=["compiled", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What quantises in this test."""
    used = request.getfixturevalue("library") if request.param == "compiled" else None
    monkeypatch.setitem(LOADED, "rowcodes", used)
    return request.param


both = pytest.mark.usefixtures("implementation")


def rows(count: int = 300, columns: int = 16, scale: float = 0.05) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, columns, generator=generator) * scale


@pytest.mark.parametrize("bits", (2, 3, 4, 6, 8))
@pytest.mark.parametrize("columns", [4, 13, 16, 64])
@both
def test_error_is_at_most_half_a_grid_step(bits: int, columns: int) -> None:
    values = rows(columns=columns)
    encoded = encode(values, Coding(bits))
    assert encoded.codes.shape == (300, packed_bytes(columns, bits))
    step = (values.amax(1) - values.amin(1)) / (2**bits - 1)
    # Low and span are float16: their rounding may move the ends of the grid by 2^-11 of the block's largest value.
    slack = encoded.unit * 2**-10
    assert ((decode(encoded) - values).abs().amax(1) <= step / 2 + slack).all()


@pytest.mark.parametrize("bits", (2, 3, 4, 6, 8))
@both
def test_constant_zero_and_tiny_rows_survive(bits: int) -> None:
    values = torch.stack([torch.zeros(8), torch.full((8,), 0.25), torch.linspace(-1e-20, 1e-20, 8)])
    decoded = decode(encode(values, Coding(bits)))
    assert torch.equal(decoded[0], torch.zeros(8))
    assert torch.allclose(decoded[1], values[1], rtol=2**-10)
    assert decoded[2].abs().max() <= 1e-7
    tiny = rows(scale=1e-30)
    assert (decode(encode(tiny, Coding(8))) - tiny).abs().max() < 1e-31


@both
def test_no_rows_and_one_row_are_fine() -> None:
    assert decode(encode(torch.empty(0, 16), Coding(4))).shape == (0, 16)
    assert decode(encode(rows(1), Coding(4))).shape == (1, 16)


@pytest.mark.parametrize("bits", [2, 3, 4])
@both
def test_adaptive_range_lowers_the_error_and_is_never_worse(bits: int) -> None:
    values = rows(2000)
    plain = (decode(encode(values, Coding(bits))) - values).norm(dim=1)
    adaptive = (decode(encode(values, Coding(bits, 25, 0.6))) - values).norm(dim=1)
    assert adaptive.sum() < 0.99 * plain.sum()
    # The search compares unrounded ranges; float16 then moves each value by 2^-11 of the block's largest at most.
    assert (adaptive <= plain + 16**0.5 * values.abs().max() * 2**-11).all()


@both
def test_rows_whose_columns_are_not_adjacent_are_coded_as_they_are() -> None:
    apart = rows(16, 300).t()
    adjacent = apart.contiguous()
    step = (adjacent.amax(1) - adjacent.amin(1)) / 255
    assert ((decode(encode(apart, Coding(8))) - adjacent).abs().amax(1) <= 0.51 * step + 2**-11).all()


@both
def test_a_search_shrinks_a_range_by_its_share_at_most() -> None:
    # One value far from a thousand others, which gain by every step from the high end.
    values = torch.cat([rows(20, 1023), torch.ones(20, 1)], dim=1)
    encoded = encode(values, Coding(2, steps=10, shrink=0.3))
    share = encoded.span.float() * encoded.unit / (values.amax(1) - values.amin(1))
    assert abs(share.min() - 0.7) < 2**-9


@both
def test_blocks_do_not_change_the_result() -> None:
    values = rows(20_000, 16)
    whole = decode(encode(values, Coding(4, 10, 0.5)))
    part = values[5000:6000].clone()
    part[0] = values[values.abs().amax(1).argmax()]
    decoded = decode(encode(part, Coding(4, 10, 0.5)))
    assert torch.equal(decoded[1:], whole[5001:6000])


@both
def test_parameters_are_chosen_on_a_sample() -> None:
    assert choose_coding(rows(), 8) == Coding(8)
    assert choose_coding(rows(1000, 64), 2).steps > 0
    two_valued = torch.where(rows(500) > 0, 1.0, -1.0)
    assert choose_coding(two_valued, 4) == Coding(4)


def test_bits_follow_the_expected_restores() -> None:
    assert [bits_for_restores(r) for r in (0, 1, 2, 3, 4, 20, 21, 100)] == [2, 2, 3, 3, 4, 4, 8, 8]


@pytest.mark.parametrize("bits", (2, 3, 4, 6, 8))
@pytest.mark.parametrize("search", [(0, 0.0, 0), (0, 0.0, 4), (10, 0.5, 2), (25, 0.6, 2)])
@both
def test_rows_that_did_not_change_give_the_same_codes_again(bits: int, search: tuple[int, float, int]) -> None:
    coding = Coding(bits, *search)
    once = decode(encode(rows(3000, 16), coding))
    # Other company, another search: as in a later checkpoint, after a restore.
    company = torch.cat([once, 37.5 * rows(500, 16)])
    for again in (coding, Coding(bits, 25, 0.6, 2), Coding(bits)):
        company = decode(encode(company, again))
        decoded = company[:3000]
        assert torch.equal(encode(once, again).codes, encode(once, coding).codes)
        # Low and span in steps of the company's largest value: 2^-11 of it at first, then no further change.
        assert (decoded - once).abs().max() <= 2**-10 * 37.5 * 0.05 * 5
    assert torch.equal(decode(encode(company, Coding(bits))), company)


@pytest.mark.parametrize("bits", [2, 3, 4])
@both
def test_fitting_lowers_the_error_and_is_never_worse(bits: int) -> None:
    values = rows(2000)
    plain = (decode(encode(values, Coding(bits))) - values).norm(dim=1)
    fitted = (decode(encode(values, Coding(bits, fits=2))) - values).norm(dim=1)
    assert fitted.sum() < 0.95 * plain.sum()
    assert (fitted <= plain + 16**0.5 * values.abs().max() * 2**-11).all()


@pytest.mark.parametrize("library", [0, 1, 2], indirect=True)
@pytest.mark.parametrize("columns", [1, 13, 64])
@pytest.mark.parametrize("search", [(2, 0, 0.0, 2), (3, 25, 0.6, 2), (4, 0, 0.0, 4), (6, 0, 0.0, 0), (8, 0, 0.0, 0)])
def test_compiled_and_torch_code_alike(library, columns, search, monkeypatch) -> None:
    """The rows are not a whole number of tiles, and lie among other columns."""
    values = rows(1003, columns + 3)[:, 2 : columns + 2]
    monkeypatch.setitem(LOADED, "rowcodes", None)
    by_torch = encode(values, Coding(*search))
    monkeypatch.setitem(LOADED, "rowcodes", library)
    compiled = encode(values, Coding(*search))
    same = (compiled.low == by_torch.low) & (compiled.span == by_torch.span)
    assert compiled.unit == by_torch.unit
    assert same.float().mean() > 0.99
    assert torch.equal(compiled.codes[same], by_torch.codes[same])
    errors = [(decode(each) - values).square().sum() for each in (compiled, by_torch)]
    assert errors[0] <= errors[1] * 1.0001 + 1e-12


def test_every_instruction_set_gives_the_same_bits(built, monkeypatch) -> None:
    if built is None:
        pytest.skip("there is no C compiler")
    coded = []
    for level in (0, 1, 2):
        monkeypatch.setitem(LOADED, "rowcodes", QuantisationKernels(built, level))
        coded.append(encode(rows(5000, 24), Coding(4, 25, 0.6, 4)))
    for each in coded[1:]:
        assert torch.equal(each.codes, coded[0].codes)
        assert torch.equal(each.low, coded[0].low) and torch.equal(each.span, coded[0].span)
