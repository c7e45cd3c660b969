"""The steps of a run: the key and path of every stage's artifact, and what ``force=true`` removes."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from pipeline.config import Config
from pipeline.config.renamed import with_first_names
from pipeline.core.errors import ArtifactError, DataError
from pipeline.launch.run_records import write_steps
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.stages.artifact_keys import code_of
from pipeline.stages.stage_inputs import read_dataset, with_former_batch
from pipeline.store.artifacts import Store
from pipeline.store.manifest import artifact_key
from pipeline.store.references import pins
from pipeline.store.removal import remove

# This file reserves the directory of a forced training before its first checkpoint.
MARKER = "forced.json"


def steps(config: Config, store: Store, last: str | None = None, *, forced: bool = True) -> list[Step]:
    """Work out the steps of the run that ``config`` describes, in order.

    Args:
        last: The stage to end with; None for all.
        forced: Whether to ask the store if a forced training has its own checkpoint directory. With False, steps can be
            shown when the store cannot be reached.

    Raises:
        DataError: The raw data is missing.
    """
    from pipeline.towers.assignment import check_partition, kept_together

    config = with_former_batch(config, store)
    data = config.data
    if data.sparse:
        partition = kept_together(config.partition, data.shared_tables)
        check_partition(partition, config.plan, config.hardware.hosts, data.vectors, data.tables_of_sequences)

    # These are the stages that run by default, those that the configuration names, and their inputs. Going backwards,
    # one pass finds all of them, since a stage only reads from earlier ones.
    wanted = set(config.stages)
    for stage in reversed(list(STAGES)):
        if stage.by_default or stage.name in wanted:
            wanted.update([stage.name, *stage.inputs])

    # A key is made of keys, not of content, so all of them are known before the first stage has run.
    made: dict[str, Step] = {}
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        named = stage.named_settings(config, store, made)
        code = code_of(stage.settings, stage.revision, config)
        settings = with_first_names({**stage.key_settings(config), **named, **code})
        input_keys, inputs = dict[str, str](), dict[str, str]()
        for name in stage.inputs:
            input_keys[name], inputs[name] = made[name].key, made[name].path
        key = artifact_key(stage.name, settings, input_keys)
        step = Step(
            name=stage.name,
            key=key,
            path=stage.path(config, key),
            config=settings,
            input_keys=input_keys,
            inputs=inputs,
        )
        made[stage.name] = replace(step, scratch=stage.scratch(config, store, step, forced=forced))
        if stage.name == last:
            break
    return list(made.values())


def prepare(config: Config, store: Store) -> list[Step]:
    """Determine the steps and write ``config.yaml`` and ``steps.json`` of the run, for the ranks to read."""
    from pipeline.config.compose import to_yaml

    config = with_former_batch(config, store)
    made = steps(config, store)
    store.write_bytes(f"{run_directory(str(config.run))}/config.yaml", to_yaml(config).encode())
    write_steps(store, str(config.run), made)
    return made


def planning_inputs(config: Config, store: Store) -> tuple[DatasetSchema, Profile]:
    """Read schema and profile of the dataset that ``config`` describes; ArtifactError if the store lacks it."""
    artifact = store.find(steps(config, store, last="ingest")[0].path)
    if artifact is None:
        raise ArtifactError(
            f"no dataset of {config.data.name!r} with these settings in store {config.store}: planning needs its "
            f"schema and profile",
            hint="nightjar ingest with the same data settings makes it",
        )
    return read_dataset(store, artifact)


def with_possible_stages(config: Config) -> Config:
    """Return ``config`` with the stages to run: a dataset of ``data.format=tables`` is made where it is read.

    Such a dataset is the configuration in another form, so nobody should have to ingest it first.

    Raises:
        DataError: A stage needs the rows of a dataset that has none.
    """
    if config.data.format != "tables":
        return config
    named = list(map(STAGES.get, config.stages))
    for stage in named:
        if stage.needs_rows:
            raise DataError(
                f"data={config.data.name} has data.format=tables, a list of tables without rows: it can be planned "
                f"for, but {stage.name} needs click logs",
                hint="stages=[ingest,plan], or data=synthetic, data=criteo or data=parquet with logs of your own",
            )
    wanted = set(config.stages)
    for stage in named:
        # Add only the inputs that need no other stage, such as the dataset.
        wanted.update(name for name in stage.inputs if not STAGES.get(name).inputs)
    return replace(config, stages=[name for name in STAGES.names() if name in wanted])


def discard(store: Store, step: Step) -> Step:
    """Remove what ``step`` made before, manifests first, for ``force=true``; checkpoints that a version names stay.

    Returns:
        The step as it is to run now: if the former checkpoints of a training stay, it begins in a directory beside
        them.

    Raises:
        DamagedError: What versions name cannot be read, so nothing is removed.
    """
    from pipeline.checkpoint.retention import clear

    named = pins(store, run="") if step.scratch else {}
    remove(store, step.path)
    scratch = []
    for directory in step.scratch:
        parent, _, name = directory.rpartition("/")
        base = name.partition(".")[0]
        stays = False
        for each in store.names(parent):
            # These are ``<key>``, forced trainings (``<key>.2``), and last checkpoints in another coding (``-int8``).
            if each == base or each.startswith((f"{base}.", f"{base}-")):
                stays |= bool(clear(store, f"{parent}/{each}", named)) and each == name
        if stays:
            directory = f"{parent}/{base}.{1 + _last_number(store, f'{parent}/{base}')}"
            store.write_json(f"{directory}/{MARKER}", {"created": time.time()})
        scratch.append(directory)
    return replace(step, scratch=tuple(scratch))


def current_directory(store: Store, directory: str) -> str:
    """Return where the training with checkpoints in ``directory`` continues: there, or beside it once it was forced.

    That is the highest number, so later attempts and later commands resume from its own checkpoints alone.
    """
    number = _last_number(store, directory)
    if number == 1:
        return directory
    return f"{directory}.{number}"


def _last_number(store: Store, directory: str) -> int:
    # Returns the highest number that a forced training with checkpoints beside ``directory`` was given; 1 if there is
    # none.
    parent, _, base = directory.rpartition("/")
    last = 1
    for name in store.names(parent):
        match = re.fullmatch(rf"{re.escape(base)}\.(\d+)", name)
        if match is not None:
            # Compare by number, since "10" comes before "2" in the order of names.
            last = max(last, int(match[1]))
    return last
