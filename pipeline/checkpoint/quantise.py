"""Row-wise quantisation of table rows for checkpoints (Check-N-Run, NSDI'22, section 4.2).

Asymmetric: a row's values lie on a grid of 2^bits points between its low and its low + span. For four
bits and fewer the range may be *adaptive*: it is shrunk greedily from either end while the row's
squared error falls. Everything works on whole blocks of rows; nothing loops over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)
# Values per block: a block and its temporaries stay in a core's second-level cache.
_BLOCK_VALUES = 65_536
# Bits by expected restores, rising; more restores than the last entry need 8 bits (section 4.2.2).
_BITS_BY_RESTORES = ((1, 2), (3, 3), (20, 4))
# (steps, shrink) tried by `choose_coding`, cheapest first; (25, 0.6) is near k-means in the paper.
_SEARCHES = ((0, 0.0), (10, 0.3), (10, 0.5), (25, 0.6))


@dataclass(frozen=True)
class Coding:
    """How a block of rows is quantised: ``bits`` a value; the range is shrunk in ``steps``-ths, by ``shrink`` at most.

    ``steps`` 0: the plain range [min, max].
    """

    bits: int
    steps: int = 0
    shrink: float = 0.0


@dataclass(frozen=True)
class EncodedRows:
    """Quantised rows.

    ``codes``: uint8 [n, packed_bytes(columns, bits)]. ``low``, ``span``: float16 [n], in units of ``unit``
    (float16 relative to the block's largest value keeps 11 bits of them for rows of any usual scale).
    """

    codes: Tensor
    low: Tensor
    span: Tensor
    unit: float
    bits: int
    columns: int


def bits_for_restores(restores: int) -> int:
    """Bits a value for a run that is expected to restore ``restores`` times from quantised checkpoints."""
    for limit, bits in _BITS_BY_RESTORES:
        if restores <= limit:
            return bits
    return 8


def packed_bytes(columns: int, bits: int) -> int:
    """Bytes of one row's codes; three-bit codes are packed in groups of eight."""
    return (columns + 7) // 8 * 3 if bits == 3 else (columns * bits + 7) // 8


def encode(rows: Tensor, coding: Coding) -> EncodedRows:
    """Quantise ``rows`` (float32 [n, columns], finite)."""
    count, columns = rows.shape
    unit = max(float(rows.abs().max()), torch.finfo(torch.float32).tiny) if count else 1.0
    codes = torch.empty(count, packed_bytes(columns, coding.bits), dtype=torch.uint8)
    low = torch.empty(count, dtype=torch.float16)
    span = torch.empty(count, dtype=torch.float16)
    for start, block in _blocks(rows):
        stop = start + block.shape[0]
        bottom, top = _range(block, coding)
        low[start:stop] = bottom / unit
        span[start:stop] = (top - bottom) / unit
        # Codes are taken against the stored (rounded) range, so its rounding costs no accuracy of its own.
        bottom, width = low[start:stop].float() * unit, span[start:stop].float() * unit
        codes[start:stop] = _pack(_codes(block, bottom, width, coding.bits), coding.bits)
    return EncodedRows(codes, low, span, unit, coding.bits, columns)


def decode(encoded: EncodedRows, out: Tensor | None = None) -> Tensor:
    """The float32 rows [n, columns] that ``encoded`` stands for; written into ``out`` if given."""
    count = encoded.codes.shape[0]
    out = torch.empty(count, encoded.columns) if out is None else out
    levels = 2**encoded.bits - 1
    for start, block in _blocks(out):
        stop = start + block.shape[0]
        values = _unpack(encoded.codes[start:stop], encoded.bits, encoded.columns).float()
        scale = encoded.span[start:stop].float() * (encoded.unit / levels)
        torch.addcmul((encoded.low[start:stop].float() * encoded.unit)[:, None], values, scale[:, None], out=block)
    return out


def choose_coding(sample: Tensor, bits: int, worth: float = 0.02) -> Coding:
    """Range-search parameters for ``bits``, chosen on a ``sample`` of rows (float32 [n, columns]).

    A costlier search is taken only where it lowers the root mean square error by a share of at least ``worth``.
    """
    best = Coding(bits)
    if bits > 4 or not len(sample):
        return best
    error = _rms_error(sample, best)
    for steps, shrink in _SEARCHES[1:]:
        candidate = Coding(bits, steps, shrink)
        lower = _rms_error(sample, candidate)
        if lower < error * (1 - worth):
            best, error = candidate, lower
    return best


def _rms_error(rows: Tensor, coding: Coding) -> float:
    return float((decode(encode(rows, coding)) - rows).square().mean().sqrt())


def _blocks(rows: Tensor) -> list[tuple[int, Tensor]]:
    size = max(1, _BLOCK_VALUES // max(1, rows.shape[1]))
    return [(start, rows[start : start + size]) for start in range(0, rows.shape[0], size)]


def _codes(block: Tensor, low: Tensor, span: Tensor, bits: int) -> Tensor:
    levels = 2**bits - 1
    inverse = torch.where(span > 0, levels / span, 0.0)
    return torch.sub(block, low[:, None]).mul_(inverse[:, None]).round_().clamp_(0, levels)


def _range(block: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Lowest and highest grid point of each row: [min, max], or the greedily shrunk range with least error."""
    low, high = block.amin(1), block.amax(1)
    if not coding.steps:
        return low, high
    step = (high - low) / coding.steps
    best_low, best_high = low, high
    best = _squared_error(block, low, high, coding.bits)
    for _ in range(int(coding.steps * coding.shrink)):
        from_low = _squared_error(block, low + step, high, coding.bits)
        from_high = _squared_error(block, low, high - step, coding.bits)
        raise_low = from_low < from_high
        low = torch.where(raise_low, low + step, low)
        high = torch.where(raise_low, high, high - step)
        error = torch.minimum(from_low, from_high)
        better = error < best
        best = torch.where(better, error, best)
        best_low = torch.where(better, low, best_low)
        best_high = torch.where(better, high, best_high)
    return best_low, best_high


def _squared_error(block: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    span = high - low
    grid = _codes(block, low, span, bits).mul_((span / (2**bits - 1))[:, None]).add_(low[:, None])
    return grid.sub_(block).square_().sum(1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack float codes [n, columns] into bytes, the first value in the lowest bits."""
    if bits == 8:
        return codes.to(torch.uint8)
    group = 8 if bits == 3 else 8 // bits
    short = -codes.shape[1] % group
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    grouped = codes.to(torch.int32).view(codes.shape[0], -1, group)
    shifts = torch.arange(group, dtype=torch.int32) * bits
    words = (grouped << shifts).sum(2, dtype=torch.int32)
    if bits != 3:
        return words.to(torch.uint8)
    parts = (words[:, :, None] >> torch.tensor([0, 8, 16], dtype=torch.int32)) & 255
    return parts.to(torch.uint8).view(codes.shape[0], -1)


def _unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes [n, columns] that ``_pack`` packed."""
    if bits == 8:
        return packed
    count = packed.shape[0]
    if bits == 3:
        parts = packed.view(count, -1, 3).to(torch.int32)
        words = parts[:, :, 0] | (parts[:, :, 1] << 8) | (parts[:, :, 2] << 16)
        shifts = torch.arange(8, dtype=torch.int32) * 3
        codes = (words[:, :, None] >> shifts) & 7
    else:
        shifts = torch.arange(8 // bits, dtype=torch.uint8) * bits
        codes = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return codes.reshape(count, -1)[:, :columns]
