"""Part ``interactions``: which pairs of features interact. No torch at import."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pipeline.specs.search_part import Decision, SearchPart

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.config import Config
    from pipeline.models.rankers import DlrmConfig
    from pipeline.records import DatasetSchema
    from pipeline.search.choices import Gates
    from pipeline.search.supernet import SuperNet


class Interactions(SearchPart):
    """A dropped pair's dot product is zero. Pairs with the numeric features' vector stay: a feature acts there."""

    name = "interactions"
    doc = "the pairs of categorical features whose dot product the model takes."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        """See ``SearchPart.decisions``."""
        names = [column.name for column in schema.sparse]
        dropped = {frozenset(pair) for pair in cast("DlrmConfig", config.model).drop_pairs}
        pairs = [pair for pair in itertools.combinations(names, 2) if frozenset(pair) not in dropped]
        return [Decision(name=_name(*pair), choices=(True, False), like="a pair") for pair in pairs]

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        """See ``SearchPart.attach``."""
        import torch

        names = [each.name for each in decisions]
        at = {_name(*pair): place for place, pair in enumerate(net.pairs)}
        places = torch.tensor([at[name] for name in names])

        def keep(products: Tensor, gates: Gates) -> Tensor:
            kept = torch.stack([gates[name][0] for name in names])
            return products * torch.ones(len(at)).index_copy(0, places, kept)

        net.at("pairs", keep)
        net.measured |= {*names}

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """See ``SearchPart.apply``."""
        model = cast("DlrmConfig", config.model)
        dropped = [name.split(_BETWEEN) for name, kept in chosen.items() if not kept]
        return replace(config, model=replace(model, drop_pairs=[*model.drop_pairs, *dropped]))


_BETWEEN = " x "


def _name(one: str, other: str) -> str:
    return f"{one}{_BETWEEN}{other}"


SPEC = Interactions()
