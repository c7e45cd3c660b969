"""What the ranks of the tests of towers with sequences run: flat and with towers, on the same global batches."""

from dataclasses import replace

import torch
import torch.distributed as dist

from pipeline.config.model import TableConfig
from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.embeddings.ssd import SsdStore
from pipeline.records import SequenceColumn, SequenceGroup, ShardPlan, SparseColumn
from pipeline.training.config_settings import select_model_settings
from pipeline.training.step import StepExecutor
from tests.embeddings.ranks import on_tier, plan_for
from tests.towers.cases import BATCH, DIM, STEPS, _placed, config, data, leave, steps, towers_on, trained

COLUMNS = (
    SparseColumn(name="a", rows=40),
    SparseColumn(name="b", rows=23, multi=True, weighted=True),
    SparseColumn(name="c", rows=11, multi=True),
    SparseColumn(name="d", rows=17),
)
SEQUENCES = (
    SequenceGroup(
        name="seen",
        max_length=7,
        columns=(
            SequenceColumn(name="seen__a", rows=40, table="a"),
            SequenceColumn(name="seen__c", rows=11, table="c"),
            SequenceColumn(name="seen__age", rows=9),
        ),
    ),
    SequenceGroup(
        name="asked",
        max_length=5,
        columns=(
            SequenceColumn(name="asked__d", rows=17, table="d"),
            SequenceColumn(name="asked__e", rows=17, table="d"),
        ),
    ),
    SequenceGroup(name="heard", max_length=4, columns=(SequenceColumn(name="heard__f", rows=13),)),
)
BLOCKS = {
    "seen": SequenceModel(block="bst", options=SequenceOptions(layers=2)),
    "asked": SequenceModel(block="din"),
    "heard": SequenceModel(block="sasrec"),
}


def made_config(hosts, ranks, settings, **partition):
    """``config`` with the blocks, and tables of another width where ``settings`` say so."""
    settings = dict(settings)
    uneven = settings.pop("uneven", False)
    made = trained(config(hosts, ranks, **partition), settings)
    tables = {"a": TableConfig(dim=4), "heard__f": TableConfig(dim=12)} if uneven else {}
    made.model = replace(made.model, sequences=BLOCKS, tables=tables)
    return made


def split_of(folder, settings):
    weighted = "embedding_l2" in settings
    return data(folder / ("weighted" if weighted else "data"), COLUMNS, row_weights=weighted, sequences=SEQUENCES)


def plan_of(schema, model, towers, hosts, local, kinds):
    """A plan whose shards keep to the towers' hosts; ``towers`` None: flat. ``kinds``: sharding by table."""
    world, widths = hosts * local, {table.name: model.dim_of(table.name) for table in schema.tables}
    rows = {table.name: table.rows for table in schema.tables}
    plan = plan_for([kinds.get(name, "table_wise") for name in rows], world, local, rows=rows, dim=DIM)
    tables = {name: _wide(table, widths[name]) for name, table in plan.tables.items()}
    for tower in towers.towers if towers is not None else ():
        first, size = tower.hosts[0] * local, len(tower.hosts) * local
        for place, table in enumerate(schema.with_vectors(tower.features).tables):
            whole = _wide(
                plan_for("table_wise", world, local, rows={table.name: table.rows}).tables[table.name],
                widths[table.name],
            )
            tables[table.name] = _placed(whole, kinds.get(table.name, "table_wise"), first, size, place)
    return replace(plan, tables=tables)


def _wide(table, width):
    shards = tuple(ShardPlan(rank=s.rank, row=s.row, rows=s.rows, column=0, columns=width) for s in table.shards)
    return replace(table, dim=width, shards=shards)


def flat(folder, references):
    """The flat model on as many ranks as there are: {name: train settings}."""
    world = dist.get_world_size()
    for name, settings in references.items():
        split = split_of(folder, settings)
        made = made_config(1, world, settings)
        plan = plan_of(split.schema, made.model, None, 1, world, {})
        trainer = StepExecutor(select_model_settings(made), split.schema, plan, torch.device("cpu"), total=STEPS)
        leave(folder, name, trainer, steps(trainer, split))


def with_towers(folder, cases):
    """``cases``: {name: (hosts, assigned, module, kinds, train settings)}; setting ``ssd``: tables are in files."""
    world = dist.get_world_size()
    for name, (hosts, assigned, module, kinds, settings) in cases.items():
        settings = dict(settings)
        on_ssd = settings.pop("ssd", False)
        split, towers = split_of(folder, settings), towers_on(assigned, module)
        made = made_config(hosts, world // hosts, settings, name="dmt")
        plan = plan_of(split.schema, made.model, towers, hosts, world // hosts, kinds)
        plan = on_tier(plan, "ssd", cache_rows=3) if on_ssd else plan
        ssd = SsdStore(plan, [str(folder)], dist.get_rank()) if on_ssd else None
        trainer = StepExecutor(
            select_model_settings(made), split.schema, plan, torch.device("cpu"), towers, ssd, total=STEPS
        )
        leave(folder, name, trainer, steps(trainer, split))
        if ssd is not None:
            ssd.close()


assert BATCH % 4 == 0
