"""The searchable parts: widths of tables, interactions of features, MLPs. No torch at import."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pipeline.config.model import COLUMN_STEP
from pipeline.specs.search_part import Decision, SearchPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.config import Config
    from pipeline.models.settings import DlrmConfig
    from pipeline.plugins.search.architecture import Gates
    from pipeline.plugins.search.supernet import SuperNet
    from pipeline.records.dataset import DatasetSchema


_WIDTH_OF = "width of "  # a decision's name is this and the table's name


class Widths(SearchPart):
    """A table's rows keep their first values: a mask that the features of the table share."""

    name = "widths"
    doc = "the width of each embedding table: its own or a power of two below it, on a GPU 4 at least."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        least = COLUMN_STEP if config.hardware.device == "cuda" else 1
        decisions = []
        for table in schema.tables:
            widest = config.model.dim_of(table.name)
            choices = [widest]
            for power in reversed(range(widest.bit_length())):
                if least <= 2**power < widest:
                    choices.append(2**power)
            # A table that is already as narrow as possible leaves nothing to decide.
            if len(choices) > 1:
                decisions.append(Decision(name=_WIDTH_OF + table.name, choices=tuple(choices)))
        return decisions

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        import torch

        from pipeline.plugins.search.architecture import first_values

        by_table = {each.name: first_values(each.choices, net.dim) for each in decisions}
        owners = [_WIDTH_OF + column.owner for column in net.schema.sparse]
        whole = torch.ones(net.dim)

        def mask(embeddings: Tensor, gates: Gates) -> Tensor:
            # Features that share a table share its mask, so make it once for each table.
            kept = {name: gates[name] @ masks for name, masks in by_table.items()}
            return embeddings * torch.stack([kept.get(owner, whole) for owner in owners])

        net.at("embeddings", mask)
        net.measured |= by_table.keys()

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        tables = dict(config.model.tables)
        for name, dim in chosen.items():
            table = name.removeprefix(_WIDTH_OF)
            # Leave out widths that the table has anyway, since best.yaml lists only differences.
            if dim != config.model.dim_of(table):
                tables[table] = replace(config.model.table(table), dim=dim)
        return replace(config, model=replace(config.model, tables=tables))


WIDTHS = Widths()


_BETWEEN = " x "  # separates the two features in a decision's name


class Interactions(SearchPart):
    """A dropped pair's dot product is zero. Pairs with the numeric features' vector stay: a feature acts there."""

    name = "interactions"
    doc = "the pairs of categorical features whose dot product the model takes."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        dropped = {frozenset(pair) for pair in cast("DlrmConfig", config.model).drop_pairs}
        decisions = []
        for one, other in itertools.combinations([column.name for column in schema.sparse], 2):
            if frozenset((one, other)) not in dropped:
                decisions.append(Decision(name=one + _BETWEEN + other, choices=(True, False), like="a pair"))
        return decisions

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        import torch

        names = [each.name for each in decisions]
        at = {_BETWEEN.join(pair): place for place, pair in enumerate(net.pairs)}
        places = torch.tensor([at[name] for name in names])

        def keep(products: Tensor, gates: Gates) -> Tensor:
            # The first value of a gate belongs to the choice True, which keeps the product. Pairs without a decision
            # keep a factor of 1.
            kept = torch.stack([gates[name][0] for name in names])
            return products * torch.ones(len(at)).index_copy(0, places, kept)

        net.at("pairs", keep)
        net.measured |= {*names}

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        model = cast("DlrmConfig", config.model)
        dropped = [name.split(_BETWEEN) for name, kept in chosen.items() if not kept]
        return replace(config, model=replace(model, drop_pairs=[*model.drop_pairs, *dropped]))


INTERACTIONS = Interactions()


HALVINGS = 4  # how often a layer's width is halved at most
NARROWEST = 8
SETTINGS = ("bottom_mlp", "top_mlp")


class Mlps(SearchPart):
    """A layer keeps its first values; an MLP ends behind one of its layers, with a last layer of its own for each."""

    name = "mlps"
    doc = "the widths of the layers of bottom_mlp and top_mlp, down to a sixteenth, and how many layers there are."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        found = []
        for setting in SETTINGS:
            # Without numeric features there is no bottom MLP to decide about.
            if setting == "bottom_mlp" and not schema.dense:
                continue
            widths = getattr(cast("DlrmConfig", config.model), setting)
            for place, width in enumerate(widths):
                halves = [width >> by for by in range(1, HALVINGS + 1) if width >> by >= NARROWEST]
                found.append(Decision(name=f"{setting} layer {place + 1}", choices=(width, *halves)))
            found.append(Decision(name=f"{setting} layers", choices=tuple(range(len(widths), 0, -1))))
        return [each for each in found if len(each.choices) > 1]

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        from pipeline.plugins.search.architecture import first_values

        for each in decisions:
            # Names are "top_mlp layer 2" for a width and "top_mlp layers" for the number of layers (``decisions``).
            setting, _, rest = each.name.partition(" ")
            if rest == "layers":
                net.at(f"{setting} depth", _ends(each.name))
            else:
                net.at(each.name, _narrows(each.name, first_values(each.choices, each.choices[0])))

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        mlps: dict[str, Any] = {}
        # The super-net has all layers, so those after the chosen last one have decisions too: they are cut off here.
        for setting in SETTINGS:
            widths = []
            for number, width in enumerate(getattr(config.model, setting), 1):
                # A layer that cannot be narrower has no decision, and keeps its width.
                widths.append(chosen.get(f"{setting} layer {number}", width))
            mlps[setting] = widths[: chosen.get(f"{setting} layers", len(widths))]
        return replace(config, model=replace(cast("DlrmConfig", config.model), **mlps))


# These are separate functions, since a lambda in the loop of ``attach`` would see the name that the loop ends with.
def _narrows(name: str, masks: Tensor) -> Callable[[Tensor, Gates], Tensor]:
    return lambda hidden, gates: hidden * (gates[name] @ masks)


def _ends(name: str) -> Callable[[Tensor, Gates], Tensor]:
    """Average the ends [layers, B, n], deepest first, weighted by the gates: [1, B, n]."""
    return lambda ends, gates: (gates[name] @ ends.flatten(1)).view(1, *ends.shape[1:])


MLPS = Mlps()


__all__ = ["SPECS"]

SPECS = (WIDTHS, INTERACTIONS, MLPS)
