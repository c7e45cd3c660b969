"""The search space of a configuration: the decisions of all parts, what a choice of them costs, and the model it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.planning.bipartite import predict_any
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.planner import make_plan
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan
from pipeline.records.search import Price
from pipeline.specs import SEARCH_PARTS
from pipeline.specs.search_part import Decision, SearchPart

BACKBONE = "dlrm"


@dataclass(frozen=True)
class ArchitectureSpace:
    """The decisions about ``config``, by part, for a dataset with this ``schema`` and ``profile``."""

    config: Config
    schema: DatasetSchema
    profile: Profile
    parts: tuple[tuple[SearchPart, tuple[Decision, ...]], ...]

    @classmethod
    def of(cls, config: Config, schema: DatasetSchema, profile: Profile) -> ArchitectureSpace:
        """Make the space of ``search.parts``; ConfigError for a model without a super-net, or without decisions."""
        # Each of these models would need its own super-net, so the search refuses before it reads a row.
        if config.model.name != BACKBONE:
            raise ConfigError(
                f"model is {config.model.name}, but the search has a super-net of {BACKBONE} alone",
                hint=f"model={BACKBONE}",
            )
        if config.partition.name != "flat":
            raise ConfigError(
                f"partition is {config.partition.name}, but the search has no super-net with towers",
                hint="partition=flat",
            )
        for name in ("tasks", "sequences"):
            if getattr(config.data, name):
                raise ConfigError(
                    f"data.{name} has {', '.join(getattr(config.data, name))}, which the search has no super-net for",
                    hint=f"data.{name}={{}}",
                )
        parts = []
        for name in config.search.parts:
            part = SEARCH_PARTS.get(name)
            parts.append((part, tuple(part.decisions(config, schema))))
        space = cls(config, schema, profile, tuple(parts))
        if not space.decisions:
            raise ConfigError(
                f"there is nothing to decide: search.parts is {config.search.parts}, and the configured model has the "
                "least of each",
                hint="model.embedding_dim=16 model.top_mlp=[256,128]: the model to begin with is the largest one",
            )
        return space

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of all parts."""
        every: list[Decision] = []
        for _, decisions in self.parts:
            every.extend(decisions)
        return tuple(every)

    @property
    def original(self) -> dict[str, Any]:
        """The choices that reproduce the configuration itself."""
        return {decision.name: decision.choices[0] for decision in self.decisions}

    def configured(self, chosen: Mapping[str, Any]) -> Config:
        """Return the configuration with the ``chosen`` values."""
        config = self.config
        for part, decisions in self.parts:
            # A part gets only its own decisions, because it knows no other part by name.
            own = {decision.name: chosen[decision.name] for decision in decisions}
            config = part.apply(config, own)
        return config

    def price(self, chosen: Mapping[str, Any]) -> Price:
        """Return the price of these choices, with each table where the original plan has it.

        With a plan of its own for each choice, the planner would run once for each, and the difference of two prices
        would also include the tables that moved between the two plans.
        """
        inputs = PlanInputs.of(self.configured(chosen), self.schema, self.profile)
        plan = _widened(self.plan, inputs)
        return _price_of(plan, predict_any(plan, inputs).step_ms)

    @cached_property
    def plan(self) -> Plan:
        """Plan the configuration itself."""
        return make_plan(PlanInputs.of(self.config, self.schema, self.profile))

    def planned(self, chosen: Mapping[str, Any]) -> Price:
        """Return the price of these choices with their own plan."""
        plan = make_plan(PlanInputs.of(self.configured(chosen), self.schema, self.profile))
        return _price_of(plan, plan.predicted_step_ms)


def _price_of(plan: Plan, step_ms: float) -> Price:
    """Return the bytes of rows and optimizer state by the tier that a plan gives each table."""
    tiers: dict[str, int] = {}
    for table in plan.tables.values():
        tiers[table.tier] = tiers.get(table.tier, 0) + table.bytes
    return Price(step_ms=step_ms, bytes=tiers)


def _widened(plan: Plan, inputs: PlanInputs) -> Plan:
    """Return ``plan`` with the widths of ``inputs``: every shard keeps its rows, rank and share of the columns."""
    tables = dict(plan.tables)
    for name, table in plan.tables.items():
        dim = inputs.model.dim_of(name)
        if dim == table.dim:
            continue
        shards = []
        for shard in table.shards:
            # Round both ends in the same way, so that the shards of a row neither overlap nor leave a gap.
            start = shard.column * dim // table.dim
            columns = (shard.column + shard.columns) * dim // table.dim - start
            # A narrow table may have fewer columns than it had shards.
            if columns:
                shards.append(replace(shard, column=start, columns=columns))
        tables[name] = replace(table, dim=dim, shards=tuple(shards))
    return replace(plan, tables=tables)
