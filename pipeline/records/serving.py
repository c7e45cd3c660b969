"""``serving.json``: what a reader of a published version must know of its files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from pipeline.records.dataset import DatasetSchema
from pipeline.records.record import Record, absent
from pipeline.records.towers import Towers

SERVING, DENSE, WEIGHTS = "serving.json", "dense.json", "dense.safetensors"


@dataclass(frozen=True, kw_only=True)
class TableLayout(Record):
    """``file`` holds ``rows`` records of ``record_bytes``. ``coding``: 8 | 4 | fp16 | fp32.

    ``units``: of each ``block_rows`` rows the power of two that their low and span are relative to.
    """

    file: str
    rows: int
    dim: int
    coding: str
    record_bytes: int
    block_rows: int
    units: list[float] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return self.rows * self.record_bytes


@dataclass(frozen=True, kw_only=True)
class DenseRecord(Record):
    """What ``dense.safetensors`` holds the weights of: ``schema`` and ``towers`` of the training, and for each member
    of an ensemble what its logits count. The settings are in ``config.yaml`` beside it. ``probe``: logits of a few
    made-up rows, by which a reader sees whether its code computes the same.
    """

    FILE: ClassVar[str] = DENSE
    KIND: ClassVar[str] = "record of a dense part"
    REMEDY: ClassVar[str] = "publish it again"

    schema: DatasetSchema
    towers: Towers
    shares: tuple[float, ...] = (1.0,)
    probe: tuple[float, ...] = absent(())


@dataclass(frozen=True, kw_only=True)
class Description(Record):
    """Names of the dense features, the sparse ones in order (multi-valued or not), tables by name.

    ``shared``: the table of each feature that has none of its own name; ``mean``: the tables of which the rows of a
    sample are averaged, those of the others are added up. ``even``: all tables are ``dim`` wide, and the program takes
    embeddings [b, F, dim]; else it takes them side by side, [b, sum of widths].
    ``model``, ``package``: where an installed package adds the ranking model, its name and the package's with version.
    ``calibrator``: the file with the curves from the program's logits to calibrated ones, if there is one.
    ``tasks``: kinds of the labels of tasks besides the main one, in the order of the program's columns.
    ``sequences``: their columns; the program takes for each, behind the embeddings, those of its events' columns side
    by side, [n, sum of widths], sample by sample, and the sample of each event, [n] int64.
    ``members``: of an ensemble; a row of a table then has the rows of all of them, and all widths are those together.
    ``weights``: the file of the weights from which the dense part is built; absent where the program is all there is,
    as in versions of earlier releases.
    """

    FILE: ClassVar[str] = SERVING
    KIND: ClassVar[str] = "description of a model"
    VERSION: ClassVar[str] = "nightjar-model-1"
    REMEDY: ClassVar[str] = "publish it again"

    format: str = VERSION
    dense: tuple[str, ...]
    sparse: dict[str, bool]
    dim: int
    tables: dict[str, TableLayout]
    model: str = absent("")
    package: str = absent("")
    shared: dict[str, str] | None = absent(None)
    mean: tuple[str, ...] = absent(())
    even: bool = absent(True)
    tasks: dict[str, str] | None = absent()
    calibrator: str | None = absent()
    sequences: dict[str, tuple[str, ...]] | None = absent()
    members: int = absent(1)
    weights: str = absent("")

    @staticmethod
    def of(schema: DatasetSchema, dim: int, tables: dict[str, TableLayout], mean: tuple[str, ...] = ()) -> Description:
        """Return the description of a model of the dataset ``schema``."""
        # Parts that the dataset does not have are None and left out of the file, so that readers of earlier releases
        # see only what they know.
        return Description(
            dense=schema.dense,
            sparse={column.name: column.multi for column in schema.sparse},
            dim=dim,
            tables=tables,
            shared={c.name: c.table for c in schema.id_columns if c.table} or None,
            mean=mean,
            even=all(tables[column.owner].dim == dim for column in schema.sparse),
            sequences={each.name: tuple(c.name for c in each.columns) for each in schema.sequences} or None,
            tasks={task.name: task.kind for task in schema.tasks} or None,
        )

    def table_of(self, feature: str) -> str:
        """Return the name of the table that embeds ``feature``."""
        return (self.shared or {}).get(feature, feature)

    @property
    def event_columns(self) -> tuple[str, ...]:
        """The columns of all sequences."""
        return tuple(name for columns in (self.sequences or {}).values() for name in columns)

    def built_by(self, model: str, package: str) -> Description:
        """Return the description with the ranking model's name and package; unchanged if ``package`` is empty."""
        # Do not name a built-in model here: the settings in the same folder say which one it is.
        if not package:
            return self
        return replace(self, model=model, package=package)
