"""The ``gate`` group: what a model must satisfy to be published; docs/gate.md explains each question."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

_SHORTEST_REASON = 5  # characters


@dataclass(kw_only=True)
class GateConfig:
    """What a model must satisfy to be published; null switches a limit off.

    The incumbent is the version that serves.
    """

    force: str | None = setting(
        None, doc="The model is published despite the gate, for this reason, which is recorded; null: it is not."
    )
    max_ne: float | None = setting(1.0, low=0.0, doc="NE must not exceed this; 1 is always predicting the base rate.")
    min_auc: float | None = setting(0.5, low=0.0, high=1.0, doc="AUC must reach this.")
    max_calibration_error: float | None = setting(
        0.1, low=0.0, doc="Predicted clicks may differ from the observed ones by this share of them."
    )
    min_baseline_gain: float | None = setting(
        0.5,
        low=0.0,
        doc="Without an incumbent, the model must reach this share of the gain, 1 - NE, of a logistic regression on "
        "the same rows.",
    )
    max_ne_increase: float | None = setting(
        0.002,
        low=0.0,
        doc="A rise of NE over the incumbent's on the same rows by this share must be ruled out. NE must not exceed "
        "by it, beyond doubt, that of the best of the last versions either.",
    )
    power: float = setting(
        0.9, low=0.5, high=0.9999, doc="A model that is worse by `max_ne_increase` is held with this probability."
    )
    best_of_last: int = setting(
        7,
        low=1,
        high=1000,
        doc="The model is compared to the best of this many last serving versions; 1: the incumbent.",
    )
    max_psi: float | None = setting(
        0.25,
        low=0.0,
        doc="The population stability index between the predictions of model and incumbent must not exceed this.",
    )
    max_ne_drift: float | None = setting(
        0.1, low=0.0, doc="NE may exceed the incumbent's NE when it was published by this share."
    )
    max_label_shift: float | None = setting(
        0.25,
        low=0.0,
        doc="The incumbent's calibration on these rows may differ from that when it was published by this share.",
    )
    min_coverage: float | None = setting(
        0.5, low=0.0, high=1.0, doc="Trained rows must serve this share of the lookups, on average over the features."
    )
    max_coverage_drop: float | None = setting(
        0.1, low=0.0, doc="The coverage of a feature may fall by this much below the incumbent's when it was published."
    )
    max_serving_gap: float | None = setting(
        0.005, low=0.0, doc="NE of the model as served may exceed NE of the model as trained by this share."
    )
    slices: list[str] = setting(
        factory=list, doc="Rows are also judged by the values of these categorical features, or by day."
    )
    slice_values: int = setting(
        10, low=1, high=1000, doc="This many most frequent values are slices; the others form one more."
    )
    slice_min_clicks: int = setting(
        100, low=1, doc="A slice is judged if it has at least this many rows of both classes."
    )
    slice_max_ne_increase: float | None = setting(0.02, low=0.0, doc="As `max_ne_increase`, of a slice.")
    slice_max_calibration_error: float | None = setting(0.25, low=0.0, doc="As `max_calibration_error`, of a slice.")
    confidence: float = setting(
        0.95,
        low=0.5,
        high=0.9999,
        doc="Intervals hold with this confidence; those of the slices hold with it all together.",
    )
    replicates: int = setting(400, low=20, high=10_000, doc="The bootstrap draws this many replicates.")
    blocks: int = setting(1000, low=10, high=100_000, doc="The bootstrap draws among this many blocks of rows.")
    min_rows: int = setting(1000, low=1, doc="The gate needs at least this many scored rows.")
    max_rows: int = setting(
        2_000_000, low=1, doc="The gate scores at most this many rows, evenly spread over the held-out rows."
    )

    def check(self, path: str) -> None:
        """Whoever forces the gate gives a reason."""
        if self.force is not None and len(self.force.strip()) < _SHORTEST_REASON:
            raise ConfigError(
                f"{path}.force is {self.force!r}, expected a reason, in words, for publishing despite the gate",
                hint=f"{path}.force='the traffic of the new app is known to be different'",
            )
