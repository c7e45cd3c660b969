"""The ``search`` and ``tune`` groups: an architecture, or settings, that many models are trained to find."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import check_name, setting
from pipeline.core.errors import ConfigError
from pipeline.core.registry import SEARCH_PARTS, search_part_docs


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
        # There must be something to search, unless the plugin that has the parts is not installed.
        if not self.parts and SEARCH_PARTS.names():
            raise ConfigError(
                f"{path}.parts is empty, expected some of: {', '.join(SEARCH_PARTS.names())}",
                hint=f"{path}.parts=[{','.join(SEARCH_PARTS.names())}]",
            )


@dataclass(kw_only=True)
class TuneConfig:
    """A study; docs/tuning.md explains it."""

    study: str | None = setting(
        None, doc="Name of the study under `<store>/studies`; null: `data.name`. `study=NAME` is short for it."
    )
    trials: int = setting(
        24, low=1, high=10_000, doc="Trials of the whole study; those that an earlier call finished count."
    )
    parallel: int = setting(
        1, low=1, high=256, doc="Trials at a time. On one machine without GPUs they share its CPUs evenly."
    )
    minutes: float | None = setting(None, low=0.01, doc="Minutes after which no trial begins; null: no limit.")
    sampler: str = setting(
        "tpe", choices=("tpe", "random"), doc="What proposes the settings of a trial: Optuna's TPE, or chance alone."
    )
    pruner: str = setting(
        "asha",
        choices=("asha", "hyperband", "none"),
        doc="What ends trials early, by the NE of their validation rows: asynchronous successive halving (ASHA), "
        "Hyperband, or nothing.",
    )
    min_epochs: float = setting(0.5, low=1e-3, doc="Epochs after which a trial can be ended for the first time.")
    reduction: int = setting(
        3,
        low=2,
        high=100,
        doc="One of this many trials goes on after `min_epochs`, and again each time it has trained so much longer.",
    )
    seed: int = setting(0, low=0, high=2**31 - 1, doc="Seed of the proposals. The trials themselves have `seed`.")
    warm_start: str | None = setting(
        None, doc="An earlier study in this store: its best trial comes first, and its trials inform the proposals."
    )
    answer_seconds: float = setting(
        60.0, low=0.0, doc="Seconds that a trial waits at a look for the study's answer before it goes on without one."
    )
    trial: int | None = setting(
        None, low=0, doc="Which trial of the study this run is; null: none. `nightjar tune` sets it."
    )

    def check(self, path: str) -> None:
        # A study's name must be valid for a folder.
        for name in ("study", "warm_start"):
            if (value := getattr(self, name)) is not None:
                check_name(f"{path}.{name}", value, "lr")
