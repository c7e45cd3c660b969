"""Settings of synthetic logs, ``data.synthetic`` of the ``data`` group."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError

SECONDS_PER_DAY = 86_400


@dataclass(kw_only=True)
class SyntheticConfig:
    """Criteo-like logs with known click probabilities, for ``data.format=synthetic``.

    Effects are standard deviations of the log odds they add. With ``data.day``, the log is of that day only.
    """

    rows: int = setting(1_000_000, low=1, doc="Rows of the log; with `data.day`, rows per day.")
    days: int = setting(4, low=1, doc="Days that the log covers; ignored with `data.day`.")
    ids_per_feature: int = setting(1_000, low=2, doc="Ids of the largest categorical feature; the smallest has 10.")
    zipf: float = setting(1.2, low=0.0, doc="Exponent of Zipf's law, which the frequencies of the ids follow.")
    base_rate: float = setting(0.25, low=0.001, high=0.999, doc="Share of rows that are clicks.")
    dense_effect: float = setting(0.9, low=0.0, doc="Effect of all numeric features together.")
    first_order_effect: float = setting(1.3, low=0.0, doc="Effect of all ids together, each by itself.")
    pairwise_effect: float = setting(0.4, low=0.0, doc="Effect of all interacting pairs of features together.")
    pairs: int = setting(
        4, low=0, high=325, doc="Number of interacting pairs of categorical features; ignored with `blocks`."
    )
    quads: int = setting(
        0,
        low=0,
        high=3,
        quiet=True,
        doc="Groups of four categorical features in which the effects of the ids multiply.",
    )
    quad_effect: float = setting(
        1.0, low=0.0, quiet=True, doc="Effect of all groups of four features (`quads`) together."
    )
    conversion_rate: float = setting(
        0.0,
        low=0.0,
        high=0.999,
        quiet=True,
        doc="Share of clicks that convert: column `conversion` of the log, which only clicks can have; 0: no column.",
    )
    conversion_effect: float = setting(
        1.0, low=0.0, quiet=True, doc="Effect of all ids together on whether a click converts."
    )
    conversion_overlap: float = setting(
        0.5, low=0.0, high=1.0, quiet=True, doc="Correlation of an id's effects on conversion and on clicks."
    )
    conversion_missing: float = setting(
        0.0, low=0.0, high=0.99, quiet=True, doc="Share of rows whose `conversion` is missing."
    )
    latent_dim: int = setting(2, low=1, high=1024, doc="Width of the hidden vectors whose products interact.")
    drift: float = setting(0.0, low=0.0, doc="Angle by which the effects rotate every day, in radians.")
    blocks: int = setting(
        0,
        low=0,
        high=13,
        doc="Number of groups of categorical features in which every pair interacts, and none across groups; 0: "
        "`pairs` pairs interact.",
    )
    first_day: str = setting("2026-01-01", doc="With `data.day`, the first day of the log, YYYY-MM-DD.")
    new_ids: float = setting(
        0.0, low=0.0, high=1.0, doc="With `data.day`, the share of a feature's ids that new ids replace every day."
    )
    popularity_drift: float = setting(
        0.0, low=0.0, high=1.0, doc="With `data.day`, the share of a feature's ids that swap popularity every day."
    )
    id_groups: int = setting(
        0, low=0, doc="Number of groups of a feature's ids; the ids of a group have the same effects; 0: no groups."
    )
    hourly: bool = setting(False, doc="Rotate the effects every hour instead of every day, by `drift` per day.")
    users: int = setting(
        0,
        low=0,
        quiet=True,
        doc="Users of a log with columns user, item and category instead of Criteo's, in which a click depends on the "
        "last item of the same category that the user saw; 0: a Criteo-like log.",
    )
    categories: int = setting(
        20, low=1, quiet=True, doc="With `users`, categories of items; there are `ids_per_feature` items in all."
    )
    interests: int = setting(2, low=1, quiet=True, doc="With `users`, categories whose items a user sees.")
    history_effect: float = setting(
        1.5, low=0.0, quiet=True, doc="With `users`, the effect of the last item of the same category."
    )

    def check(self, path: str) -> None:
        # A user sees at most one row a second, and only categories that exist.
        if not self.users:
            return
        if self.interests > self.categories:
            raise ConfigError(
                f"{path}.interests is {self.interests}, expected at most {path}.categories={self.categories}",
                hint=f"{path}.interests={self.categories}",
            )
        if self.rows > self.users * SECONDS_PER_DAY:
            raise ConfigError(
                f"{path}.rows is {self.rows:,} for {self.users:,} users, expected at most a row a second for each",
                hint=f"{path}.users={-(-self.rows // SECONDS_PER_DAY)}",
            )
        if self.conversion_rate:
            raise ConfigError(
                f"{path}.conversion_rate is {self.conversion_rate:g}, but a log of {path}.users has no conversions",
                hint=f"{path}.conversion_rate=0",
            )
