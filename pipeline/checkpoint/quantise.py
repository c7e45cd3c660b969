"""Row-wise quantisation of table rows for checkpoints (Check-N-Run, NSDI'22, section 4.2).

The quantisation is asymmetric: a row's values lie on a grid of 2^bits points between its low and its low + span. For
four bits and fewer the range may be *adaptive*: it is shrunk greedily from either end while the row's squared error
falls, then fitted to the codes by least squares.

The compiled kernels (``core.kernels``) do the work where they are installed, ten times as fast as the torch operations
below, which do it everywhere else. Both search alike, and give the same codes on the same range. They add up sums in
different orders, so in fewer than one row of a thousand they find another range, whose error is the same to seven
digits.

Coding is idempotent: rows that were decoded and not changed since give the same codes again, whatever the search,
because their plain range has no error, a search must lower the error, and low and span are rounded to steps that do
not depend on the block. So rows that are not trained keep their values however often a run is restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.core.kernels import load_kernels

# The number of values per tile of the torch operations. A tile and its temporaries stay in a core's second-level cache,
# and every operation stays below torch's grain size (32,768), so that the checkpoint's thread works alone: a second
# team of threads would fight with training's for the cores (measured: ten to a hundred times slower on a busy machine).
_TILE_VALUES = 32_000
# Bits by expected restores, rising; more restores than the last entry need 8 bits (section 4.2.2).
_BITS_BY_RESTORES = ((1, 2), (3, 3), (20, 4))
# The largest magnitude that is quantised: the search for a range squares values, in float32. The least unit.
LARGEST, LEAST_UNIT = 2.0**60, 2.0**-100
# The numbers of bits that do not divide a byte.
_GROUPED = (3, 6)
# (steps, shrink, fits) tried by `choose_coding`, cheapest first; (25, 0.6) is near k-means in the paper.
_SEARCHES = ((0, 0.0, 0), (0, 0.0, 2), (0, 0.0, 4), (10, 0.3, 2), (10, 0.5, 2), (25, 0.6, 2))


@dataclass(frozen=True)
class Coding:
    """How a block of rows is quantised.

    The range is shrunk in ``steps``-ths, by ``shrink`` at most, then fitted ``fits`` times to the codes by least
    squares. All 0: the plain range [min, max].
    """

    bits: int
    steps: int = 0
    shrink: float = 0.0
    fits: int = 0


@dataclass(frozen=True)
class EncodedRows:
    """Quantised rows.

    ``codes``: uint8 [n, packed_bytes(columns, bits)]. ``low``, ``span``: float16 [n], in units of ``unit``
    (float16 relative to a power of two above the largest value keeps 11 bits of them for rows of any usual scale).
    """

    codes: Tensor
    low: Tensor
    span: Tensor
    unit: float
    bits: int
    columns: int


def bits_for_restores(restores: int) -> int:
    """Return the bits a value for a run that is expected to restore ``restores`` times from quantised checkpoints."""
    for limit, bits in _BITS_BY_RESTORES:
        if restores <= limit:
            return bits
    return 8


def packed_bytes(columns: int, bits: int) -> int:
    """Return the bytes of one row's codes."""
    # Codes of three and six bits are packed in groups of eight.
    if bits in _GROUPED:
        return (columns + 7) // 8 * bits
    return (columns * bits + 7) // 8


def encode(rows: Tensor, coding: Coding) -> EncodedRows:
    """Quantise ``rows`` (float32 [n, columns], no magnitude above ``LARGEST``)."""
    count, columns = rows.shape
    codes = torch.empty(count, packed_bytes(columns, coding.bits), dtype=torch.uint8)
    low = torch.empty(count, dtype=torch.float16)
    span = torch.empty(count, dtype=torch.float16)
    if not codes.numel():
        return EncodedRows(codes, low, span, 1.0, coding.bits, columns)

    # 1. Find the unit of all rows.
    unit = unit_of(float(magnitudes(rows).max()))

    # 2. Compute the codes, and the range of each row.
    kernels = _kernels_for(rows)
    if kernels is not None:
        search = coding.steps, int(coding.steps * coding.shrink), coding.fits
        kernels.encode(rows, coding.bits, search, unit, codes, low, span)
    else:
        _encode_tiles(rows, coding, unit, codes, low, span)
    return EncodedRows(codes, low, span, unit, coding.bits, columns)


def unit_of(largest: float) -> float:
    """Return the unit of rows whose largest magnitude is ``largest``: the next power of two, which scales exactly."""
    return 2.0 ** math.ceil(math.log2(max(largest, LEAST_UNIT)))


def magnitudes(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each of ``rows`` (float32 [n, columns], finite), float32 [n]."""
    found = torch.zeros(len(rows))
    if not rows.numel():
        return found
    kernels = _kernels_for(rows)
    if kernels is not None:
        kernels.magnitudes(rows, found)
        return found
    # Work tile by tile, to avoid a temporary of the size of all rows and a second team of threads.
    for start, tile in _tiles(rows):
        found[start : start + len(tile)] = tile.abs().amax(1)
    return found


def _kernels_for(rows: Tensor) -> Any:
    kernels = load_kernels("rowcodes")
    if kernels is not None and (rows.dtype != torch.float32 or rows.stride(1) != 1):
        return None
    return kernels


def _encode_tiles(rows: Tensor, coding: Coding, unit: float, codes: Tensor, low: Tensor, span: Tensor) -> None:
    # Uses torch's operations on whole tiles, so that nothing loops over rows.
    for start, part in _tiles(rows):
        stop = start + part.shape[0]
        # A tile is transposed to [columns, rows], so that values per row are contiguous vectors.
        tile = part.t().contiguous()
        plain = searched = tile.amin(0), tile.amax(0)
        if coding.steps or coding.fits:
            searched = _Search(tile, coding.bits, *plain).best(coding)
        tile_codes, low[start:stop], span[start:stop] = _on_grid(tile, *searched, unit, coding.bits)
        # A grid must be used to both ends, or decoded rows would have another plain range: see the module's docstring.
        unused = (tile_codes.amin(0) > 0) | (tile_codes.amax(0) < 2**coding.bits - 1)
        if searched is not plain and bool(unused.any()):
            bottom = torch.where(unused, plain[0], searched[0])
            top = torch.where(unused, plain[1], searched[1])
            tile_codes, low[start:stop], span[start:stop] = _on_grid(tile, bottom, top, unit, coding.bits)
        codes[start:stop] = _pack(tile_codes, coding.bits).t()


def decode(encoded: EncodedRows, out: Tensor | None = None) -> Tensor:
    """Decode the float32 rows [n, columns] that ``encoded`` stands for; written into ``out`` if given."""
    if out is None:
        out = torch.empty(encoded.codes.shape[0], encoded.columns)
    levels = 2**encoded.bits - 1
    for start, tile in _tiles(out):
        stop = start + tile.shape[0]
        values = _unpack(encoded.codes[start:stop], encoded.bits, encoded.columns).float()
        scale = encoded.span[start:stop].float() * (encoded.unit / levels)
        # Compute low + code * scale directly in ``out``, without a temporary.
        torch.addcmul((encoded.low[start:stop].float() * encoded.unit)[:, None], values, scale[:, None], out=tile)
    return out


def choose_coding(sample: Tensor, bits: int, worth: float = 0.05) -> Coding:
    """Choose range-search parameters for ``bits`` on a ``sample`` of rows (float32 [n, columns]).

    A costlier search is chosen only if it lowers the root mean square error by a share of at least ``worth``.
    """
    best, error = Coding(bits), math.inf
    if bits > 4 or not len(sample):
        return best
    # The first search is the plain range, against which the others are compared.
    for steps, shrink, fits in _SEARCHES:
        candidate = Coding(bits, steps, shrink, fits)
        rms = float((decode(encode(sample, candidate)) - sample).square().mean().sqrt())
        if rms < error * (1 - worth):
            best, error = candidate, rms
    return best


def _tiles(rows: Tensor) -> list[tuple[int, Tensor]]:
    size = max(1, _TILE_VALUES // max(1, rows.shape[1]))
    return [(start, rows[start : start + size]) for start in range(0, rows.shape[0], size)]


def _on_grid(tile: Tensor, low: Tensor, high: Tensor, unit: float, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    # Returns codes (float32 [columns, n]), and the grid's low and span. Codes are relative to the stored (rounded)
    # range, so that rounding the range costs no accuracy.
    rounded = (low / unit).half()
    span = ((high - low) / unit).half()
    width = span.float() * unit
    levels = 2**bits - 1
    inverse = torch.where(width > 0, levels / width, 0.0)
    codes = torch.sub(tile, rounded.float() * unit).mul_(inverse).round_().clamp_(0, levels)
    return codes, rounded, span


class _Search:
    # Searches better ranges of the rows of one tile [columns, n]; its buffers stay in the cache.

    def __init__(self, tile: Tensor, bits: int, low: Tensor, high: Tensor) -> None:
        self._tile = tile
        self._levels = 2**bits - 1
        self._plain = low, high
        self._places = torch.empty_like(tile)
        self._codes = torch.empty_like(tile)
        # All candidates so far, (low, high, error) of [n] each. Every row takes the one with its least error.
        self._tried = [(low, high, self._error(low, high))]

    def best(self, coding: Coding) -> tuple[Tensor, Tensor]:
        """Find the low and high ends [n] with the least squared error that the search of ``coding`` tries."""
        if coding.steps:
            self._shrink(coding.steps, int(coding.steps * coding.shrink))
        if coding.fits:
            self._fit(coding.fits)
        return self._select_best()

    def _select_best(self) -> tuple[Tensor, Tensor]:
        lows, highs, errors = map(torch.stack, zip(*self._tried, strict=True))
        place = errors.argmin(0, keepdim=True)
        return lows.gather(0, place)[0], highs.gather(0, place)[0]

    def _shrink(self, steps: int, most: int) -> None:
        # This is the paper's greedy search: raise the low end or lower the high end by a step, whichever gives the
        # lower error.
        low, high = self._plain
        step = (high - low) / steps
        for taken in range(1, most + 1):
            # The span is the same whichever end moves.
            span = step * (steps - taken)
            raised, lowered = low + step, high - step
            from_low, from_high = self._error_in_steps(raised, span), self._error_in_steps(low, span)
            raise_low = from_low < from_high
            low, high = torch.where(raise_low, raised, low), torch.where(raise_low, high, lowered)
            error = torch.minimum(from_low, from_high).mul_((span / self._levels).square_())
            self._tried.append((low, high, error))

    def _fit(self, fits: int) -> None:
        # This is Lloyd's method on a grid: repeatedly fit the range to the latest codes by least squares.
        count = len(self._tile)
        mean = self._tile.mean(0)
        # Recompute the codes of the best range so far into ``_codes``.
        self._error(*self._select_best())
        for _ in range(fits):
            codes = self._codes
            middle = codes.mean(0)
            products = torch.mul(codes, self._tile, out=self._places).sum(0)
            squares = torch.mul(codes, codes, out=self._places).sum(0)
            scale = (products - count * middle * mean) / (squares - count * middle.square()).clamp_min_(1e-6)
            low = mean - scale * middle
            high = low + scale * self._levels
            # A row of a single value has no codes to fit, so its plain range stays.
            error = self._error(low, high).masked_fill_(scale <= 0, torch.inf)
            self._tried.append((low, high, error))

    def _error(self, low: Tensor, high: Tensor) -> Tensor:
        span = high - low
        return self._error_in_steps(low, span).mul_((span / self._levels).square_())

    def _error_in_steps(self, low: Tensor, span: Tensor) -> Tensor:
        # Returns the error of each row in squared grid steps, and leaves the codes in ``_codes``.
        inverse = self._levels / span.clamp_min(torch.finfo(torch.float32).tiny * self._levels)
        places = torch.addcmul(low.neg().mul_(inverse), self._tile, inverse, out=self._places)
        codes = torch.round(places, out=self._codes).clamp_(0, self._levels)
        return places.sub_(codes).square_().sum(0)


def _pack(codes: Tensor, bits: int) -> Tensor:
    # Packs float codes [columns, n] into bytes [bytes a row, n], with the first value in the lowest bits.
    if bits == 8:
        return codes.to(torch.uint8)
    group = 8 if bits in _GROUPED else 8 // bits
    short = -codes.shape[0] % group
    if short:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, short))
    # Sums have at most 48 bits: float32 holds those of whole bytes exactly, float64 the others.
    exact = torch.float64 if bits in _GROUPED else torch.float32
    words = codes[group - 1 :: group].to(exact, copy=True)
    for place in range(group - 2, -1, -1):
        words.mul_(2**bits).add_(codes[place::group])
    if bits not in _GROUPED:
        return words.to(torch.uint8)
    whole = words.to(torch.int64)
    return torch.stack([(whole >> 8 * place) & 255 for place in range(bits)], dim=1).to(torch.uint8).flatten(0, 1)


def _unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    if bits == 8:
        return packed
    count = packed.shape[0]
    if bits in _GROUPED:
        kind = torch.int32 if bits == 3 else torch.int64
        parts = packed.view(count, -1, bits).to(kind)
        words = parts[:, :, 0].clone()
        for place in range(1, bits):
            words |= parts[:, :, place] << 8 * place
        codes = (words[:, :, None] >> torch.arange(8, dtype=kind) * bits) & (2**bits - 1)
    else:
        shifts = torch.arange(8 // bits, dtype=torch.uint8) * bits
        codes = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return codes.reshape(count, -1)[:, :columns]
