"""A rank of ``benchmarks.towers``: trains the model flat, with pass-through towers or compressed, as it is told.

Every variant is the product's own ``Trainer``: flat ones run TorchRec's DistributedModelParallel in its
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
from pipeline.contracts import DatasetSchema, Plan, ShardPlan, TablePlan, Towers
from pipeline.towers.settings import towers_of
from pipeline.towers.strided import strided
from pipeline.training import Batch, Trainer
from pipeline.training.distributed import connect

KEPT = 4  # batches of a rank, drawn once and used over and over: drawing costs nothing under the clock


class _Variants:
    """One trainer a variant; the first question builds them, every other one trains."""

    def __init__(self) -> None:
        self.trainers: dict[str, Trainer] = {}
        self.batches: dict[str, Iterator[Batch]] = {}

    def __call__(self, **asked: Any) -> dict[str, Any]:
        return self.train(**asked) if self.trainers else self.build(**asked)

    def build(
        self, hosts: int, ranks_per_host: int, tables: int, rows: int, dim: int, batch: int, mlp: list[int],
        exchange: str, variants: dict[str, dict[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """``variants``: {name: sharding of a flat model, or the tower module and its sizes}; ``batch``: of a rank."""
        base = config_of(dim, batch * hosts * ranks_per_host, ranks_per_host, threads=1)
        base.hardware.hosts = hosts
        base.model = replace(base.model, bottom_mlp=mlp, top_mlp=mlp)
        schema = schema_of(tables, rows)
        device = connect(base)
        drawn = list(itertools.islice(batches(schema, batch, dist.get_rank(), ZipfIds(rows, 1.05)), KEPT))
        dense = {}
        for name, variant in variants.items():
            self.trainers[name] = _trainer(base, schema, device, exchange, **variant)
            self.batches[name] = itertools.cycle(drawn)
            dense[name] = sum(parameter.nbytes for parameter in self.trainers[name].dense.values())
        return {"dense_bytes": dense}

    def train(self, variant: str, steps: int) -> dict[str, Any]:
        """``steps`` steps between two barriers: ms a step, and bytes sent by class of link in all of them."""
        trainer = self.trainers[variant]
        trainer.links.take()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step(self.batches[variant])
        dist.barrier()
        return {
            "step_ms": 1000 * (time.perf_counter() - began) / steps,
            "sent": trainer.links.take().as_list(),
            "phases": trainer.clock.figures(),
        }


def _trainer(
    base: Config, schema: DatasetSchema, device: torch.device, exchange: str, sharding: str = "", **module: Any
) -> Trainer:
    if sharding:
        config = replace(base, partition=PartitionConfig(exchange=exchange))
        return Trainer(config, schema, plan_of(schema, config, sharding), device)
    config = replace(base, partition=PartitionConfig(name="dmt", exchange=exchange, **module))
    names = [column.name for column in schema.sparse]
    towers = towers_of(config, strided(names, config.hardware.hosts, {}, []), names)
    return Trainer(config, schema, plan_of(schema, config, "table_wise", towers), device, towers)


def plan_of(schema: DatasetSchema, config: Config, sharding: str, towers: Towers | None = None) -> Plan:
    """Tables dealt to all ranks in turn, or cut into as many blocks of rows; with ``towers`` to their hosts' ranks."""
    hardware, dim = config.hardware, config.model.embedding_dim
    homes = {column.name: (0, config.world_size, i) for i, column in enumerate(schema.sparse)}
    for tower in towers.towers if towers is not None else ():
        first, size = tower.hosts[0] * hardware.ranks_per_host, len(tower.hosts) * hardware.ranks_per_host
        homes |= {name: (first, size, i) for i, name in enumerate(tower.features)}
    tables = {}
    for column in schema.sparse:
        first, size, index = homes[column.name]
        block = -(-column.rows // size)
        whole = (ShardPlan(rank=first + index % size, row=0, rows=column.rows, column=0, columns=dim),)
        blocks = tuple(
            ShardPlan(rank=first + i, row=i * block, rows=min(block, column.rows - i * block), column=0, columns=dim)
            for i in range(size)
        )
        tables[column.name] = TablePlan(
            rows=column.rows, dim=dim, pooling=1.0, tier="ddr", sharding=sharding, kernel="fused", cost_ms=0.0,
            shards=whole if sharding == "table_wise" else blocks, reason="",
        )  # fmt: skip
    return Plan(
        hardware="bench", device="cpu", world_size=config.world_size, ranks_per_host=hardware.ranks_per_host,
        global_batch=config.train.global_batch, tables=tables,
    )  # fmt: skip


def main() -> None:
    """Answer the parent until it hangs up."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    serve(_Variants())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
