"""A rank of ``benchmarks.towers``: trains the model flat, with pass-through towers or compressed, as it is told.

Every variant is the product's own ``StepExecutor``: flat ones run TorchRec's DistributedModelParallel in its
TrainPipelineSparseDist, towers the tower pipeline; the same ids, precision, optimizers and quantised exchange.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_model import ZipfIds, batches, config_of, schema_of
from benchmarks.network.ranks import serve
from pipeline.config import Config, PartitionConfig
from pipeline.records import DatasetSchema, Plan, ShardPlan, TablePlan, Towers
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
        config = replace(base, partition=PartitionConfig(exchange=exchange))
        settings = select_model_settings(config)
    return StepExecutor(settings, schema, plan_of(schema, config, sharding), device)
    config = replace(base, partition=PartitionConfig(name="dmt", exchange=exchange, **module))
    names, hosts = [column.name for column in schema.sparse], config.hardware.hosts
    cuts = [len(names) * host // hosts for host in range(hosts + 1)]
    assigned = [names[low:high] for low, high in itertools.pairwise(cuts)]
    towers = towers_of(config.partition, config.model.embedding_dim, hosts, assigned, names)
    return StepExecutor(
        select_model_settings(config), schema, plan_of(schema, config, "table_wise", towers), device, towers
    )


def plan_of(schema: DatasetSchema, config: Config, sharding: str, towers: Towers | None = None) -> Plan:
    """Neighbouring tables on the same rank, so that nothing has to be put in order, or all cut into blocks of rows.

    With ``towers`` on their hosts' ranks, without on all.
    """
    hardware, dim, world = config.hardware, config.model.embedding_dim, config.world_size
    rows = {column.name: column.rows for column in schema.sparse}
    sites = [(tuple(rows), range(world))]
    if towers is not None:
        local = hardware.ranks_per_host
        sites = [(t.features, range(t.hosts[0] * local, (t.hosts[-1] + 1) * local)) for t in towers.towers]
    tables = {}
    for names, ranks in sites:
        for index, name in enumerate(names):
            home, block = ranks[index * len(ranks) // len(names)], -(-rows[name] // len(ranks))
            cuts = [(home, 0, rows[name])]
            if sharding == "row_wise":
                cuts = [(rank, i * block, min(block, rows[name] - i * block)) for i, rank in enumerate(ranks)]
            tables[name] = TablePlan(
                rows=rows[name],
                dim=dim,
                pooling=1.0,
                tier="ddr",
                sharding=sharding,
                kernel="fused",
                cost_ms=0.0,
                shards=tuple(ShardPlan(rank=r, row=row, rows=n, column=0, columns=dim) for r, row, n in cuts),
                reason="",
            )
    return Plan(
        hardware="bench",
        device="cpu",
        world_size=world,
        ranks_per_host=hardware.ranks_per_host,
        global_batch=config.train.global_batch,
        tables=tables,
    )


def main() -> None:
    """Answer the parent until it hangs up."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    serve(_Variants())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
