"""The ``gate`` group: what a model must satisfy to be published; docs/gate.md explains each question."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class GateConfig:
    """What a model must satisfy to be published; null: not asked.

    ``force``: publish in spite of the gate, for this reason, which is recorded. Absolute: ``max_ne``, ``min_auc``,
    ``max_calibration_error`` (of 1), ``min_coverage`` (share of lookups served by trained rows), ``min_rows``. Where
    there is no incumbent: ``min_baseline_gain``, the share of the gain 1 - NE of a logistic regression that the model
    must reach. Beside the incumbent on the same rows: ``max_ne_increase``, the relative rise of NE that must be ruled
    out, such that a model worse by as much is held with probability ``power``; ``max_psi`` (shift of predictions).
    Beside the best of the last ``best_of_last`` versions that served (1: only the incumbent): ``max_ne_increase``,
    beyond doubt. Beside the incumbent when it was published: ``max_ne_drift``, ``max_label_shift`` (of its
    calibration), ``max_coverage_drop``. ``max_serving_gap``: of NE as served over NE as trained. ``slices``: sparse
    features, or day, whose ``slice_values`` largest values are judged apart where they have ``slice_min_clicks`` rows
    of both classes. ``confidence`` of intervals, of ``replicates`` over ``blocks`` of rows; ``max_rows`` are scored.
    """

    force: str | None = None
    max_ne: float | None = 1.0
    min_auc: float | None = 0.5
    max_calibration_error: float | None = 0.1
    min_baseline_gain: float | None = 0.5
    max_ne_increase: float | None = 0.002
    power: float = 0.9
    best_of_last: int = 7
    max_psi: float | None = 0.25
    max_ne_drift: float | None = 0.1
    max_label_shift: float | None = 0.25
    min_coverage: float | None = 0.5
    max_coverage_drop: float | None = 0.1
    max_serving_gap: float | None = 0.005
    slices: list[str] = field(default_factory=list)
    slice_values: int = 10
    slice_min_clicks: int = 100
    slice_max_ne_increase: float | None = 0.02
    slice_max_calibration_error: float | None = 0.25
    confidence: float = 0.95
    replicates: int = 400
    blocks: int = 1000
    min_rows: int = 1000
    max_rows: int = 2_000_000
