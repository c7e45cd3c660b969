"""Settings of synthetic logs, ``data.synthetic`` of the ``data`` group."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting


@dataclass(kw_only=True)
class SyntheticConfig:
    """Criteo-shaped logs with a known logistic truth, used when ``data.format=synthetic``.

    Effects are standard deviations of the log odds they add. With ``data.day`` the log is that day's alone.
    """

    rows: int = setting(1_000_000, low=1, doc="The log has this many rows; with `data.day`, the day has.")
    days: int = setting(4, low=1, doc="The log covers this many days; not used with `data.day`.")
    ids_per_feature: int = setting(
        1_000, low=2, doc="The largest categorical feature has this many ids; the smallest one has 10."
    )
    zipf: float = setting(1.2, low=0.0, doc="The frequencies of the ids follow Zipf's law with this exponent.")
    base_rate: float = setting(0.25, low=0.001, high=0.999, doc="This share of the rows are clicks.")
    dense_effect: float = setting(0.9, low=0.0, doc="All numeric features together have this effect.")
    first_order_effect: float = setting(1.3, low=0.0, doc="All ids together have this effect, each by itself.")
    pairwise_effect: float = setting(0.4, low=0.0, doc="All interacting pairs of features together have this effect.")
    pairs: int = setting(
        4, low=0, high=325, doc="This many pairs of categorical features interact; not used with `blocks`."
    )
    quads: int = setting(
        0, low=0, high=3, quiet=True,
        doc="In this many groups of four categorical features, the effects of the four ids multiply.",
    )  # fmt: skip
    quad_effect: float = setting(
        1.0, low=0.0, quiet=True, doc="All groups of four features (`quads`) together have this effect."
    )
    latent_dim: int = setting(2, low=1, high=1024, doc="The hidden vectors whose products interact have this width.")
    drift: float = setting(0.0, low=0.0, doc="Every day, the effects rotate by this angle, in radians.")
    blocks: int = setting(
        0,
        low=0,
        high=13,
        doc="The categorical features form this many groups: every pair within a group interacts, none across groups; "
        "0: `pairs` pairs interact.",
    )
    first_day: str = setting("2026-01-01", doc="With `data.day`, the log begins on this day, YYYY-MM-DD.")
    new_ids: float = setting(
        0.0, low=0.0, high=1.0, doc="With `data.day`, new ids replace this share of a feature's ids every day."
    )
    popularity_drift: float = setting(
        0.0,
        low=0.0,
        high=1.0,
        doc="With `data.day`, this share of a feature's ids changes places in popularity every day.",
    )
    id_groups: int = setting(
        0,
        low=0,
        doc="The ids of a feature form this many groups, and the ids of a group have the same effects; 0: no groups.",
    )
    hourly: bool = setting(False, doc="The effects rotate every hour instead of every day, by `drift` in a day.")
