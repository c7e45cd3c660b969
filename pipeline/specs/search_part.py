"""The protocol of a searchable part: what it decides, how it acts in the super-net, and what settings it leads to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.records.dataset import DatasetSchema


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One thing to decide: ``name`` gets one of ``choices``; the first one is what the configuration says.

    ``like``: decisions that say the same and have the same choices cost the same, so that one of them is priced.
    """

    name: str
    choices: tuple[Any, ...]
    like: str = ""

    @property
    def priced_as(self) -> tuple[str, tuple[Any, ...]]:
        """What decisions of equal cost have in common."""
        return self.like or self.name, self.choices


class SearchPart(ABC):
    """A choice of ``search.parts``. Its file must not import torch at its top.

    The cost needs no code of a part: the planner prices the configuration that ``apply`` makes of each choice.
    """

    name: str
    doc: str

    @abstractmethod
    def decisions(self, config: Config, schema: DatasetSchema) -> Sequence[Decision]:
        """Return the decisions for the model of ``config``; those of different parts have different names."""

    @abstractmethod
    def attach(self, net: Any, decisions: Sequence[Decision]) -> None:
        """Attach the decisions' gates to the super-net, at the places it offers (``SuperNet.at``).

        ``net``: a ``pipeline.plugins.search.supernet.SuperNet``.
        """

    @abstractmethod
    def apply(self, config: Config, chosen: Mapping[str, Any]) -> Config:
        """Return ``config`` with the ``chosen`` values of some of the part's decisions; the others stay as they are."""
