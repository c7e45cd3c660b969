"""How the tables of a training's checkpoints are stored: fp32, fp16, or bits with a range search of their own."""

from __future__ import annotations

from pipeline.checkpoint.chunks import RowBlock, TableCoding
from pipeline.checkpoint.quantise import Coding, bits_for_restores, choose_coding
from pipeline.config import CheckpointConfig
from pipeline.specs import TableOptimizer

_SAMPLE_ROWS = 4096


class Codings:
    """Chooses the coding of each table by ``checkpoint.*``; ``restores``: how often this run was restored so far."""

    def __init__(self, config: CheckpointConfig, optimizer: TableOptimizer) -> None:
        self._config, self._optimizer = config, optimizer
        self._chosen: dict[str, Coding] = {}
        self.restores = 0

    def of(self, block: RowBlock, *, final: bool) -> TableCoding:
        """How the rows of ``block`` are stored; ``final``: in the run's result.

        A quantiser's range search is chosen once a table, on a sample of its rows, which takes up to 50 ms. The writer
        calls this behind training.
        """
        config = self._config
        exact = tuple(column.name for column in self._optimizer.columns if column.exact)
        wanted = config.final_quantise if final else config.tables.get(block.table, config.quantise)
        if wanted in ("fp32", "fp16"):
            return TableCoding(wanted, config.state, exact=exact)
        quantiser = self._quantiser(block, self._bits() if wanted == "auto" else int(wanted))
        return TableCoding(quantiser, config.state, hot=config.hot_share, heat=self._optimizer.heat, exact=exact)

    def _quantiser(self, block: RowBlock, bits: int) -> Coding:
        known = self._chosen.get(block.table)
        if known is None or known.bits != bits:
            step = max(1, len(block.ids) // _SAMPLE_ROWS)
            known = self._chosen[block.table] = choose_coding(block.weight[::step][:_SAMPLE_ROWS], bits)
        return known

    def _bits(self) -> int:
        """The paper's rule; more restores than expected raise it to 8."""
        expected = self._config.expected_restores
        return 8 if self.restores > expected else bits_for_restores(expected)
