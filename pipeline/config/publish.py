"""The ``publish`` group: what is published and under which name, and the calibrator that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import check_name, setting
from pipeline.core.errors import ConfigError
from pipeline.core.registry import with_options
from pipeline.specs.calibrator import CALIBRATORS, Calibrator, calibrator_docs


@dataclass(kw_only=True)
class CalibratorOptions:
    """Options of the calibrator; null: its own default."""

    min_clicks: int | None = setting(
        None, low=1, doc="Of isotonic: rows of each class in a block of rows with one click rate; null: 50."
    )
    bins: int | None = setting(None, low=1, high=10_000, doc="Of histogram: number of bins; null: 20.")


@dataclass(kw_only=True)
class CalibratorConfig:
    """A curve from the model's logit to a calibrated one, fitted on held-out rows that the gate does not judge."""

    method: str | None = setting(
        None, choices=CALIBRATORS.names, doc="How the curve is fitted; null: no calibrator.", more=calibrator_docs
    )
    share: float = setting(
        0.5,
        low=0.01,
        high=0.99,
        doc="Share of the held-out rows that the curve is fitted on; the gate judges the others. They are chosen by a "
        "hash of their number; with `data.split.by=hours` they are those of the first test hours.",
    )
    slices: str | None = setting(
        None,
        doc="Categorical feature whose values each shift the curve, as far as their rows tell; null: one curve for all "
        "rows.",
    )
    slice_values: int = setting(
        1000, low=1, high=1_000_000, doc="Number of most frequent values with a shift of their own."
    )
    options: CalibratorOptions = setting(factory=CalibratorOptions, doc="Options of the calibrator.")

    @property
    def spec(self) -> Calibrator | None:
        """The calibrator with its options; None without one. ConfigError for an option that it lacks."""
        if self.method is None:
            return None
        return with_options(CALIBRATORS, self.method, self.options, "publish.calibrator.options")

    def check(self, path: str) -> None:
        # Without a method there is nothing to set. With one, ``spec`` raises if the calibrator lacks an option.
        if self.method is None and self != CalibratorConfig():
            raise ConfigError(
                f"{path} is set, but {path}.method is null: there is no calibrator",
                hint=f"{path}.method={CALIBRATORS.names()[0]}",
            )
        _ = self.spec


@dataclass(kw_only=True)
class PublishConfig:
    """What is published."""

    model: str | None = setting(None, doc="Name of the model under `<store>/models`; null: `data.name`.")
    quantise: str = setting(
        "8", choices=("8", "4", "fp16", "fp32"), doc="Bits per weight of the published tables, or a float type."
    )
    judge_beside: str | None = setting(
        None,
        quiet=True,
        doc="Version beside which the model is judged in place of the one that serves; it is then judged only, never "
        "promoted. null: judge beside the serving version, and publish what passes.",
    )
    cache_mib: float = setting(
        1024.0, low=0.0, doc="Memory for rows of tables while the gate scores a version, in MiB."
    )
    calibrator: CalibratorConfig = setting(
        factory=CalibratorConfig, quiet=True, doc="Calibration of the published model's predictions."
    )

    def check(self, path: str) -> None:
        # The name must be valid for a directory.
        if self.model is not None:
            check_name(f"{path}.model", self.model, "clicks")
