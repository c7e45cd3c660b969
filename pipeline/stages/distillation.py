"""The teacher of a training (``train.distill``): which version it is, and its scores of the train rows.

A version scores all train rows once, before the first step, as ``nightjar predict`` would: with its own id mapping and
scales, tables as published, and its calibrator. The scores lie in the run's folder as an artifact, in the order of the
dataset's rows, so that any number of ranks and every resumed training learns from the same bits.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

from pipeline.config import Config
from pipeline.core.errors import ConfigError, OtherCodeError
from pipeline.core.units import MIB
from pipeline.records.runs import Step, run_directory
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact, artifact_key

TEACHER = "teacher"  # a folder of a run, and the name under which the train key has the version
log = logging.getLogger(__name__)


def covered_teacher(config: Config, store: Store) -> dict[str, str] | None:
    """Return what the train key covers of ``train.distill.teacher``: the version's name and key.

    The version in service changes when this run publishes, and also by other runs. So a run that continues keeps the
    teacher that it recorded, unless it starts from another checkpoint by now. A run that is forced never learns from
    its own versions, which know the labels of these rows.

    Returns:
        The name and key; None if no version is named and no other run's version has served yet.

    Raises:
        ArtifactError: There is no such version, and this run did not begin with it.
    """
    from pipeline.publishing import promotion, versions
    from pipeline.stages.stage_inputs import recorded_training

    model, name = config.model_name, config.train.distill.teacher or config.publish.judge_beside
    former, covered = recorded_training(config, store)
    recorded: dict[str, str] | None = None if config.force else covered.get(TEACHER)
    if name is not None:
        # If the version was removed since, the run still has its scores.
        kept = recorded is not None and recorded["version"] == name
        if kept and store.find(versions.version_path(model, name)) is None:
            return recorded
        return _described(versions.find_version(store, model, name))
    continues = (
        former is not None
        and former.train.distill.teacher is None
        and former.checkpoint.init_from == config.checkpoint.init_from
    )
    if continues and not config.force and TEACHER in covered:
        return recorded
    # This raises an error if the version in service is missing.
    promotion.incumbent(store, model)
    for served in reversed(promotion.read_current(store, model).line):
        version = store.find(versions.version_path(model, served))
        if version is not None and version.summary.get("run") != config.run:
            return _described(version)
    return None


def _described(version: Artifact) -> dict[str, str]:
    return {"version": version.path.rpartition("/")[2], "key": version.key}


def score_train_rows(config: Config, store: Store, step: Step, dataset: Artifact) -> Artifact | None:
    """Return the teacher's scores of the train rows of ``dataset``, computed if this run has none. Collective.

    Returns:
        The artifact; None if the training has no teacher, in which case the log says why.

    Raises:
        ArtifactError: The version is damaged.
        ConfigError: ``train.distill.teacher`` names a version that cannot score these rows.
    """
    from pipeline.checkpoint.collectives import log_on_rank0, run_on_rank0
    from pipeline.training.distributed import connect, shared_failure

    connect(config.hardware, config.train.threads_per_rank, one_machine=config.launch.name == "local")
    teacher = cast(dict[str, str] | None, step.config.get(TEACHER))
    model = config.model_name
    if teacher is None:
        log_on_rank0(log.info, "teacher    no earlier version of model %r served: trained on labels alone", model)
        return None
    key = artifact_key(TEACHER, teacher, {"ingest": dataset.key})
    path = f"{run_directory(str(config.run))}/{TEACHER}/{key}"
    # A training went on without a teacher that could not score the rows, and goes on so when it is resumed. Where there
    # was no such training, look again: what the message advises, such as checkpoint.allow, may have been done.
    again = config.force or config.train.distill.teacher is not None

    def is_known() -> bool:
        found = store.find(path)
        return found is not None and not (again and found.summary["problem"])

    with shared_failure():
        if not run_on_rank0("looking for the teacher's scores", is_known):
            _write_scores(config, store, dataset, teacher, path, key)
    scores = store.get(path, TEACHER)
    problem = scores.summary["problem"]
    if problem and config.train.distill.teacher is not None:
        raise ConfigError(
            f"train.distill.teacher={teacher['version']} cannot teach this training: {problem}",
            hint=f"train.distill.weight=0, or another version: nightjar models ls {model}",
        )
    if problem:
        log_on_rank0(log.warning, "teacher    %s cannot teach, so labels alone do: %s", teacher["version"], problem)
        return None
    log_on_rank0(log.info, "teacher    %s, %.0f %% of the loss", teacher["version"], 100 * config.train.distill.weight)
    return scores


def _write_scores(
    config: Config, store: Store, dataset: Artifact, teacher: dict[str, str], path: str, key: str
) -> None:
    # Collective. If the teacher is merely the version in service and cannot score the rows, this is no error, since no
    # night may fail because of it. The failure is recorded, so that a resumed training has no teacher either.
    import numpy as np

    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.publishing.versions import version_path
    from pipeline.serving.incumbent_features import NotComparableError
    from pipeline.stages.release_gate import main_task
    from pipeline.stages.release_ranks import open_version, require_sound, score_on_ranks, translated
    from pipeline.training.parquet import SCORES, SplitReader

    version = version_path(config.model_name, teacher["version"])
    split = SplitReader(store, dataset, "train")
    require_sound(store, version)
    logits, problem = np.zeros(0, np.float32), ""
    try:
        translation = translated(store, dataset.path, version, config.checkpoint.allow)
        if translation.raw:
            features = ", ".join(translation.raw)
            raise NotComparableError(f"it knows {features} in another scale, and train rows have no raw numbers")
        # Train rows also lack the hashes of rare ids, so for the teacher these are ids that it has no row for.
        sparse = dict(translation.sparse)
        for name, change in translation.sparse.items():
            if change is not None:
                sparse[name] = replace(change, unseen=False)
        with open_version(store, version, int(config.publish.cache_mib * MIB)) as model:
            scores = score_on_ranks(split, {TEACHER: (model, replace(translation, sparse=sparse))}, {}, [])
        # Only rank 0, which writes the scores, has them.
        if scores is not None:
            logits = np.concatenate([logits, *map(main_task, scores.logits[TEACHER])])
            bad = int((~np.isfinite(logits)).sum())
            if bad:
                problem = f"{bad:,} of its scores are not finite"
    except (NotComparableError, OtherCodeError) as error:
        problem = str(error)

    def write() -> None:
        with store.draft(path, kind=TEACHER, key=key, config=teacher, inputs={"ingest": dataset.key}) as draft:
            if not problem:
                with draft.open(SCORES) as sink:
                    np.lib.format.write_array(sink, logits, allow_pickle=False)
            draft.commit({"rows": split.rows, "problem": problem})

    run_on_rank0("writing the teacher's scores", write)
