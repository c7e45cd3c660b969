"""The settings of ensembles from one training, ``train.snapshots``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

PERTURB, RESET = "perturb", "reset"  # the kinds that other code asks for


@dataclass(kw_only=True)
class SnapshotConfig:
    """Several models from one training, which are published as one version that averages their logits.

    The steps are cut into `count` equal cycles; each ends with a snapshot, and the learning rates' schedule begins anew
    behind it. The members of the version are chosen by the validation rows.
    """

    count: int = setting(1, low=1, high=64, doc="Snapshots that a training makes, one per cycle; 1: an ordinary one.")
    keep: int = setting(4, low=2, doc="Most snapshots that become members of the version.")
    kind: str = setting(
        RESET,
        choices=("cyclic", PERTURB, RESET),
        doc="What a cycle begins with. cyclic: the weights as they are. perturb: dense weights moved in the direction "
        "of their last steps. reset: the training begins anew, with other initial values.",
    )
    perturbation: float = setting(
        0.1, low=1e-6, high=10.0, doc="Of kind perturb: the length of the move, as a share of each parameter's norm."
    )
    choose: str = setting(
        "diverse",
        choices=("diverse", "last"),
        doc="How members are chosen. diverse: one after the other, each the one with which NE of the validation rows "
        "is smallest, which counts how good it is and how it differs from the others. last: the newest ones.",
    )
    weights: str = setting(
        "fitted",
        choices=("fitted", "equal"),
        doc="Weights of the members' logits. fitted: to the validation rows, drawn towards equal ones.",
    )

    @property
    def active(self) -> bool:
        """Whether the training makes an ensemble."""
        return self.count > 1

    def check(self, path: str) -> None:
        """Settings of an ensemble need one."""
        plain = SnapshotConfig()
        for name in ("keep", "kind", "perturbation", "choose", "weights"):
            if not self.active and getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"{path}.{name} is {getattr(self, name)}, but {path}.count is 1: there are no snapshots",
                    hint=f"{path}.count=4",
                )
        if self.kind != PERTURB and self.perturbation != plain.perturbation:
            raise ConfigError(
                f"{path}.perturbation is {self.perturbation:g}, but {path}.kind={self.kind} perturbs nothing",
                hint=f"{path}.kind={PERTURB}",
            )
