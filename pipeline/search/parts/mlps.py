"""Part ``mlps``: widths and depth of the model's MLPs. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pipeline.specs.search_part import Decision, SearchPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.config import Config
    from pipeline.models.rankers import DlrmConfig
    from pipeline.records import DatasetSchema
    from pipeline.search.choices import Gates
    from pipeline.search.supernet import SuperNet

HALVINGS = 4  # of a layer's width
NARROWEST = 8
SETTINGS = ("bottom_mlp", "top_mlp")


class Mlps(SearchPart):
    """A layer keeps its first values; an MLP ends behind one of its layers, with a last layer of its own for each."""

    name = "mlps"
    doc = "the widths of the layers of bottom_mlp and top_mlp, down to a sixteenth, and how many layers there are."

    def decisions(self, config: Config, schema: DatasetSchema) -> list[Decision]:
        """See ``SearchPart.decisions``."""
        found = []
        for setting in SETTINGS if schema.dense else ("top_mlp",):
            widths = getattr(cast("DlrmConfig", config.model), setting)
            for place, width in enumerate(widths):
                halves = [width >> by for by in range(1, HALVINGS + 1) if width >> by >= NARROWEST]
                found.append(Decision(name=f"{setting} layer {place + 1}", choices=(width, *halves)))
            found.append(Decision(name=f"{setting} layers", choices=tuple(range(len(widths), 0, -1))))
        return [each for each in found if len(each.choices) > 1]

    def attach(self, net: SuperNet, decisions: Sequence[Decision]) -> None:
        """See ``SearchPart.attach``."""
        from pipeline.search.masks import first_values

        for each in decisions:
            setting, _, rest = each.name.partition(" ")
            if rest == "layers":
                net.at(f"{setting} depth", _ends(each.name))
            else:
                net.at(each.name, _narrowed(each.name, first_values(each.choices, each.choices[0])))

    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """See ``SearchPart.apply``."""
        mlps: dict[str, Any] = {}
        for setting in SETTINGS:
            widths = [
                chosen.get(f"{setting} layer {place + 1}", width)
                for place, width in enumerate(getattr(config.model, setting))
            ]
            mlps[setting] = widths[: chosen.get(f"{setting} layers", len(widths))]
        return replace(config, model=replace(cast("DlrmConfig", config.model), **mlps))


def _narrowed(name: str, masks: Tensor) -> Callable[[Tensor, Gates], Tensor]:
    return lambda hidden, gates: hidden * (gates[name] @ masks)


def _ends(name: str) -> Callable[[Tensor, Gates], Tensor]:
    """The mean of the ends [layers, B, n], deepest first, by the gates: [1, B, n]."""
    return lambda ends, gates: (gates[name] @ ends.flatten(1)).view(1, *ends.shape[1:])


SPEC = Mlps()
