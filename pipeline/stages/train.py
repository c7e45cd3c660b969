"""Stage train: the model trained on the dataset by the plan, and the checkpoints it goes on from.

A training has two keys. The one of its checkpoints says what a training must share with a checkpoint to go on from it.
Neither hardware nor plan: rows are stored by table and row number and the batches do not depend on the ranks, so a run
that lost its machines goes on with others. Nor its length: a training may be made longer. The finished training's key
covers these settings too, and those that say where it ends and how its last checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import units
from pipeline.config import Config
from pipeline.config.paths import with_first_names
from pipeline.records.ensemble import EnsemblePart
from pipeline.records.record import Record
from pipeline.records.result import CheckpointPart, LinkShare, Result, SsdPart, TrainPart, ValidationPart
from pipeline.records.runs import Step, run_directory
from pipeline.specs.stage import Stage, StageIO, Use, covered, use
from pipeline.stages.artifact_keys import code_of, optimizer_options
from pipeline.stages.partition import compares, has_towers, low_rank, probes, tower_settings
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact, artifact_key

CHECKPOINTS = "checkpoints"  # what the key of the checkpoints is made for
# Bits of a last checkpoint whose hottest rows are kept in 8 bits (``checkpoint.hot_share``).
FEW_BITS = ("auto", "2", "3", "4")


def _scheduled(config: Config) -> bool:
    return config.train.schedule != "constant"


def _warm(config: Config) -> bool:
    return config.checkpoint.init_from is not None


def _few_bits(config: Config) -> bool:
    return config.checkpoint.final_quantise in FEW_BITS


def _averages(config: Config) -> bool:
    return config.train.average.active


def _validates(config: Config) -> bool:
    return config.data.split.validates


def _auto_bits(config: Config) -> bool:
    return config.checkpoint.final_quantise == "auto"


def _snapshots(config: Config) -> bool:
    return config.train.snapshots.active


# What its numbers depend on, whatever the ranks, the threads and the kernels.
CONTINUATION = (
    use("", "seed"),
    use("partition", "name exchange"),
    use("partition", "towers", when=has_towers, named=True),
    use("partition", "strategy pins groups module c p dim cross_layers", when=has_towers),
    use("partition", "rank", when=low_rank),
    use("partition", "probe probe_rows imbalance", when=compares),
    use("partition", "probe_steps", when=probes),
    use("model", "*"),
    use("data.sequences", "*.target"),
    use("train", "global_batch lr sparse_lr dense_optimizer sparse_optimizer weight_decay"),
    *optimizer_options(),
    use("train.average", "kind decay start every use", when=_averages),
    use("train.validate", "every_steps monitor min_delta patience cycle_epochs lr_drops lr_factor", when=_validates),
    use("train", "embedding_l2 label_smoothing mode"),
    use("train.tasks", "*.weight"),
    use("train", "warmup_steps schedule precision shuffle shuffle_window_groups lanes"),
    use("train.clip", "dense_norm table_value"),
    use("train", "decay_ratio min_lr_factor", when=_scheduled),
    # The length says where a cycle ends, so a longer training is another one.
    use("train", "epochs max_steps", when=_snapshots),
    use("train.snapshots", "count kind perturbation", when=_snapshots),
    use("checkpoint", "init_from", when=_warm, named=True),
    use("checkpoint", "init_tables_only rename", when=_warm),
)


def continuation_settings(config: Config) -> dict[str, Any]:
    """What of the configuration the key of the checkpoints covers."""
    settings = covered(CONTINUATION, config)
    settings["partition"] |= tower_settings(config)
    return with_first_names({**settings, **code_of(CONTINUATION, Train.revision, config)})


def continuation_key(config: Config, init: Any, dataset: str) -> str:
    """The key of the checkpoints of a training on the dataset with key ``dataset``.

    ``init``: what the train step covers of the checkpoint it starts from, None where there is none.
    """
    start = {} if init is None else {"init": init}
    return artifact_key(CHECKPOINTS, {**continuation_settings(config), **start}, {"ingest": dataset})


# Where it ends, and how its last checkpoint is written: a training goes on through a change of these.
END = (
    use("train", "epochs max_steps"),
    use("train.snapshots", "keep choose weights", when=_snapshots),
    use("checkpoint", "final_quantise state"),
    use("checkpoint", "hot_share", when=_few_bits),
    use("checkpoint", "expected_restores", when=_auto_bits),
)


class Train(Stage):
    """The training and its checkpoints."""

    name = "train"
    help = "train the model on the dataset with the plan"
    inputs = ("ingest", "plan", "partition")
    needs_rows = True
    distributed = True
    trains = True
    settings = (*CONTINUATION, *END)

    def keys(self) -> dict[str, tuple[Use, ...]]:
        """Its checkpoints' key, and its own, which covers the settings of both."""
        return {CHECKPOINTS: CONTINUATION, self.name: END}

    def key_settings(self, config: Config) -> dict[str, Any]:
        """The settings, and the number of towers."""
        settings = super().key_settings(config)
        settings["partition"] |= tower_settings(config)
        return settings

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """The checkpoint that training starts from; ArtifactError where there is none, ConfigError: it does not go."""
        from pipeline.stages.warm_start import covered_init

        return {"init": covered_init(config, store, made["ingest"].key)} if _warm(config) else {}

    def scratch(self, config: Config, store: Store, step: Step, *, forced: bool) -> tuple[str, ...]:
        """Where the checkpoints lie; a forced training may have a directory of its own."""
        from pipeline.stages.cleanup import current_directory

        key = continuation_key(config, step.config.get("init"), step.input_keys["ingest"])
        place = f"{run_directory(str(config.run))}/checkpoints/{key[:10]}"
        return (current_directory(store, place) if forced else place,)

    def modules(self, config: Config) -> tuple[str, ...]:
        """The training loop."""
        return ("pipeline.training.trainer",)

    def seconds_to_end(self, config: Config) -> float:
        """A checkpoint is committed first."""
        return config.checkpoint.grace_seconds

    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Train on this rank, from the newest checkpoint on; ``train.json`` has the figures."""
        from pipeline.checkpoint.index import committed
        from pipeline.stages.read import is_first_rank, read_towers
        from pipeline.stages.warm_start import init_artifact
        from pipeline.store.retrying import retried
        from pipeline.training.settings import TrainingSettings
        from pipeline.training.trainer import train

        key, place = continuation_key(config, step.config.get("init"), step.input_keys["ingest"]), step.scratch[0]
        before = retried(lambda: committed(store, place), f"listing {store.url_of(place)}")
        plan, towers = read_towers(config, store, inputs, before)
        init = init_artifact(step, config, store)
        summary = train(
            TrainingSettings.of(config),
            store,
            inputs["ingest"],
            plan,
            place,
            key,
            io.interval,
            init,
            io.on_point,
            plan_key=inputs["plan"].key,
            towers=towers,
        )
        if not is_first_rank():
            return None
        with self.draft(store, step) as draft:
            draft.write_json("train.json", summary)
            return draft.commit(summary)

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The training's figures and its checkpoints'."""
        kinds: dict[str, type[Record]] = {"train": TrainPart, "checkpoint": CheckpointPart}
        return {name: kind.from_json(summary[name]) for name, kind in kinds.items() if summary.get(name)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """Speed, memory and phases of the training; count and bytes of its checkpoints."""
        lines = {} if result.train is None else {"train": _train_lines(result.train)}
        return lines if result.checkpoint is None else {**lines, "checkpoint": _checkpoint_lines(result.checkpoint)}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        """Steps, time, memory and traffic of the training; bytes and stalls of its checkpoints."""
        part, saved = result.train or TrainPart(), result.checkpoint or CheckpointPart()
        sent, resumed = part.bytes_per_sample or LinkShare(), part.resumed
        return [
            ("Training steps", units.count(part.steps)),
            ("Training samples", units.count(part.samples)),
            ("Steps before this session", units.count(resumed.step if resumed else None)),
            ("Training time", units.duration(part.seconds)),
            ("Ranks", units.count(part.world_size)),
            *_look_facts(part.validation),
            *_ensemble_facts(part.ensemble),
            ("Peak memory", units.size(part.peak_rss_bytes)),
            *_ssd_facts(part.ssd),
            ("Embeddings between hosts, bytes per sample", units.count(sent.inter_host)),
            ("Embeddings within hosts, bytes per sample", units.count(sent.intra_host)),
            ("Dense gradients between hosts, bytes per sample", units.count(sent.dense_inter_host)),
            ("Checkpoints written", units.count(saved.count)),
            ("Checkpoint bytes", units.size(saved.bytes_written)),
            ("Bytes of as many full ones", units.size(saved.bytes_full_equivalent)),
            ("Stalled by checkpoints", units.percent(saved.stall_share)),
            ("Checkpoints skipped", units.count(saved.skipped or None)),
            ("Checkpoints failed", units.count(saved.failed or None)),
        ]


def _ssd_facts(part: SsdPart | None) -> list[tuple[str, str]]:
    if part is None:
        return []
    return [
        ("Lookups of tables on SSD that did not wait", units.percent(part.ssd_hit_rate)),
        ("Their rows in the device's memory", units.percent(part.ssd_device_share)),
        ("Their rows in host memory behind it", units.percent(part.ssd_host_share or None)),
        ("Read from SSD, bytes per step", units.size(part.ssd_read_bytes)),
        ("Written to SSD, bytes per step", units.size(part.ssd_written_bytes)),
    ]


def _look_facts(part: ValidationPart | None) -> list[tuple[str, str]]:
    if part is None:
        return []
    return [
        ("Validation rows", units.count(part.rows)),
        ("Validations", units.count(part.looks)),
        ("Best after step", units.count(part.best_step)),
        ("Best validation NE", units.decimal(part.ne, 5)),
        ("Learning rates lowered", units.count(part.lr_drops)),
        ("Time for validation", units.duration(part.seconds)),
    ]


def _ensemble_facts(part: EnsemblePart | None) -> list[tuple[str, str]]:
    if part is None:
        return []
    return [
        ("Members of the ensemble", f"{units.count(len(part.members))} of {units.count(part.made)} snapshots"),
        ("Their validation NE together", units.decimal(part.ne, 5)),
        ("That of the best one alone", units.decimal(part.best_ne, 5)),
        ("That of as many newest ones", units.decimal(part.last_ne, 5)),
        ("Time for choosing them", units.duration(part.seconds)),
    ]


def _ensemble_lines(part: EnsemblePart | None) -> list[str]:
    """A line about the members of an ensemble; none without one."""
    if part is None:
        return []
    steps = ", ".join(each.checkpoint.rpartition("-")[2].lstrip("0") for each in part.members)
    return [
        f"ensemble of {units.count(len(part.members))} of {units.count(part.made)} snapshots, after steps {steps}: "
        f"validation NE {units.decimal(part.ne, 5)}, {units.decimal(part.best_ne, 5)} the best one alone"
    ]


def _train_lines(part: TrainPart) -> list[str]:
    from pipeline.report.tables import phase_lines

    wait = f"{units.percent(part.data_wait_share)} of the time waiting for data"
    return [
        *_trained(part),
        f"{units.count(part.samples_per_s)} samples/s, {wait}",
        f"peak memory {units.size(part.peak_rss_bytes)}",
        *([] if part.ensemble is not None else _looked(part.validation, part.steps)),
        *_ensemble_lines(part.ensemble),
        *_sent_per_sample(part),
        *phase_lines(part),
    ]


def _trained(part: TrainPart) -> list[str]:
    """Samples and steps of the whole training; after a resume also of this session, whose rates follow."""
    samples, steps, resumed = part.samples, part.steps, part.resumed
    time = f"{units.duration(part.seconds)} on {units.plural(part.world_size, 'rank')}"
    whole = f"{units.count(samples)} samples in {units.plural(steps, 'step')}"
    if not resumed or not units.known(samples) or not units.known(steps):
        return [f"{whole}, {time}"]
    session = units.plural(steps - resumed.step, "step")
    rates = f", with the rates of {units.count(resumed.planned)} planned steps until then" if resumed.planned else ""
    return [
        f"{whole} in all, resumed after step {units.count(resumed.step)}{rates}",
        f"this session: {units.count(samples - resumed.samples)} samples in {session}, {time}",
    ]


def _looked(part: ValidationPart | None, steps: int | None) -> list[str]:
    """Lines about the looks at validation rows: the best one, and whether they ended the training."""
    if part is None:
        return []
    lines = [
        f"validation NE {units.decimal(part.ne, 5)}   AUC {units.decimal(part.auc, 5)} on "
        f"{units.count(part.rows)} rows",
        f"the best of {units.plural(part.looks, 'look')}: after step {units.count(part.best_step)}, "
        f"epoch {units.decimal(part.best_epoch, 2)}",
    ]
    if part.start_ne is not None:
        lines.append(f"validation NE before training {units.decimal(part.start_ne, 5)}")
    if part.stopped:
        lines.append(f"training stopped by itself after step {units.count(steps)}: no later look was better")
    return lines


def _sent_per_sample(part: TrainPart) -> list[str]:
    """A line about the bytes that embeddings cost a sample, by class of link; none where one rank trained."""
    sent = part.bytes_per_sample or LinkShare()
    within, between = sent.intra_host, sent.inter_host
    if not units.known(within) or not units.known(between) or not within + between:
        return []
    return [f"embeddings sent per sample: {units.size(between)} between hosts, {units.size(within)} within"]


def _checkpoint_lines(part: CheckpointPart) -> list[str]:
    written, full = part.bytes_written, part.bytes_full_equivalent
    saved = f" of {units.size(full)} for full ones" if units.known(full) and full != written else ""
    lines = [
        f"{units.count(part.count)} written, {units.size(written)}{saved}, "
        f"training stalled {units.percent(part.stall_share)}"
    ]
    if skipped := part.skipped:
        lines.append(f"{units.count(skipped)} skipped, for the one before was still being written")
    if failed := part.failed:
        lines.append(f"{units.count(failed)} failed, their rows went into the next")
    return lines


SPEC = Train()
