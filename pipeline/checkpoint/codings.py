"""How the tables of a training's checkpoints are stored: fp32, fp16, or bits with a range search of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock, TableCoding, heat_of
from pipeline.checkpoint.quantise import Coding, bits_for_restores, choose_coding
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.embeddings.table_optimizer_config import TableRules, as_rules
from pipeline.specs.optimizers import TableOptimizer

_SAMPLE_ROWS = 4096
# ``mixed``: bits of rows by their heat, in multiples of the least heat that gets 3 of them, which is chosen so that
# trained rows have so many in the mean. An error of a row costs as much as the row is looked up, and one more bit makes
# its square a fourth: a bit for every four times the heat keeps what all rows cost alike (water filling). Codes of 5
# and 7 bits were tried and save nothing.
_MIXED = ((0.0, 2), (1.0, 3), (4.0, 4), (16.0, 6), (256.0, 8))
_MEAN_BITS = 2.75
_HEATS = 1 << 16  # of each block that are looked at


class Codings:
    """Chooses the coding of each table by ``checkpoint.*``; ``restores``: how often this run was restored so far."""

    def __init__(self, config: CheckpointConfig, optimizer: TableOptimizer | TableRules) -> None:
        self._config, self._rules = config, as_rules(optimizer)
        self._chosen: dict[tuple[str, int], Coding] = {}
        self.restores = 0

    def exactly(self, block: RowBlock) -> TableCoding:
        """The coding of a checkpoint whose rows come back bit for bit."""
        return TableCoding("fp32", "fp32", exact=self._exact(block))

    def _exact(self, block: RowBlock) -> tuple[str, ...]:
        return tuple(column.name for column in self._rules.of(block.table).columns if column.exact)

    def of(self, blocks: list[RowBlock], *, final: bool) -> Callable[[RowBlock], TableCoding]:
        """How the rows of each of the checkpoint's ``blocks`` are stored; ``final``: in the run's result.

        A quantiser's range search is chosen once a table, on a sample of its rows, which takes up to 50 ms. The writer
        calls what is returned behind training.
        """
        return partial(self._of, cache(lambda: _least_heat(self._trained(blocks))), final)

    def _of(self, least_heat: Callable[[], float], final: bool, block: RowBlock) -> TableCoding:
        config, optimizer, exact = self._config, self._rules.of(block.table), self._exact(block)
        wanted = config.final_quantise if final else config.tables.get(block.table, config.quantise)
        if wanted in ("fp32", "fp16"):
            return TableCoding(wanted, config.state, exact=exact)
        bits = int(wanted) if wanted.isdigit() else self._bits()
        levels: tuple[tuple[float, Coding], ...] = ()
        if wanted == "mixed" and bits < 8 and optimizer.heat == self._rules.common.heat:
            levels = tuple((times and times * least_heat(), self._quantiser(block, each)) for times, each in _MIXED)
        return TableCoding(
            self._quantiser(block, bits),
            config.state,
            hot=config.hot_share,
            heat=optimizer.heat,
            exact=exact,
            levels=levels,
        )

    def _quantiser(self, block: RowBlock, bits: int) -> Coding:
        known = self._chosen.get((block.table, bits))
        if known is None:
            step = max(1, len(block.ids) // _SAMPLE_ROWS)
            known = self._chosen[block.table, bits] = choose_coding(block.weight[::step][:_SAMPLE_ROWS], bits)
        return known

    def _trained(self, blocks: list[RowBlock]) -> Tensor:
        """The heat of trained rows, rising; a sample. Only tables with the same heat as most can be compared."""
        common = self._rules.common.heat
        same = [block for block in blocks if self._rules.of(block.table).heat == common]
        heats = [heat for block in same if (heat := heat_of(block, common)) is not None]
        sampled = torch.cat([heat[:: max(1, len(heat) // _HEATS)] for heat in heats]) if heats else torch.empty(0)
        return sampled[sampled > 0].sort().values

    def _bits(self) -> int:
        """The paper's rule; more restores than expected raise it to 8."""
        expected = self._config.expected_restores
        return 8 if self.restores > expected else bits_for_restores(expected)


def _least_heat(heats: Tensor) -> float:
    """The least heat that gets 3 bits, where rows of ``heats`` (rising) have ``_MEAN_BITS`` or fewer in the mean."""
    if not len(heats):
        return torch.inf
    times = torch.tensor([each for each, _ in _MIXED[1:]])
    gains = torch.tensor([bits for _, bits in _MIXED]).diff().float()
    low, high = math.log2(float(heats[0]) / 512), math.log2(float(heats[-1])) + 1  # 8 bits for all, 2 for all
    for _ in range(40):
        middle = (low + high) / 2
        shares = 1 - torch.searchsorted(heats, 2**middle * times) / len(heats)
        enough = _MIXED[0][1] + float(gains @ shares) <= _MEAN_BITS
        low, high = (low, middle) if enough else (middle, high)
    return 2**high
