"""Checks a whole configuration: every value, every group, and then combinations of groups."""

from __future__ import annotations

import difflib
from dataclasses import fields

from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.config.fields import check_values
from pipeline.config.kubernetes import check_kubernetes
from pipeline.config.model import COLUMN_STEP
from pipeline.config.renamed import RENAMED
from pipeline.config.train import RESET, ValidateConfig
from pipeline.core.errors import ConfigError
from pipeline.core.registry import default_stages
from pipeline.specs import STAGES
from pipeline.specs.id_mapping import ID_MAPPINGS, mapping_of
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK
from pipeline.specs.model import SEQUENCE_BLOCKS, TASK_ARCHITECTURES


def check(config: Config) -> None:
    """Raise ConfigError for the first wrong value or combination, with the override that fixes it."""
    # Check single values first, so that comparisons between settings can rely on valid values.
    check_values(config)
    _check_stages(config)
    batch, ranks = config.train.global_batch, config.hardware.workers
    if isinstance(batch, int) and batch < ranks:
        raise ConfigError(
            f"train.global_batch is {batch}, expected at least one sample for each of the {ranks} ranks",
            hint=f"train.global_batch={1024 * ranks}",
        )
    check_parts(config)
    if config.partition.auto and config.partition.name == "flat":
        raise ConfigError(
            "partition.auto is true, but partition.name is flat, which leaves nothing to choose",
            hint="partition=dmt, or partition.auto=false",
        )
    if config.hardware.embedding_hosts:
        _check_bipartite(config)
    if config.train.asynchronous:
        _check_asynchronous(config)
    if config.train.snapshots.active:
        _check_snapshots(config)
    _check_features(config)
    _check_groups(config)
    _check_tasks(config)
    _check_sequences(config)
    _check_tables(config)
    _check_allowed(config)
    if config.launch.name == "kubernetes":
        check_kubernetes(config)
    elif config.launch.grow:
        raise ConfigError(
            f"launch.grow takes back hosts of a cluster, but launch={config.launch.name} keeps the hosts that it has",
            hint="launch.grow=false, or launch=kubernetes",
        )
    if config.launch.name == "hosts":
        _check_joined(config)


def check_parts(config: Config) -> None:
    """Raise ConfigError if ``train.accumulate`` cannot be done: fewer rows than parts, or a layer across rows."""
    parts, batch, ranks = config.train.accumulate, config.train.global_batch, config.hardware.workers
    if parts == 1:
        return
    # ``auto`` depends on the number of rows, which is not known yet.
    if isinstance(batch, int) and batch < parts * ranks:
        of_rank = f"a rank has {batch // ranks} of the {batch} samples of train.global_batch"
        raise ConfigError(
            f"train.accumulate is {parts}, but {of_rank}, expected at least one for each part",
            hint=f"train.accumulate={batch // ranks}, or train.global_batch={parts * ranks}",
        )
    if config.train.rank_loss.active:
        raise ConfigError(
            f"train.accumulate is {parts}, but train.rank_loss.kind is {config.train.rank_loss.kind}: it compares the "
            "rows of the whole batch, and a part has only some of them",
            hint="train.accumulate=1, or train.rank_loss.kind=none",
        )
    if config.model.batch_statistics:
        raise ConfigError(
            f"train.accumulate is {parts}, but model.norm is batch: mean and variance are those of the whole batch, "
            "and its parts have others",
            hint="model.norm=layer, or train.accumulate=1",
        )


def check_mapping_settings(data: DataConfig) -> None:
    """Raise ConfigError for the first feature that sets something its id mapping does not use.

    This applies to composed configurations only: recorded ones may be older than the check.
    """
    # Go through the mappings in reverse, so that the first of several mappings that use a setting is proposed.
    users: dict[str, str] = {}
    for mapping in reversed(list(ID_MAPPINGS)):
        users |= dict.fromkeys(mapping.settings, mapping.name)
    for name, feature in data.sparse.items():
        mapping = mapping_of(feature.mapping, data.sparse_defaults.mapping, feature.bins)
        unused = [each for each in users if getattr(feature, each) is not None and each not in mapping.settings]
        if not unused:
            continue
        path = f"data.sparse.{name}"
        sets = " and ".join(f"{each}={getattr(feature, each)}" for each in unused)
        them = "it" if len(unused) == 1 else "them"
        hint = " ".join(f"{path}.{each}=null" for each in unused)
        subject = "a feature with bins"
        if not feature.bins:
            subject = f"mapping {mapping.name}"
            hint += f", or {path}.mapping={users[unused[0]]}"
        raise ConfigError(f"{path} sets {sets}, but {subject} does not use {them}", hint=hint)


def check_validation_settings(config: Config) -> None:
    """Raise ConfigError for settings of ``train.validate`` without validation rows, on which they would do nothing.

    This applies to composed configurations only: recorded ones may be older than the check.
    """
    if config.data.split.validates:
        return
    for name, default in vars(ValidateConfig()).items():
        value = getattr(config.train.validate, name)
        if value != default:
            usual = "null" if default is None else default
            raise ConfigError(
                f"train.validate.{name} is {value}, but there are no validation rows to look at",
                hint=f"data.split.validation_share=0.1, or train.validate.{name}={usual}",
            )


def _check_stages(config: Config) -> None:
    if not config.stages:
        raise ConfigError("stages is empty, expected at least one stage", hint=f"stages=[{','.join(default_stages())}]")
    if not config.store.strip():
        raise ConfigError("store is empty, expected a folder or an fsspec URL", hint="store=./store")
    for stage in STAGES:
        # Settings of stages that do not run may be wrong: one file may serve runs of different stages.
        if stage.name in config.stages:
            stage.check(config)
        if stage.distributed and config.world_size > 1 and stage.name in config.launch.inline:
            raise ConfigError(
                f"launch.inline names {stage.name!r}, but its {config.world_size} ranks need their own processes",
                hint="launch.inline=[ingest,plan,partition]",
            )


def _check_joined(config: Config) -> None:
    # Raise ConfigError for what hosts that start the same command side by side cannot agree on (``launch=hosts``).
    hosts, launch = config.hardware.hosts, config.launch
    if launch.host_index >= hosts:
        raise ConfigError(
            f"launch.host_index is {launch.host_index}, expected less than hardware.hosts={hosts}",
            hint=f"hardware.hosts={launch.host_index + 1}, or launch.host_index=0 to {hosts - 1}",
        )
    if len(config.stages) > 1 and hosts > 1:
        raise ConfigError(
            f"launch=hosts has stages=[{','.join(config.stages)}], expected one: its hosts meet for one stage",
            hint=f"stages=[{config.stages[0]}] on all hosts, then the next one; launch=kubernetes runs all of them",
        )
    if config.force and hosts > 1:
        raise ConfigError(
            "launch=hosts with force=true: the other hosts could not tell the old artifact from the new one",
            hint="leave force out, or run=<another name>",
        )


def _check_bipartite(config: Config) -> None:
    # Embedding hosts serve pooled embeddings of a flat model.
    hosts = f"hardware.embedding_hosts is {config.hardware.embedding_hosts}"
    if config.partition.name != "flat":
        raise ConfigError(
            f"{hosts}, but partition.name is {config.partition.name}: towers have their tables and modules on the "
            "same hosts",
            hint="partition=flat, or hardware.embedding_hosts=0",
        )
    if config.data.sequences:
        raise ConfigError(
            f"{hosts}, but data.sequences has {', '.join(config.data.sequences)}: of a sequence the embedding of every "
            "event is used, and only pooled embeddings leave an embedding host",
            hint=f"hardware.embedding_hosts=0, or ~data.sequences.{next(iter(config.data.sequences))}",
        )


def _check_snapshots(config: Config) -> None:
    # An ensemble needs validation rows to choose its members by, and it alone decides when to validate.
    train, path = config.train, "train.snapshots"
    looks = [each.name for each in fields(ValidateConfig) if getattr(train.validate, each.name) != each.default]
    if not config.data.split.validates:
        what = "there are no validation rows to choose members by"
        hint = "data.split.validation_share=0.1"
    elif looks:
        what = f"train.validate.{', train.validate.'.join(looks)} would stop or lower what snapshots cut into cycles"
        hint = f"train.validate.{looks[0]} at its default"
    elif train.average.active:
        what = f"train.average.kind={train.average.kind} averages weights over all cycles"
        hint = "train.average.kind=none"
    elif train.snapshots.kind == "cyclic" and train.schedule == "constant":
        what = "train.schedule=constant has no minimum for a snapshot of kind cyclic"
        hint = "train.schedule=cosine"
    elif train.snapshots.kind == RESET and config.partition.name != "flat":
        what = f"partition={config.partition.name} has tower modules, which {path}.kind={RESET} cannot begin anew"
        hint = f"{path}.kind=cyclic, or partition=flat"
    else:
        return
    raise ConfigError(f"{path}.count is {train.snapshots.count}, but {what}", hint=f"{hint}, or {path}.count=1")


def _check_asynchronous(config: Config) -> None:
    # Asynchronous training has one rank on a CPU, and a flat model.
    hardware, mode = config.hardware, f"train.mode={config.train.mode}"
    if config.world_size > 1:
        raise ConfigError(
            f"{mode} trains in one process, but hardware.hosts={hardware.hosts} and "
            f"hardware.ranks_per_host={hardware.ranks_per_host} ask for {config.world_size} ranks",
            hint="hardware=laptop, or train.mode=sync",
        )
    if hardware.device != "cpu":
        raise ConfigError(
            f"{mode} runs threads on CPUs, but hardware.device is {hardware.device}",
            hint="hardware=laptop, or train.mode=sync",
        )
    if config.partition.name != "flat":
        raise ConfigError(
            f"{mode} trains a flat model, but partition.name is {config.partition.name}",
            hint="partition=flat, or train.mode=sync",
        )


def _check_features(config: Config) -> None:
    # Slices of the gate and of the calibrator, and tables, must be sparse features.
    data = config.data
    for name in config.gate.slices:
        if name not in data.sparse and name not in data.sequences and name != "day":
            raise ConfigError(
                f"gate.slices names {name!r}, expected sparse features{', sequences' * bool(data.sequences)} or day",
                hint=f"gate.slices=[{next(iter(data.sparse), 'day')}]",
            )
    for table in config.checkpoint.tables:
        # Precisions belong to tables, and a feature that shares a table has none of its own.
        if table not in data.event_tables and (table not in data.sparse or data.sparse[table].table):
            near = ", ".join([name for name, feature in data.sparse.items() if not feature.table][:5])
            raise ConfigError(
                f"checkpoint.tables names {table!r}, expected a table of data.sparse: {near}, ...",
                hint=f"~checkpoint.tables.{table}",
            )
    slices = config.publish.calibrator.slices
    if slices is not None and slices not in data.sparse:
        near = next(iter(difflib.get_close_matches(slices, data.sparse, n=1, cutoff=0.0)), "null")
        raise ConfigError(
            f"publish.calibrator.slices is {slices!r}, expected a categorical feature",
            hint=f"publish.calibrator.slices={near}",
        )


def _check_groups(config: Config) -> None:
    # The column that groups rows, for GAUC or for the ranking loss, must be a sparse feature with one id per row.
    data = config.data
    for path, name in (("evaluate", config.evaluate.group_by), ("train.rank_loss", config.train.rank_loss.group_by)):
        if name is None:
            continue
        if name not in data.sparse:
            near = next(iter(difflib.get_close_matches(name, data.sparse, n=1, cutoff=0.0)), "null")
            raise ConfigError(
                f"{path}.group_by is {name!r}, expected a categorical feature", hint=f"{path}.group_by={near}"
            )
        feature = data.sparse[name]
        owner = data.sparse.get(feature.table or name, feature)
        mapping = mapping_of(owner.mapping, data.sparse_defaults.mapping, owner.bins)
        if feature.lists(data.sparse_defaults.separator) or mapping.rows_per_id > 1:
            why = "a row has several ids of it"
            if mapping.rows_per_id > 1:
                why = f"mapping {mapping.name} gives an id {mapping.rows_per_id} rows"
            raise ConfigError(
                f"{path}.group_by is {name!r}, but {why}, expected a feature with one id and row",
                hint=f"another feature, or {path}.group_by=null",
            )


def _check_tasks(config: Config) -> None:
    # An architecture needs the tasks that it is made for; weights and limits must name tasks.
    tasks, model = config.data.tasks, config.model
    first = next(iter(TASK_ARCHITECTURES))
    if not tasks and (model.tasks != first.name or model.task_options != type(model.task_options)()):
        raise ConfigError(
            f"model.tasks is {model.tasks} or has options, but data.tasks is empty: there is one task, {MAIN_TASK}",
            hint="'+data.tasks.conversion={column: <its column>}'",
        )
    if model.task_architecture.chained and not any(task.given for task in tasks.values()):
        name = next(iter(tasks))
        raise ConfigError(
            f"model.tasks is {model.tasks}, but no task of data.tasks is given another one",
            hint=f"data.tasks.{name}.given={MAIN_TASK}, or model.tasks={first.name}",
        )
    # With a single task there is nothing to weigh. The main task's limits are the gate's own settings.
    weighed = [MAIN_TASK, *tasks] if tasks else []
    for path, named, known in (
        ("train.tasks", config.train.tasks, weighed),
        ("gate.tasks", config.gate.tasks, [*tasks]),
    ):
        for name in named:
            if name not in known:
                has = f"expected one of: {', '.join(known)}" if known else "but data.tasks is empty"
                raise ConfigError(f"{path} names {name!r}, {has}", hint=f"~{path}.{name}")
    for name, limits in config.gate.tasks.items():
        # A task has default limits of both kinds, so only a changed limit is a mistake.
        foreign: tuple[str, ...] = ("max_ne", "min_auc")
        if LABEL_KINDS.get(tasks[name].kind).classes:
            foreign = ("max_rmse",)
        for figure in foreign:
            if getattr(limits, figure) not in (None, getattr(type(limits)(), figure)):
                raise ConfigError(
                    f"gate.tasks.{name}.{figure} is {getattr(limits, figure):g}, but task {name!r} is of kind "
                    f"{tasks[name].kind}, which has no such figure",
                    hint=f"gate.tasks.{name}.{figure}=null",
                )


def _check_sequences(config: Config) -> None:
    # ``model.sequences`` must name sequences, and a block that compares needs a target.
    known = config.data.sequences
    for name in config.model.sequences:
        if name not in known:
            hint = f"~model.sequences.{name}"
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            if near:
                hint += f" +model.sequences.{near[0]}={{...}}"
            raise ConfigError(
                f"model.sequences names {name!r}, expected a sequence of data.sequences: {', '.join(known) or 'none'}",
                hint=hint,
            )
    for name, sequence in known.items():
        if sequence.built and config.ingest.engine != "local":
            raise ConfigError(
                f"data.sequences.{name}.history builds histories on one machine, but ingest.engine is "
                f"{config.ingest.engine}",
                hint=f"ingest.engine=local, or data.sequences.{name}.history.by=null with a log that has them",
            )
        if sequence.built and sequence.history.days is None and config.data.day is not None:
            raise ConfigError(
                f"data.sequences.{name}.history.days is null, but data.day={config.data.day} has the events of days "
                "before in datasets of their own, which are not kept for ever",
                hint=f"data.sequences.{name}.history.days=366, or data.day=null for the whole log",
            )
        path = f"model.sequences.{name}"
        block = config.model.sequence(name).block_at(path)
        if block.targeted and sequence.target is None:
            tables = [each.table for each in sequence.features.values() if each.table]
            others = [each.name for each in SEQUENCE_BLOCKS if not each.targeted]
            hint = f"'+{path}={{block: {others[0]}}}'"
            if tables:
                hint = f"data.sequences.{name}.target={tables[0]}, or {hint}"
            raise ConfigError(
                f"{path}.block is {block.name}, which compares events with a target, but data.sequences.{name}.target "
                "is null",
                hint=hint,
            )
        if block.ages and not sequence.timed:
            raise ConfigError(
                f"{path}.options.ages is true, but data.sequences.{name} has no times: events without times have no "
                "ages",
                hint=f"{path}.options.ages=false, or data.sequences.{name}.time=<column of the events' times>",
            )


def _check_tables(config: Config) -> None:
    # ``model.tables`` must name tables; a GPU's kernels need widths that are multiples of 4.
    data = config.data
    if data.format == "tables":
        tables = list(data.tables)
    else:
        tables = [name for name, feature in data.sparse.items() if not feature.table]
    tables += data.event_tables
    for name, table in config.model.tables.items():
        path = f"model.tables.{name}"
        if name in data.sparse and name not in tables:
            raise ConfigError(
                f"{path} is set, but feature {name!r} shares the table of {data.table_of(name)}, expected the settings "
                "there",
                hint=f"~{path}, and model.tables.{data.table_of(name)}",
            )
        # A configuration without features has no tables, since those of the dataset are not known here.
        if name not in tables and tables:
            near = difflib.get_close_matches(name, tables, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"model.tables names {name!r}, which is no table; the nearest is {near!r}",
                hint=f"~{path} +model.tables.{near}={{...}}",
            )
        if config.hardware.device == "cuda" and (table.dim or COLUMN_STEP) % COLUMN_STEP:
            raise ConfigError(
                f"{path}.dim is {table.dim}, expected a multiple of {COLUMN_STEP} on a GPU (FBGEMM's kernels)",
                hint=f"{path}.dim={-(-(table.dim or 1) // COLUMN_STEP) * COLUMN_STEP}",
            )


def _check_allowed(config: Config) -> None:
    for path in config.checkpoint.allow:
        # The name of a setting is a value here, and only keys are translated to their new names.
        if path in RENAMED:
            now = [RENAMED.get(each, each) for each in config.checkpoint.allow]
            raise ConfigError(
                f"checkpoint.allow names {path}, which is now {RENAMED[path]}",
                hint=f"checkpoint.allow=[{','.join(now)}]",
            )
        if path == "dataset":
            continue
        # Walk the values, not the types as ``find_place`` does, so that entries of dictionaries must exist.
        node: object = config
        for part in path.split("."):
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif part in getattr(node, "__dataclass_fields__", ()):
                node = getattr(node, part)
            else:
                raise ConfigError(
                    f"checkpoint.allow names {path!r}, expected settings such as train.lr, or dataset",
                    hint="checkpoint.allow=[train.lr]",
                )
