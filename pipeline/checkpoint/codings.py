"""Chooses how the tables of checkpoints are stored: fp32, fp16, or quantised with a range search for each table."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch

from pipeline.checkpoint.chunks import RowBlock, TableCoding, heat_of
from pipeline.checkpoint.quantise import Coding, bits_for_restores, choose_coding
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.embeddings.table_optimizers import TableRules, as_rules
from pipeline.specs.optimizers import TableOptimizer

_SAMPLE_ROWS = 4096
# Bits of rows for ``mixed`` by their heat, in multiples of the least heat that gets 3 bits, which is chosen so that
# trained rows have ``_MEAN_BITS`` on average. An error of a row costs in proportion to its lookups, and one more bit
# divides the squared error by four, so one bit more for every four times the heat makes the rows' costs equal (water
# filling). Codes of 5 and 7 bits were tried and save nothing.
_MIXED = ((0.0, 2), (1.0, 3), (4.0, 4), (16.0, 6), (256.0, 8))
_MEAN_BITS = 2.75
# The most heats that are sampled from each block.
_HEATS = 1 << 16


class Codings:
    """Chooses the coding of each table by ``checkpoint.*``; ``restores`` counts how often this run was restored."""

    def __init__(self, config: CheckpointConfig, optimizer: TableOptimizer | TableRules) -> None:
        self._config, self._rules = config, as_rules(optimizer)
        self._chosen: dict[tuple[str, int], Coding] = {}
        self.restores = 0

    def exactly(self, block: RowBlock) -> TableCoding:
        """Return the coding of a checkpoint whose rows come back bit for bit."""
        # No exact states need to be named here, since all states are fp32.
        return TableCoding("fp32", "fp32")

    def of(self, blocks: list[RowBlock], *, final: bool) -> Callable[[RowBlock], TableCoding]:
        """Return how the rows of each of the checkpoint's ``blocks`` are stored; ``final``: in the run's result."""
        # The writer calls the returned function behind training, because choosing a range search takes up to 50 ms a
        # table.
        return partial(self._choose, cache(lambda: self._find_least_heat(blocks)), final)

    def _choose(self, least_heat: Callable[[], float], final: bool, block: RowBlock) -> TableCoding:
        config, optimizer = self._config, self._rules.of(block.table)
        exact = tuple(column.name for column in optimizer.columns if column.exact)
        wanted = config.tables.get(block.table, config.quantise)
        if final:
            wanted = config.final_quantise
        if wanted in ("fp32", "fp16"):
            return TableCoding(wanted, config.state, exact=exact)
        if wanted.isdigit():
            bits = int(wanted)
        elif self.restores > config.expected_restores:
            # The paper's rule is for the expected restores; more of them need 8 bits.
            bits = 8
        else:
            bits = bits_for_restores(config.expected_restores)
        levels: list[tuple[float, Coding]] = []
        if wanted == "mixed" and bits < 8 and optimizer.heat == self._rules.common.heat:
            for times, level_bits in _MIXED:
                # The least heat may be infinite, so it must not be multiplied by 0.
                heat = 0.0
                if times:
                    heat = times * least_heat()
                levels.append((heat, self._quantiser(block, level_bits)))
        return TableCoding(
            self._quantiser(block, bits),
            config.state,
            hot=config.hot_share,
            heat=optimizer.heat,
            exact=exact,
            levels=tuple(levels),
        )

    def _quantiser(self, block: RowBlock, bits: int) -> Coding:
        # Choose a range search once per table, on a sample of its rows.
        key = (block.table, bits)
        if key not in self._chosen:
            step = max(1, len(block.ids) // _SAMPLE_ROWS)
            self._chosen[key] = choose_coding(block.weight[::step][:_SAMPLE_ROWS], bits)
        return self._chosen[key]

    def _find_least_heat(self, blocks: list[RowBlock]) -> float:
        # Returns the least heat that gets 3 bits, so that trained rows have at most ``_MEAN_BITS`` on average. Only
        # tables with the common kind of heat can be compared.
        common = self._rules.common.heat
        samples = []
        for block in blocks:
            if self._rules.of(block.table).heat != common:
                continue
            heat = heat_of(block, common)
            if heat is not None:
                samples.append(heat[:: max(1, len(heat) // _HEATS)])
        heats = torch.cat([torch.empty(0), *samples])
        # Rows that were never looked up have heat 0. They get 2 bits, and do not count in the mean.
        heats = heats[heats > 0].sort().values
        if not len(heats):
            return torch.inf
        mixed = torch.tensor(_MIXED)
        times, gains = mixed[1:, 0], mixed[:, 1].diff()
        # Bisect between 8 bits for all rows and 2 bits for all, in powers of two.
        low, high = math.log2(float(heats[0]) / 512), math.log2(float(heats[-1])) + 1
        for _ in range(40):
            middle = (low + high) / 2
            shares = 1 - torch.searchsorted(heats, 2**middle * times) / len(heats)
            if _MIXED[0][1] + float(gains @ shares) <= _MEAN_BITS:
                high = middle
            else:
                low = middle
        return 2**high
