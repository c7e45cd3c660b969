"""The ``evaluate`` and ``gate`` groups: figures on held-out rows, and what a model must satisfy to be published."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, make_dataclass

from pipeline.config.fields import METADATA, setting
from pipeline.config.tasks import TaskLimits
from pipeline.core.errors import ConfigError
from pipeline.specs.gate_check import GATE_CHECKS


@dataclass(kw_only=True)
class EvaluateConfig:
    """Evaluation on the held-out rows."""

    global_batch: int = setting(16_384, low=1, doc="Samples per evaluation step, over all ranks.")
    group_by: str | None = setting(
        None,
        quiet=True,
        doc="Categorical feature, with one id a row, by whose ids rows are ranked: a user, or a request. Evaluation "
        "and gate then have GAUC, the AUC within each group; null: none.",
    )


_SHORTEST_REASON = 5  # characters


@dataclass(kw_only=True)
class GateConfig:
    """What a model must satisfy to be published; null switches a limit off.

    The incumbent is the version that serves.
    """

    force: str | None = setting(
        None, doc="Publish the model despite the gate, for this reason, which is recorded; null: do not."
    )
    max_ne: float | None = setting(1.0, low=0.0, doc="Largest NE; 1 is always predicting the base rate.")
    min_auc: float | None = setting(0.5, low=0.0, high=1.0, doc="Smallest AUC.")
    max_calibration_error: float | None = setting(
        0.1, low=0.0, doc="Largest difference between predicted and observed clicks, as a share of the observed ones."
    )
    min_baseline_gain: float | None = setting(
        0.5,
        low=0.0,
        doc="Without an incumbent: smallest share of the gain, 1 - NE, of a logistic regression on the same rows.",
    )
    max_ne_increase: float | None = setting(
        0.002,
        low=0.0,
        doc="Rise of NE over the incumbent's on the same rows, as a share, that the test must rule out. The model is "
        "also held if NE exceeds that of the best of the last versions by more than this, beyond doubt.",
    )
    power: float = setting(
        0.9, low=0.5, high=0.9999, doc="Probability that a model which is worse by `max_ne_increase` is held."
    )
    budget: float | None = setting(
        None,
        low=0.01,
        high=100.0,
        quiet=True,
        doc="Error budget: the wrong promotions a year that you accept. These are versions that pass although their NE "
        "is above the incumbent's by more than `max_ne_increase`, or in a slice with enough rows by more than "
        "`slice_max_ne_increase`. A comparison spends a share of the budget, in place of `power`. null: `power` alone.",
    )
    max_ne_fall: float | None = setting(
        None,
        low=0.0001,
        high=1.0,
        quiet=True,
        doc="Largest fall of NE below the incumbent's on the same rows, as a share. A clearly larger one is too good "
        "to be true: a feature may know the label. null: any.",
    )
    max_gauc_drop: float | None = setting(
        0.002,
        low=0.0,
        quiet=True,
        doc="Largest drop of GAUC below the incumbent's on the same rows. The model is held if the drop is larger "
        "beyond doubt, or if too few groups of `evaluate.group_by` can be ranked.",
    )
    best_of_last: int = setting(
        7,
        low=1,
        high=1000,
        doc="Number of last serving versions whose best is compared with the model; 1: the incumbent only.",
    )
    max_psi: float | None = setting(
        0.25, low=0.0, doc="Largest population stability index between the predictions of model and incumbent."
    )
    max_ne_drift: float | None = setting(
        0.1, low=0.0, doc="Largest rise of NE over the incumbent's NE when it was published, as a share."
    )
    max_label_shift: float | None = setting(
        0.25,
        low=0.0,
        doc="Largest change of the incumbent's calibration on these rows since it was published, as a share.",
    )
    min_coverage: float | None = setting(
        0.5, low=0.0, high=1.0, doc="Smallest share of lookups that trained rows serve, averaged over the features."
    )
    max_coverage_drop: float | None = setting(
        0.1, low=0.0, doc="Largest drop of a feature's coverage below the incumbent's when it was published."
    )
    max_serving_gap: float | None = setting(
        0.005, low=0.0, doc="Largest rise of NE of the model as served over the model as trained, as a share."
    )
    slices: list[str] = setting(
        factory=list,
        doc="Categorical features, or day, by whose values the rows are judged too, and sequences, by their number of "
        "events.",
    )
    slice_values: int = setting(
        10, low=1, high=1000, doc="Number of most frequent values that become slices; the others form one more."
    )
    slice_min_clicks: int = setting(100, low=1, doc="Smallest number of rows of each class in a slice that is judged.")
    slice_max_ne_increase: float | None = setting(0.02, low=0.0, doc="As `max_ne_increase`, for a slice.")
    slice_max_calibration_error: float | None = setting(0.25, low=0.0, doc="As `max_calibration_error`, for a slice.")
    confidence: float = setting(
        0.95, low=0.5, high=0.9999, doc="Confidence of the intervals; for slices, of all of them together."
    )
    replicates: int = setting(400, low=20, high=10_000, doc="Number of bootstrap replicates.")
    blocks: int = setting(1000, low=10, high=100_000, doc="Number of blocks of rows that the bootstrap draws from.")
    min_rows: int = setting(1000, low=1, doc="Smallest number of scored rows.")
    max_rows: int = setting(
        2_000_000, low=1, doc="Largest number of rows to score, spread evenly over the held-out rows."
    )
    importance_rows: int = setting(
        4096,
        low=0,
        quiet=True,
        doc="Number of rows that the importance of every feature is measured on; 0: it is not measured.",
    )

    tasks: dict[str, TaskLimits] = setting(factory=dict, quiet=True, doc="Limits of further tasks, by name.")

    def check(self, path: str) -> None:
        # Forcing the gate needs a reason.
        if self.force is not None and len(self.force.strip()) < _SHORTEST_REASON:
            raise ConfigError(
                f"{path}.force is {self.force!r}, expected a reason, in words, for publishing despite the gate",
                hint=f"{path}.force='the traffic of the new app is known to be different'",
            )
        if self.budget is not None and self.max_ne_increase is None:
            raise ConfigError(
                f"{path}.budget is {self.budget:g}, but {path}.max_ne_increase is null: no rise of NE is wrong",
                hint=f"{path}.max_ne_increase=0.002, or {path}.budget=null",
            )


def gate_settings() -> GateConfig:
    """Return the defaults of group ``gate``, with the settings that its checks bring at ``gate.<check>.<setting>``.

    Raises:
        ConfigError: A check has the name of another setting, or a setting without a declaration.
    """
    # ``_config_class`` caches the class by this hashable tuple: all configurations must have settings of one type.
    brought = []
    for check in GATE_CHECKS:
        if check.settings is not None:
            brought.append((check.name, check.settings))
    return _config_class(tuple(brought))()


@functools.cache
def _config_class(brought: tuple[tuple[str, type], ...]) -> type[GateConfig]:
    # Without such checks, use the ordinary class, so that configurations and artifact keys keep their bytes.
    if not brought:
        return GateConfig
    # A field named ``check`` would hide the method.
    taken = {each.name for each in fields(GateConfig)} | {"check"}
    groups = []
    for name, settings in brought:
        added = f"gate check {name!r} ({GATE_CHECKS.origin(name)})"
        if name in taken:
            raise ConfigError(f"{added} has the name of gate.{name}, expected another one", hint="rename the check")
        for each in fields(settings):
            if METADATA not in each.metadata:
                raise ConfigError(
                    f"{added} has a setting {each.name!r} without bounds and documentation",
                    hint=f"declare it: {each.name}: <type> = pipeline.config.fields.setting(<default>, doc=...)",
                )
        groups.append((name, settings, setting(factory=settings, doc=f"Settings of the gate check {name}.")))
    return make_dataclass("GateConfig", groups, bases=(GateConfig,), kw_only=True)
