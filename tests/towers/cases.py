"""What the ranks of the tower tests run: trainers, flat and with towers, on the same global batches."""

import json
from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pipeline.config import Config, DataConfig, HardwareConfig, PartitionConfig, TrainConfig
from pipeline.embeddings.ssd import SsdStore
from pipeline.models.settings import DlrmConfig
from pipeline.records import ShardPlan, SparseColumn, Tower, TowerModuleSpec, Towers
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor
from tests.embeddings.ranks import on_tier, plan_for, row_shards
from tests.training.dataset import KEY, write_dataset

DIM, BATCH, STEPS = 8, 48, 5
COLUMNS = (
    SparseColumn(name="a", rows=40),
    SparseColumn(name="b", rows=23, multi=True, weighted=True),
    SparseColumn(name="c", rows=11, multi=True),
    SparseColumn(name="d", rows=17),
    SparseColumn(name="e", rows=29, multi=True),
)
# The compiled kernels look up and train these; FBGEMM those of ids with weights.
UNWEIGHTED = tuple(replace(column, weighted=False) for column in COLUMNS)


def config(hosts, ranks, **partition):
    return Config(
        run="r",
        data=DataConfig(name="t", format="synthetic"),
        model=DlrmConfig(embedding_dim=DIM, bottom_mlp=[16], top_mlp=[16]),
        hardware=HardwareConfig(name="t", hosts=hosts, ranks_per_host=ranks),
        partition=PartitionConfig(**partition),
        train=TrainConfig(
            global_batch=BATCH,
            lr=0.02,
            sparse_lr=0.1,
            warmup_steps=2,
            precision="fp32",
            threads_per_rank=1,
            dense_optimizer="adagrad",
            weight_decay=0.1,  # added to the gradient: Adagrad alone forgives any factor
            schedule="linear",
            decay_ratio=1.0,
            min_lr_factor=0.1,
        ),
    )


def trained(made, settings):
    """``made`` with these settings of ``train``."""
    made.train = replace(made.train, **settings)
    return made


def towers_on(assigned, module=None):
    """``assigned``: {tower's features as letters: its hosts}."""
    towers = tuple(Tower(features=tuple(letters), hosts=tuple(hosts)) for letters, hosts in assigned)
    return Towers(partition="dmt", towers=towers, module=module or TowerModuleSpec())


def tower_plan(towers, hosts, local, kinds, columns=COLUMNS):
    """A plan whose shards keep to the towers' hosts; ``kinds``: sharding by feature."""
    world = hosts * local
    plan = plan_for("table_wise", world, local, rows={c.name: c.rows for c in columns}, dim=DIM)
    tables = {}
    for tower in towers.towers:
        first, size = tower.hosts[0] * local, len(tower.hosts) * local
        for i, name in enumerate(tower.features):
            table, kind = plan.tables[name], kinds.get(name, "table_wise")
            tables[name] = _placed(table, kind, first, size, i)
    ordered = {c.name: tables[c.name] for c in columns}
    return replace(plan, tables=ordered)


def _placed(table, kind, first, size, index):
    home = first + index % size
    if kind == "data_parallel":
        return replace(table, sharding=kind, kernel="dense", shards=())
    if kind == "row_wise":
        return replace(table, sharding=kind, shards=tuple(row_shards(table.rows, first, size, 0, table.dim)))
    if kind == "column_wise":
        half = table.dim // 2
        shards = tuple(
            ShardPlan(rank=first + (index + i) % size, row=0, rows=table.rows, column=i * half, columns=half)
            for i in range(2)
        )
        return replace(table, sharding=kind, shards=shards)
    return replace(table, shards=(ShardPlan(rank=home, row=0, rows=table.rows, column=0, columns=table.dim),))


def data(folder, columns=COLUMNS, **options):
    if dist.get_rank() == 0 and not folder.exists():
        write_dataset(folder, train=BATCH * STEPS + 17, test=60, sparse=columns, **options)
    dist.barrier()
    return SplitReader(Store(str(folder)), Store(str(folder)).get(f"datasets/t/{KEY}", "dataset"), "train")


def data_of(folder, settings, columns=COLUMNS):
    """Rows for a training with ``settings``: with weights where embeddings are penalised."""
    weighted = "embedding_l2" in settings
    kind = "" if columns is COLUMNS else "-of-ids-without-weights"
    return data(folder / f"{'weighted' if weighted else 'data'}{kind}", columns, row_weights=weighted)


def steps(trainer, split, count=STEPS):
    """Train; logits and labels of each step on this rank [b]."""
    order = Order(key="k", seed=3, global_batch=BATCH, rank=dist.get_rank(), world_size=dist.get_world_size())
    outputs = {}
    with BatchReader(split, order) as reader:
        for step in range(count):
            logits, labels, weights = trainer.step(reader)
            outputs[f"logits{step}"], outputs[f"weights{step}"] = logits.clone(), weights.clone()
            outputs[f"labels{step}"] = labels.clone()
    return outputs


def leave(folder, name, trainer, outputs):
    """Every owned shard, the dense parameters, averaged where they are, and the outputs in a file of this rank."""
    trainer.gather()
    if trainer.optimizers.average is not None:
        trainer.optimizers.average.swap()
    tensors = dict(outputs)
    for s in trainer.rows.local_shards():
        if s.owner:
            tensors[f"rows|{s.table}|{s.row}|{s.column}"] = s.weight.clone()
    tensors |= {f"dense|{n}": p.detach().clone() for n, p in trainer.dense.items()}
    save_file(tensors, folder / f"{name}-{dist.get_rank()}.safetensors")
    (folder / f"{name}-tables.json").write_text(json.dumps(sorted(trainer.rows.tables)))


def flat(folder, references):
    """The flat model, on as many ranks as there are; ``references``: {name: (sharding by feature, train settings)}.

    A table cut into columns has an Adagrad sum for each of them, so its reference must be cut alike.
    """
    world = dist.get_world_size()
    for name, (kinds, settings) in references.items():
        split = data_of(folder, settings)
        shardings = [kinds.get(c.name, "table_wise") for c in COLUMNS]
        plan = plan_for(shardings, world, rows={c.name: c.rows for c in COLUMNS}, dim=DIM)
        made = select_model_settings(trained(config(1, world), settings))
        trainer = StepExecutor(made, split.schema, plan, torch.device("cpu"), total=STEPS)
        leave(folder, name, trainer, steps(trainer, split))


def with_towers(folder, cases, columns=COLUMNS):
    """``cases``: {name: (hosts, assigned, module, kinds, train settings)}, one trainer after the other."""
    world = dist.get_world_size()
    for name, (hosts, assigned, module, kinds, settings) in cases.items():
        split = data_of(folder, settings, columns)
        towers = towers_on(assigned, module)
        made = trained(config(hosts, world // hosts, name="dmt"), settings)
        plan = tower_plan(towers, hosts, world // hosts, kinds, columns)
        trainer = StepExecutor(
            select_model_settings(made), split.schema, plan, torch.device("cpu"), towers, total=STEPS
        )
        leave(folder, name, trainer, steps(trainer, split))


def with_towers_on_ssd(folder, hosts, assigned, kinds):
    """As ``with_towers``, pass-through, every table in a file."""
    split = data(folder / "data")
    world = dist.get_world_size()
    towers = towers_on(assigned)
    plan = on_tier(tower_plan(towers, hosts, world // hosts, kinds), "ssd", cache_rows=3)
    ssd = SsdStore(plan, [str(folder)], dist.get_rank())
    made = config(hosts, world // hosts, name="dmt")
    trainer = StepExecutor(
        select_model_settings(made), split.schema, plan, torch.device("cpu"), towers, ssd, total=STEPS
    )
    leave(folder, "ssd", trainer, steps(trainer, split))
    ssd.close()


SINGLE = tuple(SparseColumn(name=name, rows=20 + i) for i, name in enumerate("abcd"))


def count_bytes(folder, hosts, cases):
    """``cases``: {name: (assigned or None for flat, module, exchange, shardings)}; what each rank sent in two steps."""
    split = data(folder / "data", SINGLE)
    world = dist.get_world_size()
    for name, (assigned, module, exchange, kinds) in cases.items():
        made = config(hosts, world // hosts, name="dmt" if assigned else "flat", exchange=exchange)
        made.train.pipeline = "base"
        towers = towers_on(assigned, module) if assigned else None
        if towers is not None:
            plan = tower_plan(towers, hosts, world // hosts, {}, SINGLE)
        else:
            plan = plan_for(kinds, world, rows={c.name: c.rows for c in SINGLE}, dim=DIM)
        trainer = StepExecutor(
            select_model_settings(made), split.schema, plan, torch.device("cpu"), towers, total=STEPS
        )
        outputs = steps(trainer, split, 2)
        away = towers is not None and [n for n in trainer.dense if n.startswith("towers.")]
        record = {
            "sent": trainer.links.take().as_list(),
            "dense": sum(p.nbytes for n, p in trainer.dense.items() if not away or n not in away),
            "logits": outputs["logits1"].tolist(),
        }
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(record))
