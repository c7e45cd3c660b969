"""Features and tables of the ``data`` group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError
from pipeline.specs.id_mapping import id_mapping_docs, id_mapping_names

TRANSFORMS = ("log1p", "standardise", "log1p_standardise", "percentile", "mdl", "max_norm", "unit", "none")
PERCENTILE, MDL = "percentile", "mdl"
# Transforms that replace a number by its bin; ``bins`` of ids are cut in the same ways.
BINNINGS = (PERCENTILE, MDL)
# Transforms of single numbers only. Conversely, ``unit`` is for vectors only.
NOT_OF_VECTORS = (*BINNINGS, "max_norm")
# Kinds of values in a field of a categorical feature.
ONE, LIST, MAP = "one", "list", "map"

WHEN_FULL = ("replace", "keep")
# Row numbers are int32.
MOST_ROWS = 2**31 - 1
# Settings that a feature with a shared table takes from the table's owner.
OF_TABLES = ("mapping", "rows", "min_count", "when_full", "evict_after_days", "bins")

# A table is a submodule with its feature's name, so attributes of modules cannot be names of features.
_MODULE_ATTRIBUTES = """
    T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda double dump_patches
    eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu items keys
    load_state_dict modules mtia named_buffers named_children named_modules named_parameters parameters pop
    register_backward_hook register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
    register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule share_memory state_dict to to_empty train training type update values xpu zero_grad
"""
TAKEN_NAMES = frozenset(_MODULE_ATTRIBUTES.split())


@dataclass(kw_only=True)
class LabelConfig:
    """The label: its column, and which of its values are clicks."""

    column: str = setting("label", doc="Column with the label.")
    positive: str = setting("1", doc="Label of a click.")
    negative: str = setting("0", doc="Label of a row without a click. A row with any other label goes to quarantine.")
    window_days: int = setting(
        0,
        low=0,
        high=366,
        quiet=True,
        doc="Days in which a click may still come, in a row with the same `data.dedupe.key` or in `late_path`; it "
        "corrects the first row. 0: labels are final.",
    )
    late_path: str | None = setting(
        None,
        quiet=True,
        doc="Log of clicks that came later, in the format of the log, with {day}: each row has a `data.dedupe.key`. "
        "null: none.",
    )


@dataclass(kw_only=True)
class DenseFeature:
    """One numeric feature."""

    column: str | None = setting(None, doc="Column of the feature; null: the column of its name.")
    transform: str | None = setting(
        None,
        choices=TRANSFORMS,
        doc="Transform of the values; null: `data.dense_transform`. percentile gives the number of the bin, divided "
        "by `bins`; mdl does the same with bins that differ in their click rate. max_norm is a layer of the model: the "
        "value divided by the largest one so far, plus a trainable bias, and 0 for a missing value. unit divides a "
        "vector by its length. A vector's own default is standardise.",
    )
    clip: list[float] = setting(
        factory=list, doc="Clip values to [lowest, highest] before the transform; []: do not clip."
    )
    bins: int = setting(100, low=2, high=10_000, doc="Number of bins of transform percentile, the largest one of mdl.")
    min: float | None = setting(None, doc="Smallest valid value; a row below it goes to quarantine; null: no limit.")
    max: float | None = setting(None, doc="Largest valid value; a row above it goes to quarantine; null: no limit.")
    required: bool = setting(False, doc="Send rows without a value to quarantine.")
    width: int = setting(
        1,
        low=1,
        high=65_536,
        quiet=True,
        doc="Numbers of a value. Above 1 a value is a vector of that many numbers (float32), such as an embedding of "
        "another model: a column of lists, a JSON array, or text with `separator`. The vector is one feature with one "
        "mean and deviation, and `width` columns of the model's dense input.",
    )
    separator: str = setting(",", quiet=True, doc="Text between the numbers of a vector, where a field is text.")

    def check(self, path: str) -> None:
        # The two numbers of ``clip`` must rise; vectors and numbers have different transforms.
        wrong: tuple[str, ...] = ("unit",)
        what = "a number"
        hint = f"{path}.width=<numbers of the vector>"
        if self.width > 1:
            wrong, what = NOT_OF_VECTORS, f"a vector of {self.width} numbers"
            hint = f"{path}.transform=standardise"
        if self.transform in wrong:
            raise ConfigError(f"{path}.transform is {self.transform}, but the feature is {what}", hint=hint)
        if self.clip and (len(self.clip) != 2 or not self.clip[0] < self.clip[1]):
            raise ConfigError(f"{path}.clip is {self.clip}, expected two rising numbers", hint=f"{path}.clip=[0,1000]")


@dataclass(kw_only=True)
class SparseDefaults:
    """Defaults of the categorical features."""

    mapping: str = setting(
        "vocab", choices=id_mapping_names, doc="How ids become rows of the table.", more=id_mapping_docs
    )
    rows: int = setting(
        100_000,
        low=3,
        high=MOST_ROWS,
        doc="Largest number of rows of a table, including the reserved rows 0 (missing) and 1 (unseen or rare).",
    )
    min_count: int = setting(1, low=1, doc="Lookups after which an id gets a row of its own.")
    when_full: str = setting(
        "replace",
        choices=WHEN_FULL,
        doc="What happens to new ids when a vocab table is full. replace: they take the rows of ids that are looked "
        "up less often. keep: they get no row.",
    )
    evict_after_days: int | None = setting(
        None,
        low=1,
        doc="Days of logs without an id after which it loses its row; null: never. Needs mapping vocab and `data.day`.",
    )
    separator: str | None = setting(None, doc="Text between several ids in one field; null: a field is one id.")
    weight_separator: str | None = setting(None, doc="Text between an id and its weight; null: ids have no weights.")


@dataclass(kw_only=True)
class SparseFeature:
    """One categorical feature. A table of the same name embeds it, or that of the feature `table`."""

    column: str | None = setting(None, doc="Column of the feature; null: the column of its name.")
    mapping: str | None = setting(None, choices=id_mapping_names, doc="Overrides `data.sparse_defaults.mapping`.")
    rows: int | None = setting(None, low=3, high=MOST_ROWS, doc="Overrides `data.sparse_defaults.rows`.")
    min_count: int | None = setting(None, low=1, doc="Overrides `data.sparse_defaults.min_count`.")
    when_full: str | None = setting(None, choices=WHEN_FULL, doc="Overrides `data.sparse_defaults.when_full`.")
    evict_after_days: int | None = setting(None, low=1, doc="Overrides `data.sparse_defaults.evict_after_days`.")
    table: str | None = setting(
        None,
        quiet=True,
        doc="Feature whose ids and table this one shares; null: a table of its own. The ids of both features are "
        "counted together and have the same rows; `mapping`, `rows` and the like are those of that feature.",
    )
    holds: str | None = setting(
        None,
        quiet=True,
        choices=(ONE, LIST, MAP),
        doc="What a field holds. one: an id. list: ids, in a column of lists, a JSON array or text with `separator`. "
        "map: ids with weights, in a column of maps, a JSON object or text with `separator` and `weight_separator`. "
        "null: a list where the feature has a separator, else one.",
    )
    weights: str | None = setting(
        None,
        quiet=True,
        doc="Column with the weights of a list's ids, as many numbers as ids: a column of lists, a JSON array or text "
        "with `separator`. A missing weight is 1. null: none.",
    )
    separator: str | None = setting(None, doc="Overrides `data.sparse_defaults.separator`.")
    weight_separator: str | None = setting(None, doc="Overrides `data.sparse_defaults.weight_separator`.")
    cross: list[str] = setting(
        factory=list,
        doc="Columns whose values together are the id, instead of the value of one column. With `holds=list` or a "
        "`separator` the first one holds several values, each of which makes an id with the others.",
    )
    cross_bins: dict[str, list[Any]] = setting(
        factory=dict,
        quiet=True,
        doc="Columns of `cross` that hold numbers: the bounds, rising, between which a number's bin is taken instead "
        "of the number.",
    )
    bins: int | None = setting(
        None,
        low=2,
        high=10_000_000,
        doc="For a column of numbers: the number of percentile bins; the id is the number of the bin. null: the "
        "column holds ids.",
    )
    bins_by: str = setting(
        PERCENTILE,
        choices=BINNINGS,
        quiet=True,
        doc="How `bins` are cut. percentile: each holds as many train rows. mdl: at most `bins`, where the click rate "
        "of the train rows changes by more than chance (Fayyad and Irani 1993).",
    )
    max_ids: int | None = setting(
        None, low=1, high=10_000_000, doc="Use at most this many ids of a field, the first ones; null: all."
    )
    integer: bool = setting(False, doc="Send rows whose ids are not whole numbers to quarantine.")
    required: bool = setting(False, doc="Send rows without an id to quarantine.")

    def lists(self, separator: str | None) -> bool:
        """Whether a row has several ids; ``separator``: the default one."""
        return self.holds in (LIST, MAP) or (self.holds is None and (self.separator or separator) is not None)

    def several(self, separator: str | None) -> bool:
        """Whether a row has several ids, or one of several columns; ``separator``: the default one."""
        return self.lists(separator) or bool(self.cross) or self.weights is not None

    def check(self, path: str) -> None:
        # An id has one source: a cross, bins or a field with separators. A shared table is set up in one place.
        if self.bins is not None and (self.cross or self.separator is not None):
            raise ConfigError(
                f"{path} has more than one of cross, bins and separator, expected bins alone",
                hint=f"{path}.cross=[] {path}.separator=null, or {path}.bins=null",
            )
        self._check_cross(path)
        if self.bins is None and self.bins_by != PERCENTILE:
            raise ConfigError(
                f"{path}.bins_by is {self.bins_by}, but {path}.bins is null: there are no bins",
                hint=f"{path}.bins=100, or {path}.bins_by={PERCENTILE}",
            )
        self._check_field(path)
        if self.table is None:
            return
        own = [name for name in OF_TABLES if getattr(self, name) is not None]
        if own:
            unset = " ".join(f"{path}.{name}=null" for name in own)
            raise ConfigError(
                f"{path} shares the table of {self.table} and sets {' and '.join(own)}, expected them there",
                hint=f"{unset}, or {path}.table=null",
            )

    def _check_cross(self, path: str) -> None:
        # Bounds must rise and belong to numbers of the cross; the first column of a cross with several values holds
        # ids.
        if self.cross and len(self.cross) < 2 and (self.cross_bins or self.holds or self.separator):
            raise ConfigError(
                f"{path}.cross is {self.cross}, expected at least two columns", hint=f"{path}.column={self.cross[0]}"
            )
        several = self.cross[:1] if self.separator is not None or self.holds in (LIST, MAP) else []
        for column, bounds in self.cross_bins.items():
            known = [name for name in self.cross if name not in several]
            if column not in known:
                raise ConfigError(
                    f"{path}.cross_bins names {column!r}, expected columns of {path}.cross that hold one number: "
                    f"{', '.join(known) or 'there are none'}",
                    hint=f"~{path}.cross_bins.{column}",
                )
            numbers = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in bounds)
            if not numbers or not bounds or sorted(set(bounds)) != bounds:
                better = [0, 10, 100]
                if numbers and bounds:
                    better = sorted(set(bounds))
                raise ConfigError(
                    f"{path}.cross_bins.{column} is {bounds}, expected rising numbers",
                    hint=f"{path}.cross_bins.{column}={better}".replace(" ", ""),
                )

    def _check_field(self, path: str) -> None:
        # What a field holds must fit the feature's other settings.
        if self.holds in (LIST, MAP) and self.bins is not None:
            raise ConfigError(
                f"{path}.holds is {self.holds}, but the feature has bins, expected one of them",
                hint=f"{path}.holds=null",
            )
        if self.holds == ONE and self.separator is not None:
            raise ConfigError(
                f"{path} has a separator, and {path}.holds is {ONE}, expected one of them", hint=f"{path}.holds={LIST}"
            )
        one = self.holds is None and self.cross and self.separator is None
        if self.weights is not None and (self.holds in (ONE, MAP) or one or self.bins is not None):
            raise ConfigError(
                f"{path}.weights is {self.weights}, but the feature is no list of ids, expected one",
                hint=f"{path}.holds={LIST}, or {path}.weights=null",
            )
        if self.weights is not None and self.weight_separator is not None:
            raise ConfigError(
                f"{path} has weights in a column and a weight_separator, expected one of them",
                hint=f"{path}.weights=null, or {path}.weight_separator=null",
            )


@dataclass(kw_only=True)
class TableDefaults:
    """Defaults of the tables of ``data.tables``."""

    pooling: float = setting(1.0, low=0.0, doc="Mean number of rows that a sample looks up.")
    zipf: float = setting(
        1.05,
        low=0.0,
        high=10.0,
        doc="Exponent of Zipf's law, which the frequencies of the rows follow; 0: all rows are equally frequent.",
    )


@dataclass(kw_only=True)
class TableFigures:
    """A table of ``data.format=tables``, described by its figures, without logs."""

    rows: int = setting(MISSING, low=1, high=MOST_ROWS, doc="Number of rows of the table.")
    pooling: float | None = setting(None, low=0.0, high=1e6, doc="Overrides `data.table_defaults.pooling`.")
    zipf: float | None = setting(None, low=0.0, high=10.0, doc="Overrides `data.table_defaults.zipf`.")
    hot_rows: list[int] = setting(
        factory=list, doc="Measured hit curve instead of `zipf`: rising numbers of hottest rows."
    )
    hot_share: list[float] = setting(
        factory=list, doc="Share of the lookups that each number in `hot_rows` serves; the shares rise to 1."
    )
    weighted: bool = setting(False, doc="Whether lookups have weights.")

    def check(self, path: str) -> None:
        # A hit curve must rise to 1, and excludes ``zipf``.
        rows, shares = self.hot_rows, self.hot_share
        rising = rows == sorted(set(rows)) and shares == sorted(shares)
        inside = all(1 <= k <= self.rows for k in rows) and all(0.0 < share <= 1.0 for share in shares)
        ended = not rows or rows[-1] < self.rows or shares[-1:] == [1.0]
        if len(rows) != len(shares) or not rising or not inside or not ended:
            raise ConfigError(
                f"{path} has hot_rows {rows} and hot_share {shares}, expected lists of equal length, rows rising "
                f"within 1 to {self.rows}, and shares rising to 1 for all {self.rows} rows",
                hint=f"{path}.hot_rows=[{max(self.rows // 10, 1)},{self.rows}] {path}.hot_share=[0.8,1.0]",
            )
        if rows and self.zipf is not None:
            raise ConfigError(f"{path} has both zipf and a hit curve, expected only one", hint=f"{path}.zipf=null")
