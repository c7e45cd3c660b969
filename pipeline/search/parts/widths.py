"""Part ``widths``: the width of each embedding table. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.config.model import COLUMN_STEP
from pipeline.specs.search_part import Decision, SearchPart

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.config import Config
    from pipeline.records import DatasetSchema
    from pipeline.search.choices import Gates
    from pipeline.search.supernet import SuperNet


class Widths(SearchPart):
    """A table's rows keep their first values: a mask that the features of the table share."""

    name = "widths"
    doc = "the width of each embedding table: its own or a power of two below it, on a GPU 4 at least."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        """See ``SearchPart.decisions``."""
        least = COLUMN_STEP if config.hardware.device == "cuda" else 1
        found = []
        for table in schema.tables:
            widest = config.model.dim_of(table.name)
            powers = [2**power for power in range(widest.bit_length()) if least <= 2**power < widest]
            found.append(Decision(name=_name(table.name), choices=(widest, *reversed(powers))))
        return [each for each in found if len(each.choices) > 1]

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        """See ``SearchPart.attach``."""
        import torch

        from pipeline.search.masks import first_values

        by_table = {each.name: first_values(each.choices, net.dim) for each in decisions}
        owners = [_name(column.owner) for column in net.schema.sparse]
        whole = torch.ones(net.dim)

        def mask(embeddings: Tensor, gates: Gates) -> Tensor:
            kept = {name: gates[name] @ masks for name, masks in by_table.items()}
            return embeddings * torch.stack([kept.get(owner, whole) for owner in owners])

        net.at("embeddings", mask)
        net.measured |= by_table.keys()

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """See ``SearchPart.apply``."""
        tables = dict(config.model.tables)
        for name, dim in chosen.items():
            table = name.removeprefix(_name(""))
            if dim != config.model.dim_of(table):
                tables[table] = replace(config.model.table(table), dim=dim)
        return replace(config, model=replace(config.model, tables=tables))


def _name(table: str) -> str:
    return f"width of {table}"


SPEC = Widths()
