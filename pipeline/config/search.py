"""The ``search`` group: the search for an architecture (``nightjar search``)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.specs import SEARCH_PARTS, search_part_docs


@dataclass(kw_only=True)
class SearchConfig:
    """The search for an architecture of DLRM; docs/search.md explains it."""

    name: str | None = setting(
        None, doc="Name of the search under `<store>/searches`; null: that of the run. `search=<name>` sets it, too."
    )
    parts: list[str] = setting(
        factory=lambda: list(SEARCH_PARTS.names()),
        choices=SEARCH_PARTS.names,
        doc="What is searched.",
        more=search_part_docs,
    )
    cost: float = setting(
        0.01, low=0.0, doc="Log loss that the predicted time of a step of the configured model weighs as much as."
    )
    memory: float = setting(
        0.01, low=0.0, doc="Log loss that the bytes of the configured model's tables weigh as much as."
    )
    epochs: int = setting(4, low=1, doc="Passes over the rows that train the super-net's weights.")
    held_share: float = setting(
        0.2, low=0.01, high=0.9, doc="Share of the train rows on which choices are learnt, in whole row groups."
    )
    warmup: float = setting(
        0.5, low=0.0, high=0.9, doc="Share of the steps in which weights learn alone, with all columns and pairs."
    )
    lr: float = setting(0.02, low=1e-6, doc="Learning rate of the choices' probabilities.")
    temperature: float = setting(
        1.0, low=1e-3, doc="Temperature at the start of the relaxed draws (Gumbel-softmax) whose gradients choices get."
    )
    final_temperature: float = setting(1.0, low=1e-3, doc="Temperature at the end; it changes by a constant factor.")

    def check(self, path: str) -> None:
        """There must be something to search."""
        if not self.parts:
            raise ConfigError(
                f"{path}.parts is empty, expected some of: {', '.join(SEARCH_PARTS.names())}",
                hint=f"{path}.parts=[{','.join(SEARCH_PARTS.names())}]",
            )
