"""A rank of ``benchmarks.towers``: trains the model flat, with pass-through towers or compressed, as it is told.

Every variant is the product's own ``StepExecutor``: flat ones run TorchRec's DistributedModelParallel in its
TrainPipelineSparseDist, towers the tower pipeline; the same ids, precision, optimizers and quantised exchange.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import serve, silent
from benchmarks.models_and_rows import ZipfIds, batches, config_of, plan_with, schema_of, table_plan
from pipeline.config import Config, PartitionConfig
from pipeline.records import DatasetSchema, Plan, ShardPlan, Towers
from pipeline.towers.assignment import towers_of
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.step import StepExecutor

KEPT = 4  # batches of a rank, drawn once and used over and over: drawing costs nothing under the clock


class _Variants:
    """One trainer a variant; the first question builds them, every other one trains."""

    def __init__(self) -> None:
        self.trainers: dict[str, StepExecutor] = {}
        self.batches: dict[str, Iterator[Batch]] = {}

    def __call__(self, **asked: Any) -> dict[str, Any]:
        return self.train(**asked) if self.trainers else self.build(**asked)

    def build(
        self,
        hosts: int,
        ranks_per_host: int,
        tables: int,
        rows: int,
        dim: int,
        batch: int,
        mlp: list[int],
        exchange: str,
        variants: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """``variants``: {name: sharding of a flat model, or the tower module and its sizes}; ``batch``: of a rank."""
        base = config_of(dim, batch * hosts * ranks_per_host, ranks_per_host, threads=1)
        base.hardware.hosts = hosts
        base.model = replace(base.model, bottom_mlp=mlp, top_mlp=mlp)
        schema = schema_of(tables, rows)
        device = connect(base.hardware, base.train.threads_per_rank)
        drawn = list(itertools.islice(batches(schema, batch, dist.get_rank(), ZipfIds(rows, 1.05)), KEPT))
        dense = {}
        for name, variant in variants.items():
            self.trainers[name] = _trainer(base, schema, device, exchange, **variant)
            self.batches[name] = itertools.cycle(drawn)
            dense[name] = sum(parameter.nbytes for parameter in self.trainers[name].dense.values())
        return {"dense_bytes": dense}

    def train(self, variant: str, steps: int) -> dict[str, Any]:
        """``steps`` steps between two barriers: ms and processor ms a step, bytes sent by class of link in all."""
        trainer = self.trainers[variant]
        trainer.links.take()
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(steps):
            trainer.step(self.batches[variant])
        dist.barrier()
        return {
            "step_ms": 1000 * (time.perf_counter() - began) / steps,
            "cpu_ms": 1000 * (time.process_time() - spent) / steps,
            "sent": trainer.links.take().as_list(),
        }


def _trainer(
    base: Config, schema: DatasetSchema, device: torch.device, exchange: str, sharding: str = "", **module: Any
) -> StepExecutor:
    if sharding:
        config, towers = replace(base, partition=PartitionConfig(exchange=exchange)), None
    else:
        config = replace(base, partition=PartitionConfig(name="dmt", exchange=exchange, **module))
        names, hosts = [column.name for column in schema.sparse], config.hardware.hosts
        cuts = [len(names) * host // hosts for host in range(hosts + 1)]
        assigned = [names[low:high] for low, high in itertools.pairwise(cuts)]
        towers = towers_of(config.partition, config.model.embedding_dim, hosts, assigned, names)
    plan = plan_of(schema, config, sharding or "table_wise", towers)
    return StepExecutor(select_model_settings(config), schema, plan, device, towers)


def plan_of(schema: DatasetSchema, config: Config, sharding: str, towers: Towers | None) -> Plan:
    """Neighbouring tables on the same rank, so that nothing has to be put in order, or all cut into blocks of rows.

    With ``towers`` on their hosts' ranks, without on all.
    """
    local, dim, world = config.hardware.ranks_per_host, config.model.embedding_dim, config.world_size
    rows = {column.name: column.rows for column in schema.sparse}
    sites = [(tuple(rows), range(world))]
    if towers is not None:
        sites = [(t.features, range(t.hosts[0] * local, (t.hosts[-1] + 1) * local)) for t in towers.towers]
    tables = {}
    for names, ranks in sites:
        for index, name in enumerate(names):
            cuts = [(ranks[index * len(ranks) // len(names)], 0, rows[name])]
            if sharding == "row_wise":
                block = -(-rows[name] // len(ranks))
                cuts = [(rank, i * block, min(block, rows[name] - i * block)) for i, rank in enumerate(ranks)]
            shards = [ShardPlan(rank=rank, row=row, rows=count, column=0, columns=dim) for rank, row, count in cuts]
            tables[name] = table_plan(rows[name], dim, *shards, sharding=sharding)
    return plan_with(tables, world, local, config.train.global_batch)


if __name__ == "__main__":
    silent()
    serve(_Variants())
    dist.destroy_process_group()
