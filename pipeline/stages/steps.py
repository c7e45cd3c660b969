"""The steps of a run: the key and path of every stage's artifact.

``steps`` works out every key and path of a run at once: a key is made of keys, not of content.
"""

from __future__ import annotations

import dataclasses

from pipeline.config import Config
from pipeline.config.paths import with_first_names
from pipeline.errors import DataError
from pipeline.launch.run_records import write_steps
from pipeline.records.runs import Step, run_directory
from pipeline.specs import STAGES
from pipeline.specs.stage import Stage
from pipeline.stages.artifact_keys import code_of
from pipeline.stages.warm_start import with_former_batch
from pipeline.store.artifacts import Store
from pipeline.store.manifest import artifact_key


def steps(config: Config, store: Store, last: str | None = None, *, forced: bool = True) -> list[Step]:
    """The steps of the run ``config`` describes, in order. Raises DataError where the raw data is missing.

    ``last``: the stage to end with; None: all. ``forced``: False does not ask the store whether a forced training has a
    checkpoint directory of its own, so that steps can be shown where the store cannot be reached.
    """
    from pipeline.towers.assignment import check_partition, kept_together

    config = with_former_batch(config, store)
    if config.data.sparse:
        partition = kept_together(config.partition, config.data.shared_tables)
        check_partition(
            partition, config.plan, config.hardware.hosts, config.data.vectors, config.data.tables_of_sequences
        )
    made: dict[str, Step] = {}
    for stage in _stages_of(config):
        named = stage.named_settings(config, store, made)
        code = code_of(stage.settings, stage.revision, config)
        settings = with_first_names({**stage.key_settings(config), **named, **code})
        input_keys = {name: made[name].key for name in stage.inputs}
        key = artifact_key(stage.name, settings, input_keys)
        step = Step(
            name=stage.name,
            key=key,
            path=stage.path(config, key),
            config=settings,
            input_keys=input_keys,
            inputs={name: made[name].path for name in stage.inputs},
        )
        made[stage.name] = dataclasses.replace(step, scratch=stage.scratch(config, store, step, forced=forced))
        if stage.name == last:
            break
    return list(made.values())


def _stages_of(config: Config) -> list[Stage]:
    """The stages that run by default, those that ``config`` names, and what these read."""
    wanted = {stage.name for stage in STAGES if stage.by_default} | set(config.stages)
    for stage in reversed(list(STAGES)):
        wanted |= set(stage.inputs) if stage.name in wanted else set()
    return [stage for stage in STAGES if stage.name in wanted]


def with_possible_stages(config: Config) -> Config:
    """``config`` with the stages that are to run: a dataset of ``data.format=tables`` is made wherever it is read.

    It is the configuration in another form, so nobody should have to ingest it first. Raises DataError for stages
    that need its rows: it has none.
    """
    if config.data.format != "tables":
        return config
    named = [STAGES.get(name) for name in config.stages]
    idle = [stage.name for stage in named if stage.needs_rows]
    if idle:
        raise DataError(
            f"data={config.data.name} has data.format=tables, a list of tables without rows: it can be planned for, "
            f"but {idle[0]} needs click logs",
            hint="stages=[ingest,plan], or data=synthetic, data=criteo or data=parquet with logs of your own",
        )
    first = {name for stage in named for name in stage.inputs if not STAGES.get(name).inputs}
    return dataclasses.replace(config, stages=[name for name in STAGES.names() if name in {*config.stages, *first}])


def prepare(config: Config, store: Store) -> list[Step]:
    """Work the steps out and write ``config.yaml`` and ``steps.json`` of the run, for the ranks to read."""
    from pipeline.compose import to_yaml

    config = with_former_batch(config, store)
    made = steps(config, store)
    store.write_bytes(f"{run_directory(str(config.run))}/config.yaml", to_yaml(config).encode())
    write_steps(store, str(config.run), made)
    return made
