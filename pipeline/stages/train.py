"""Stage train: the model trained on the dataset by the plan, and the checkpoints that it resumes from.

A training has two keys. The key of its checkpoints says what a training must share with a checkpoint to resume from it.
It covers neither hardware nor plan: rows are stored by table and row number and the batches do not depend on the ranks,
so a run that lost its machines continues on others. Nor does it cover the length: a training may be made longer. The
finished training's key covers these settings too, and those that say where it ends and how its last checkpoint is
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config import Config
from pipeline.config.renamed import with_first_names
from pipeline.records.result import CheckpointPart, Result, TrainPart
from pipeline.records.runs import Step, run_directory
from pipeline.specs.stage import Stage, StageIO, Use, covered, use
from pipeline.stages.artifact_keys import code_of, optimizer_options
from pipeline.stages.distillation import TEACHER, covered_teacher, score_train_rows
from pipeline.stages.partition import (
    chooses,
    compares,
    has_towers,
    low_rank,
    probes,
    reads_rows,
    tower_settings,
)
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact, artifact_key

CHECKPOINTS = "checkpoints"  # what the key of the checkpoints is made for
INIT = "init"  # the entry of the step's key for ``checkpoint.init_from``


def _warm(config: Config) -> bool:
    return config.checkpoint.init_from is not None


def _learns_from_teacher(config: Config) -> bool:
    return config.train.distill.weight > 0


def _snapshots(config: Config) -> bool:
    return config.train.snapshots.active


# The settings that a training's numbers depend on, whatever the ranks, the threads and the kernels.
CONTINUATION = (
    use("", "seed"),
    use("partition", "name exchange"),
    use("partition", "towers", when=has_towers, named=True),
    use("partition", "strategy pins groups module c p dim cross_layers", when=has_towers),
    use("partition", "rank", when=low_rank),
    use("partition", "auto max_ne_loss", when=chooses),
    use("partition", "probe imbalance", when=compares),
    use("partition", "probe_rows", when=reads_rows),
    use("partition", "probe_steps", when=probes),
    use("model", "*"),
    use("data.sequences", "*.target"),
    use("train", "global_batch lr sparse_lr dense_optimizer sparse_optimizer weight_decay"),
    *optimizer_options(),
    use("train.average", "kind decay start every use", when=lambda config: config.train.average.active),
    use(
        "train.validate",
        "every_steps monitor min_delta patience cycle_epochs lr_drops lr_factor",
        when=lambda config: config.data.split.validates,
    ),
    use("train", "embedding_l2 label_smoothing mode"),
    use("train.tasks", "*.weight"),
    use("train.rank_loss", "kind weight group_by keep_groups", when=lambda config: config.train.rank_loss.active),
    use("train.distill", "weight"),
    use("train.distill", "teacher", named=True),
    use("train", "warmup_steps schedule precision shuffle shuffle_window_groups lanes"),
    use("train.clip", "dense_norm table_value"),
    use("train", "decay_ratio min_lr_factor", when=lambda config: config.train.schedule != "constant"),
    # The length says where a cycle ends, so a longer training is another one.
    use("train", "epochs max_steps", when=_snapshots),
    use("train.snapshots", "count kind perturbation", when=_snapshots),
    use("checkpoint", "init_from", when=_warm, named=True),
    use("checkpoint", "init_tables_only rename", when=_warm),
)


def continuation_settings(config: Config) -> dict[str, Any]:
    """Return what the key of the checkpoints covers of the configuration."""
    settings = covered(CONTINUATION, config)
    # The key has the actual number of towers: ``partition.towers`` may be automatic, in which case it depends on the
    # hosts.
    settings["partition"] |= tower_settings(config)
    return with_first_names({**settings, **code_of(CONTINUATION, Train.revision, config)})


def continuation_key(config: Config, step: Step) -> str:
    """Return the key of the checkpoints of the training of ``step``, on its dataset.

    It covers what the step names: the checkpoint that it starts from and its teacher, if there are such.
    """
    settings = dict(continuation_settings(config))
    for name in (INIT, TEACHER):
        # None is left out, so that trainings without a teacher keep the keys of releases that knew none.
        if step.config.get(name) is not None:
            settings[name] = step.config[name]
    return artifact_key(CHECKPOINTS, settings, {"ingest": step.input_keys["ingest"]})


# Where a training ends, and how its last checkpoint is written; it continues through a change of these.
END = (
    use("train", "epochs max_steps"),
    use("train.snapshots", "keep choose weights", when=_snapshots),
    use("checkpoint", "final_quantise state"),
    use("checkpoint", "hot_share", when=lambda config: "hot_share" in config.checkpoint.final_settings),
    use("checkpoint", "expected_restores", when=lambda config: "expected_restores" in config.checkpoint.final_settings),
)


class Train(Stage):
    """The stage: the training and its checkpoints."""

    name = "train"
    help = "train the model on the dataset with the plan"
    inputs = ("ingest", "plan", "partition")
    needs_rows = True
    distributed = True
    trains = True
    settings = (*CONTINUATION, *END)

    def keys(self) -> dict[str, tuple[Use, ...]]:
        """Return the settings of its checkpoints' key, and of its own, which covers those of both."""
        return {CHECKPOINTS: CONTINUATION, self.name: END}

    def key_settings(self, config: Config) -> dict[str, Any]:
        settings = super().key_settings(config)
        settings["partition"] |= tower_settings(config)
        return settings

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """Name the checkpoint that training starts from, and its teacher.

        Raises:
            ArtifactError: There is no such checkpoint or version.
            ConfigError: The checkpoint is incompatible with the settings.
        """
        from pipeline.stages.stage_inputs import covered_init

        named: dict[str, Any] = {}
        if _warm(config):
            named[INIT] = covered_init(config, store, made["ingest"].key)
        if _learns_from_teacher(config):
            named[TEACHER] = covered_teacher(config, store)
        return named

    def scratch(self, config: Config, store: Store, step: Step, *, forced: bool) -> tuple[str, ...]:
        # The directory of the training's checkpoints, in which it finds the newest one when it is resumed.
        from pipeline.stages.steps import current_directory

        key = continuation_key(config, step)
        place = f"{run_directory(str(config.run))}/checkpoints/{key[:10]}"
        return (current_directory(store, place) if forced else place,)

    def modules(self, config: Config) -> tuple[str, ...]:
        return ("pipeline.training.trainer",)

    def seconds_to_end(self, config: Config) -> float:
        # This is the time to commit a checkpoint before the process ends.
        return config.checkpoint.grace_seconds

    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Train on this rank, from the newest checkpoint on; ``train.json`` has the figures."""
        from pipeline.checkpoint.collectives import this_rank
        from pipeline.checkpoint.index import committed
        from pipeline.core.retrying import retried
        from pipeline.stages.stage_inputs import init_artifact, read_towers
        from pipeline.training.config_settings import select_training_settings
        from pipeline.training.trainer import train

        key = continuation_key(config, step)
        directory = step.scratch[0]
        checkpoints = retried(lambda: committed(store, directory), f"listing {store.url_of(directory)}")
        plan, towers = read_towers(config, store, inputs, checkpoints)
        teacher = None
        if _learns_from_teacher(config):
            teacher = score_train_rows(config, store, step, inputs["ingest"])
        summary = train(
            select_training_settings(config),
            store,
            inputs["ingest"],
            plan,
            directory,
            key,
            io.interval,
            init_artifact(step, config, store),
            io.on_point,
            plan_key=inputs["plan"].key,
            towers=towers,
            teacher=teacher,
        )
        if teacher is not None:
            summary["train"]["teacher"] = teacher.config["version"]
        if this_rank() != 0:
            return None
        with self.draft(store, step) as draft:
            draft.write_json("train.json", summary)
            return draft.commit(summary)

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if summary.get("train"):
            parts["train"] = TrainPart.from_json(summary["train"])
        if summary.get("checkpoint"):
            parts["checkpoint"] = CheckpointPart.from_json(summary["checkpoint"])
        return parts

    def lines(self, result: Result) -> dict[str, list[str]]:
        from pipeline.report.stage_figures import checkpoint_lines, train_lines

        lines = {}
        if result.train is not None:
            lines["train"] = train_lines(result.train)
        if result.checkpoint is not None:
            lines["checkpoint"] = checkpoint_lines(result.checkpoint)
        return lines

    def facts(self, result: Result) -> list[tuple[str, str]]:
        from pipeline.report.stage_figures import train_facts

        return train_facts(result.train or TrainPart(), result.checkpoint or CheckpointPart())


SPEC = Train()
