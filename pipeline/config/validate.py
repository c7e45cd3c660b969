"""The settings of group ``train`` about validation rows: when training looks at them, and what it then does."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import AUTO, setting


@dataclass(kw_only=True)
class ValidateConfig:
    """Looks at the validation rows of `data.split`. Without such rows they must be at their defaults.

    A plateau is `patience` looks in a row that are no better than the best one.
    """

    every_steps: int | str = setting(
        AUTO,
        low=1,
        auto=True,
        doc="Steps between two looks at the validation rows; auto: four looks an epoch. The last step has one, too.",
    )
    monitor: str = setting(
        "ne", choices=("ne", "auc"), doc="Figure of the validation rows that says which look is best."
    )
    min_delta: float = setting(0.0, low=0.0, doc="A look is better only if its figure is better by more than this.")
    patience: int | None = setting(
        8, low=1, doc="Looks without a better one that make a plateau; null: no number does, training takes all steps."
    )
    cycle_epochs: int | None = setting(
        1,
        low=1,
        doc="Epochs after which the learning rates' schedule begins anew, so that a look at its end sees weights that "
        "have settled, whatever the number of epochs; null: the schedule spans the training.",
    )
    lr_drops: int = setting(
        1,
        low=0,
        doc="Plateaus at which training goes back to its best weights with lower learning rates; the next one ends it.",
    )
    lr_factor: float = setting(
        0.1, low=1e-6, high=1.0, doc="What both learning rates are multiplied with at such a plateau."
    )
