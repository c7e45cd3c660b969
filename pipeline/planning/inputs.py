"""The inputs of a plan: the settings it depends on, and the dataset's schema and profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.config.hardware import OF_EMBEDDING_HOSTS, HardwareConfig
from pipeline.config.ingest import IngestConfig
from pipeline.config.model import ModelConfig
from pipeline.config.plan import PlanConfig
from pipeline.config.train import TrainConfig
from pipeline.planning.cost import EventLengths
from pipeline.records.dataset import DatasetSchema, Profile


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The groups of the configuration that a plan depends on, and the dataset.

    ``beyond``: bytes by purpose that a rank reserves besides, for the modules and exchanges of towers.
    """

    data: DataConfig
    ingest: IngestConfig
    model: ModelConfig
    hardware: HardwareConfig
    train: TrainConfig
    plan: PlanConfig
    schema: DatasetSchema
    profile: Profile
    beyond: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(config: Config, schema: DatasetSchema, profile: Profile) -> PlanInputs:
        return PlanInputs(
            data=config.data,
            ingest=config.ingest,
            model=config.model,
            hardware=config.hardware,
            train=config.train,
            plan=config.plan,
            schema=schema,
            profile=profile,
        )

    @property
    def world_size(self) -> int:
        return self.hardware.world_size

    @property
    def batch(self) -> int:
        """The samples of a step on all ranks."""
        return self.train.batch

    @property
    def events(self) -> EventLengths:
        """The lengths of sequences, and how many events a block takes at once."""
        return EventLengths(self.profile.sequences or {}, self.train.max_events)

    def changed(self, path: str, value: object) -> PlanInputs:
        """Copy the inputs with the setting at dotted ``path`` changed."""
        inputs: PlanInputs = _changed(self, path.split("."), value)
        if path == "hardware.hosts" and self.hardware.only_tables:
            # On a table side all hosts are embedding hosts.
            inputs = _changed(inputs, ["hardware", "embedding_hosts"], value)
        return inputs


def table_side(inputs: PlanInputs) -> PlanInputs:
    """Return the embedding hosts of a bipartite cluster as a separate cluster; ``inputs`` themselves for any other."""
    hardware = inputs.hardware
    if not hardware.embedding_hosts or hardware.only_tables:
        return inputs
    figures = {}
    for name in OF_EMBEDDING_HOSTS:
        value = getattr(hardware, f"embedding_{name}")
        if value is not None:
            figures[name] = value
    hosts = hardware.embedding_hosts
    return replace(inputs, hardware=replace(hardware, device="cpu", hosts=hosts, hbm_gib=0.0, **figures))


def worker_side(inputs: PlanInputs) -> PlanInputs:
    """Return the workers of a bipartite cluster as a separate cluster."""
    hosts = inputs.hardware.hosts - inputs.hardware.embedding_hosts
    return replace(inputs, hardware=replace(inputs.hardware, hosts=hosts, embedding_hosts=0, ssd_gib=0.0))


def _changed(node: Any, path: list[str], value: object) -> Any:
    if not path:
        return value
    name, *rest = path
    if isinstance(node, Mapping):
        return {**node, name: _changed(node[name], rest, value)}
    assert is_dataclass(node) and not isinstance(node, type)
    return replace(node, **{name: _changed(getattr(node, name), rest, value)})
