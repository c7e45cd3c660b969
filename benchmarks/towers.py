"""``make bench-towers``: steps over slow links between hosts, flat, with pass-through towers (SPTT) and with DMT.

Two hosts of two ranks are network namespaces with a token bucket each (``benchmarks.network``). Every variant is the
product's own ``StepExecutor``, with the same ids and optimizers; variants take turns under every limit, all in one
process group. The flat one has its tables whole on a rank each: blocks of rows would send four times as much. MLPs are
small, so that communication is at least half of the flat model's step even where all ranks share two cores:
``flat_comm_share`` is the share of the step that the limit adds to the unlimited one, which leaves out what copying
costs there.

``ratio``: step of ``flat_table_wise`` / step of ``dmt``, at the limit where it is lower: the ``module`` whose quality
``benchmarks.towers_quality`` measures, at the same ratio of bytes (``times``). ``dmt_2x``, ``dmt_4x`` and ``dmt_8x``:
projections alone. ``inter_bytes``: bytes of embeddings, gradients and ids between hosts for one sample, as counted.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import finish, in_turns, options, serve, show, silent
from benchmarks.models_and_rows import ZipfIds, batches, config_of, plan_with, schema_of, table_plan
from benchmarks.network import Bed, Ranks, require_bed
from pipeline.config import Config, PartitionConfig
from pipeline.records import DatasetSchema, TowerModuleSpec
from pipeline.towers.assignment import towers_of
from pipeline.training.batches import Batch
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.step import StepExecutor

# One module, whose speed is measured here and whose quality ``towers_quality`` measures: as many times fewer bytes
# between hosts than flat, ids included, than ``TIMES`` says. Chosen on other seeds than the bench runs.
MODULE, TIMES = TowerModuleSpec(name="dcn_low_rank", rank=32), 2.83
ID_BYTES, VALUE_BYTES = 8, 8  # of an id and its length; of a float32 there, and its gradient back
HOSTS, RANKS = 2, 2  # ranks of a host
TABLES, DIM, MLP = 32, 128, [64]
FLAT = "flat_table_wise"
RANK = "rank"  # the word that makes this program one
KEPT = 4  # batches of a rank, drawn once and used over and over: drawing costs nothing under the clock
WARM_UP = 3


def narrowed(width: int, times: float) -> tuple[int, float]:
    """Width of the towers' vectors with which a flat model of ``width`` sends ``times`` as many bytes, and how many.

    One vector a feature, and table-wise tables.
    """
    flat = ID_BYTES + width * VALUE_BYTES
    dim = max((d for d in range(1, width + 1) if times * (ID_BYTES + d * VALUE_BYTES) <= flat), default=1)
    return dim, flat / (ID_BYTES + dim * VALUE_BYTES)


def main() -> None:
    given = options(
        __doc__,
        mb_per_s=([150.0, 125.0], "limits (125: 1 Gbit/s)", {"nargs": "+"}),
        rows=(10_000, "of a table"),
        batch=(1536, "of a rank"),
        rounds=3,
        steps=(3, "of a variant, a round"),
        module=(MODULE.name, "of `dmt`", {"choices": ["dcn_low_rank", "low_rank"]}),
        rank=(MODULE.rank, "of the module of `dmt`"),
        only=([], "variants; all unless given"),
    )
    require_bed()
    began = time.monotonic()
    variants = {name: spec for name, spec in variants_of(given).items() if not given.only or name in given.only}
    with Bed(HOSTS) as bed, Ranks(bed, RANKS, "benchmarks.towers", RANK) as ranks:
        ranks.ask(variants=variants, rows=given.rows, batch=given.batch)
        for name in variants:  # buffers grow, pipelines fill
            ranks.ask(variant=name, steps=WARM_UP)
        free = measure(given, bed, ranks, variants, None)
        found = {f"{limit:g}": measure(given, bed, ranks, variants, limit) for limit in given.mb_per_s}
    ratios = {limit: each[FLAT]["ms"] / each["dmt"]["ms"] for limit, each in found.items()}
    comm = {limit: 1 - free[FLAT]["ms"] / each[FLAT]["ms"] for limit, each in found.items()}
    finish(
        "towers",
        min(ratios.values()),
        seconds=time.monotonic() - began,
        mb_per_s=given.mb_per_s,
        times=TIMES,
        module=replace(MODULE, name=given.module, rank=given.rank).label,
        ratios={limit: round(value, 3) for limit, value in ratios.items()},
        flat_comm_share={limit: round(value, 3) for limit, value in comm.items()},
        step_ms={name: [round(each[name]["ms"], 1) for each in (free, *found.values())] for name in variants},
        inter_bytes={name: round(each["inter_bytes"], 1) for name, each in free.items()},
    )


def variants_of(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{name: settings of the partition}."""
    towers = {"name": "dmt", "module": given.module, "rank": given.rank, "cross_layers": MODULE.cross_layers}
    projection = {"name": "dmt", "module": "dlrm", "c": 1, "p": 0}
    return {
        FLAT: {},
        "sptt": {"name": "dmt", "module": "pass_through"},
        **{f"dmt_{times}x": {**projection, "dim": DIM // times} for times in (2, 4, 8)},
        "dmt": {**towers, "dim": narrowed(DIM, TIMES)[0]},
    }


def measure(
    given: argparse.Namespace, bed: Bed, ranks: Ranks, variants: dict[str, Any], limit: float | None
) -> dict[str, dict[str, float]]:
    """{variant: medians over the rounds of step ms and bytes a sample} under a limit in MB/s."""
    bed.limit(None if limit is None else 1e6 * limit)

    def take(name: str) -> dict[str, float]:
        answers = ranks.ask(variant=name, steps=given.steps)
        samples = given.batch * RANKS * HOSTS * given.steps
        return {
            "ms": max(answer["ms"] for answer in answers),
            "inter_bytes": sum(answer["inter_host"] for answer in answers) / samples,
        }

    rounds = in_turns({name: functools.partial(take, name) for name in variants}, given.rounds)
    found = {}
    for name, taken in rounds.items():
        found[name] = {what: statistics.median(each[what] for each in taken) for what in taken[0]}
    title = "no limit, ms" if limit is None else f"{limit:g} MB/s, ms"
    show(title, {name: each["ms"] for name, each in found.items()}, ".0f")
    return found


class Variants:
    """On a rank, a trainer for each variant; the first question builds them, every other one trains."""

    def __init__(self) -> None:
        self.trainers: dict[str, tuple[StepExecutor, Iterator[Batch]]] = {}

    def __call__(self, **asked: Any) -> dict[str, Any]:
        return self.train(**asked) if self.trainers else self.build(**asked)

    def build(self, variants: dict[str, dict[str, Any]], rows: int, batch: int) -> dict[str, Any]:
        """``variants``: as of ``variants_of``; ``batch``: of a rank."""
        base = config_of(DIM, batch * HOSTS * RANKS, RANKS, threads=1)
        base.hardware.hosts = HOSTS
        base.model = replace(base.model, bottom_mlp=MLP, top_mlp=MLP)
        device, schema = connect(base.hardware, 1), schema_of(TABLES, rows)
        drawn = list(itertools.islice(batches(schema, batch, dist.get_rank(), ZipfIds(rows, 1.05)), KEPT))
        for name, partition in variants.items():
            config = replace(base, partition=PartitionConfig(**partition))
            self.trainers[name] = trainer_of(config, schema, device), itertools.cycle(drawn)
        return {}

    def train(self, variant: str, steps: int) -> dict[str, Any]:
        """``steps`` steps between two barriers: ms of one, bytes sent between hosts in all."""
        trainer, drawn = self.trainers[variant]
        trainer.links.take()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            trainer.step(drawn)
        dist.barrier()
        ms = 1000 * (time.perf_counter() - began) / steps
        return {"ms": ms, "inter_host": trainer.links.take().inter_host}


def trainer_of(config: Config, schema: DatasetSchema, device: torch.device) -> StepExecutor:
    """Neighbouring tables on the same rank, so that nothing has to be put in order, and on their tower's host."""
    names, world, towers = [column.name for column in schema.sparse], config.world_size, None
    if config.partition.name == "dmt":
        size = len(names) // HOSTS
        assigned = [names[host * size : (host + 1) * size] for host in range(HOSTS)]
        towers = towers_of(config.partition, DIM, HOSTS, assigned, names)
    tables = {c.name: table_plan(c.rows, DIM, rank=i * world // TABLES) for i, c in enumerate(schema.sparse)}
    plan = plan_with(tables, world, RANKS, config.train.global_batch)
    return StepExecutor(select_model_settings(config), schema, plan, device, towers)


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        silent()
        serve(Variants())
        dist.destroy_process_group()
    else:
        main()
