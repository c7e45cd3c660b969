"""A small dataset's schema and space for tests of the search."""

from pipeline.config import Config, HardwareConfig, SearchConfig, TrainConfig
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, SparseColumn

SCHEMA = DatasetSchema(
    dense=("x",),
    sparse=tuple(SparseColumn(name=name, rows=rows) for name, rows in (("a", 10), ("b", 20), ("c", 30))),
    rows={"train": 1000},
    files={},
    groups={},
)


def config(**search: object) -> Config:
    """A DLRM with tables of width 8."""
    return Config(
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[32, 16]),
        hardware=HardwareConfig(name="test"),
        train=TrainConfig(global_batch=64, lr=0.01, sparse_lr=0.1),
        search=SearchConfig(**search),  # type: ignore[arg-type]
    )
