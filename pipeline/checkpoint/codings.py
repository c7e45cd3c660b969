"""How the tables of a training's checkpoints are stored: fp32, fp16, or bits with a range search of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pipeline.checkpoint.chunks import RowBlock, TableCoding, heat_of
from pipeline.checkpoint.quantise import Coding, bits_for_restores, choose_coding
from pipeline.config import CheckpointConfig
from pipeline.specs import TableOptimizer

_SAMPLE_ROWS = 4096
# ``mixed``: bits of rows by their heat, in multiples of the median of the trained rows of all tables. An error of a row
# costs as much as the row is looked up, and one more bit makes its square a fourth: a bit for every four times the heat
# keeps what all rows cost alike (water filling). Codes of 5 and 7 bits were tried and save nothing. The first multiple
# is the lowest at which tables of 64 columns still take a seventeenth of their bytes over a cycle of checkpoints.
_COLD = 0.7
_MIXED = ((0.0, 2), (_COLD, 3), (4 * _COLD, 4), (16 * _COLD, 6), (256 * _COLD, 8))
_HEATS = 1 << 16  # of each block, to find the median


class Codings:
    """Chooses the coding of each table by ``checkpoint.*``; ``restores``: how often this run was restored so far."""

    def __init__(self, config: CheckpointConfig, optimizer: TableOptimizer) -> None:
        self._config, self._optimizer = config, optimizer
        self._chosen: dict[tuple[str, int], Coding] = {}
        self.restores = 0

    def of(self, blocks: list[RowBlock], *, final: bool) -> Callable[[RowBlock], TableCoding]:
        """How the rows of each of the checkpoint's ``blocks`` are stored; ``final``: in the run's result.

        A quantiser's range search is chosen once a table, on a sample of its rows, which takes up to 50 ms. The writer
        calls what is returned behind training.
        """
        medians: list[float] = []

        def median() -> float:
            if not medians:
                medians.append(self._median(blocks))
            return medians[0]

        return partial(self._of, median, final)

    def _of(self, median: Callable[[], float], final: bool, block: RowBlock) -> TableCoding:
        config = self._config
        exact = tuple(column.name for column in self._optimizer.columns if column.exact)
        wanted = config.final_quantise if final else config.tables.get(block.table, config.quantise)
        if wanted in ("fp32", "fp16"):
            return TableCoding(wanted, config.state, exact=exact)
        bits = int(wanted) if wanted.isdigit() else self._bits()
        levels: tuple[tuple[float, Coding], ...] = ()
        if wanted == "mixed" and bits < 8:
            levels = tuple((times and times * median(), self._quantiser(block, each)) for times, each in _MIXED)
        return TableCoding(
            self._quantiser(block, bits), config.state, hot=config.hot_share, heat=self._optimizer.heat, exact=exact,
            levels=levels,
        )  # fmt: skip

    def _quantiser(self, block: RowBlock, bits: int) -> Coding:
        known = self._chosen.get((block.table, bits))
        if known is None:
            step = max(1, len(block.ids) // _SAMPLE_ROWS)
            known = self._chosen[block.table, bits] = choose_coding(block.weight[::step][:_SAMPLE_ROWS], bits)
        return known

    def _median(self, blocks: list[RowBlock]) -> float:
        """Of the heat of trained rows, by a sample; infinite where there is none."""
        heats = [heat for block in blocks if (heat := heat_of(block, self._optimizer.heat)) is not None]
        sampled = torch.cat([heat[:: max(1, len(heat) // _HEATS)] for heat in heats]) if heats else torch.empty(0)
        trained = sampled[sampled > 0]
        return float(trained.median()) if len(trained) else torch.inf

    def _bits(self) -> int:
        """The paper's rule; more restores than expected raise it to 8."""
        expected = self._config.expected_restores
        return 8 if self.restores > expected else bits_for_restores(expected)
