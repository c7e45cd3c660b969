"""The judging part of the publish stage: models are opened and score the same held-out rows, and the gate decides."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np

from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, OtherCodeError, UnreachableError
from pipeline.publishing import versions
from pipeline.publishing.promotion import better_by_record
from pipeline.records.dataset import LABEL, MISSING_ROW, UNSEEN_ROW, DatasetSchema
from pipeline.records.gate import GATE, Best, Former, GateRecord
from pipeline.records.model_version import CALIBRATOR
from pipeline.records.record import read
from pipeline.records.result import IngestPart
from pipeline.records.runs import Step
from pipeline.records.towers import Towers
from pipeline.specs.gate_check import ScoredRows, ScoredTask, SliceColumn
from pipeline.stages.calibrating import calibrator_of
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact
from pipeline.units import MIB

LOGITS = "logits.npy"


@dataclasses.dataclass(frozen=True)
class WrittenModel:
    """The model as written: tables by name, values that are not finite by table or parameter, number of members."""

    tables: dict[str, Any]
    not_finite: dict[str, int]
    members: int = 1


def judge_version(
    config: Config, store: Store, step: Step, inputs: dict[str, Artifact], draft: Draft, written: WrittenModel
) -> GateRecord | None:
    """Score the version in ``draft`` beside the others; returns the gate's record on rank 0. Collective.

    Args:
        inputs: The artifacts of the earlier stages, by name.
        draft: The version, whose files are written but for its calibrator. Where one is asked for, it is fitted on some
            of the held-out rows and written, and the other rows are judged with it.
    """
    from pipeline.evaluation.gate.gate import judge
    from pipeline.evaluation.gate.measure import measure
    from pipeline.serving.scores import serving_cost
    from pipeline.stages.sharing import score_on_ranks
    from pipeline.training.parquet import SplitReader

    # 1. All ranks score the held-out rows: as the candidate serves them, the incumbent, the best of the last versions.
    split = SplitReader(store, inputs["ingest"], "test")
    split.spread(config.gate.max_rows)
    owners = {column.name: column.owner for column in split.schema.sparse}
    codes = owners.keys() | {sequence.name for sequence in split.schema.sequences}
    features = [
        name for name in dict.fromkeys([*config.gate.slices, config.publish.calibrator.slices]) if name in codes
    ]
    incumbent = cast(str | None, step.config.get("incumbent"))
    with _open_models(config, store, draft.path, inputs["ingest"], incumbent) as opened:
        looked_up = owners | {column.name: column.owner for column in split.schema.event_columns}
        trained = {name: written.tables[table].trained for name, table in looked_up.items()}
        scores = score_on_ranks(split, opened.models, trained, features)
        worth = _measure_importance(config, store, inputs, split, opened.models["candidate"][0])
        if scores is None:
            return None
        if written.members > 1:
            layouts = {name: table.layout for name, table in written.tables.items()}
            worth["cost"] = serving_cost(split, opened.models, layouts, written.members)

    # 2. Rank 0 goes on alone: a share of the rows fits the calibrator, where one is asked for.
    whole = {}
    for name, parts in scores.logits.items():
        whole[name] = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    fitted = calibrator_of(config, split, whole["candidate"], scores.codes)
    raw = _main_task(whole["candidate"])
    if fitted is not None:
        draft.write_json(CALIBRATOR, fitted.record.to_json())
        whole["candidate"] = fitted.logits

    # 3. The other rows, or all of them, are what the gate looks at.
    logits = {name: _main_task(each) for name, each in whole.items()}
    scored = ScoredRows(
        labels=split.column(LABEL),
        candidate=logits["candidate"],
        incumbent=logits.get("incumbent"),
        best=logits.get("best"),
        baseline=None if incumbent else _score_baseline(config, store, inputs["ingest"], split),
        trained=_main_task(_trained_logits(store, inputs["evaluate"], split)),
        slices=_slice_columns(config, store, inputs["ingest"], split, scores.codes),
        tasks=_score_tasks(split, opened.models, whole),
        weights=split.row_weights(),
    )
    if fitted is not None:
        scored = dataclasses.replace(scored, uncalibrated=raw, calibrated=fitted.about).select_rows(fitted.others)

    # 4. Figures, what else publishing knows, and the verdict.
    record = measure(scored, config.gate, config.seed)
    best = opened.best
    if best is not None and record.best is not None:
        best = dataclasses.replace(record.best, version=best.version, notes=best.notes)
    known = dataclasses.replace(
        record,
        best=best,
        incumbent_version=incumbent,
        weights_not_finite=written.not_finite,
        coverage=scores.coverage(),
        former=_former_figures(config, store, incumbent),
        not_comparable=opened.problem or None,
        young_labels=_explain_young_labels(inputs["ingest"]),
        **worth,
    )
    return judge(known, config.gate, scored)


def _score_tasks(split: Any, models: dict[str, Any], logits: dict[str, np.ndarray]) -> dict[str, Any]:
    """The further tasks of the dataset as candidate and incumbent score them; an incumbent may lack some."""
    labels, weights, scored = split.labels(), split.row_weights(), {}
    known: dict[str, str] = {}
    if "incumbent" in models:
        known = models["incumbent"][0].description.tasks or {}
    for place, task in enumerate(split.schema.tasks, start=1):
        incumbent = None
        if known.get(task.name) == task.kind:
            incumbent = logits["incumbent"][:, 1 + list(known).index(task.name)]
        scored[task.name] = ScoredTask(task.kind, labels[task.name], logits["candidate"][:, place], incumbent, weights)
    return scored


def _measure_importance(
    config: Config, store: Store, inputs: dict[str, Artifact], split: Any, candidate: Any
) -> dict[str, Any]:
    """The candidate's features and towers by importance, as entries of the record; none where it is not asked for.

    Collective.
    """
    from pipeline.stages.sharing import importance_on_ranks

    rows, schema = config.gate.importance_rows, split.schema
    if not rows or not split.rows:
        return {}
    features = [*schema.dense, *(column.name for column in schema.sparse)]
    alone = {name: [name] for name in features}
    for sequence in schema.sequences:
        alone[sequence.name] = [column.name for column in sequence.columns]
    worth = {"importance": importance_on_ranks(split, candidate, alone, rows, config.seed)}
    towers = read(Towers, store, f"{inputs['partition'].path}/towers.json")
    if not towers.is_flat:
        groups = {}
        for number, tower in enumerate(towers.towers):
            groups[f"tower {number}"] = [column for name in tower.features for column in alone[name]]
        worth["tower_importance"] = importance_on_ranks(split, candidate, groups, rows, config.seed)
    return worth


def _main_task(logits: Any) -> Any:
    """The main task's logits [n] of those of one or several tasks; None of None."""
    return logits if logits is None or logits.ndim == 1 else np.ascontiguousarray(logits[:, 0])


@dataclasses.dataclass
class _OpenModels:
    """The ``models`` to score, each with its translation.

    ``problem``: why the incumbent is not among them ("": it is, or there is none). ``best``: for the record, without
    figures; None where it is not asked for.
    """

    models: dict[str, Any]
    problem: str = ""
    best: Best | None = None


@contextlib.contextmanager
def _open_models(config: Config, store: Store, path: str, dataset: Artifact, incumbent: Any) -> Iterator[_OpenModels]:
    """Candidate, incumbent and the best of the versions before it, opened to score rows; the candidate uncalibrated.

    Collective: each rank opens all of them.
    """
    from pipeline.serving.incumbent_features import NotComparableError
    from pipeline.stages.sharing import open_version, translated

    memory = int(config.publish.cache_mib * MIB)
    with contextlib.ExitStack() as stack:

        def open_other(version: str) -> Any:
            path = versions.version_path(config.model_name, version)
            translation = translated(store, dataset.path, path, config.checkpoint.allow)
            return stack.enter_context(open_version(store, path, memory)), translation

        candidate = stack.enter_context(open_version(store, path, memory, calibrate=False))
        opened = _OpenModels({"candidate": (candidate, None)})
        if incumbent:
            _require_sound(config, store, incumbent)
            try:
                opened.models["incumbent"] = open_other(incumbent)
            except NotComparableError as error:
                opened.problem = str(error)
            except OtherCodeError as error:  # what is installed would score as a model that never served
                opened.problem = error.message
        if incumbent and config.gate.best_of_last > 1:
            opened.best = _open_best(config, store, incumbent, open_other, opened.models)
        yield opened


def _open_best(
    config: Config, store: Store, incumbent: str, open_model: Callable[[str], Any], models: dict[str, Any]
) -> Best:
    """Put the best of the last versions under "best" of ``models``, where it is another one than the incumbent.

    One that is gone, damaged or cannot be scored is noted, and the next best is taken: no night fails by it.
    """
    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.serving.incumbent_features import NotComparableError
    from pipeline.stages.sharing import require_sound

    notes, count = list[str](), config.gate.best_of_last
    by_record = run_on_rank0(
        "looking for better versions", lambda: better_by_record(store, config.model_name, incumbent, count)
    )
    for version in by_record:
        path = versions.version_path(config.model_name, version)
        try:
            if not run_on_rank0(f"looking for {version}", partial(_is_there, store, path)):
                notes.append(f"{version}, which was better by its record, is gone")
                continue
            require_sound(store, path)
            models["best"] = open_model(version)
            return Best(version=version, notes=tuple(notes))
        except UnreachableError:
            raise
        except (ArtifactError, NotComparableError) as error:
            notes.append(f"{version}, which was better by its record, cannot be scored: {error}")
    return Best(version=incumbent, notes=tuple(notes))


def _is_there(store: Store, path: str) -> bool:
    """Whether a version is committed at ``path``."""
    return store.find(path) is not None


def _score_baseline(config: Config, store: Store, dataset: Artifact, test: Any) -> np.ndarray | None:
    """Logits that a quick simple model, trained on the train rows, gives the rows of ``test``; None: not asked for."""
    from pipeline.evaluation.baseline import Baseline
    from pipeline.serving.scores import row_blocks
    from pipeline.training.parquet import SplitReader

    train = SplitReader(store, dataset, "train")
    if config.gate.min_baseline_gain is None or not train.rows:
        return None
    train.spread(config.gate.max_rows)
    simple = Baseline({column.name: column.rows for column in train.schema.sparse}, len(train.schema.dense))
    simple.fit(row_blocks(train))
    return np.concatenate([np.zeros(0, np.float32), *(simple.score(block) for block in row_blocks(test))])


def _require_sound(config: Config, store: Store, incumbent: str) -> None:
    """Every byte of the incumbent is read: figures of a damaged one would let a bad candidate through. Collective."""
    from pipeline.stages.sharing import require_sound

    try:
        require_sound(store, versions.version_path(config.model_name, incumbent))
    except ArtifactError as error:
        hint = f"nightjar rollback {config.model_name}, which the gate then compares with"
        raise ArtifactError(error.message, hint=hint) from None


def _trained_logits(store: Store, evaluated: Artifact, split: Any) -> np.ndarray | None:
    """What the trained model gave the rows of ``split``; None where its evaluation kept no logits."""
    if LOGITS not in evaluated.files:
        return None
    store.verify(evaluated, LOGITS)
    with store.open(f"{evaluated.path}/{LOGITS}") as source:
        logits = np.load(io.BytesIO(source.read()), allow_pickle=False)
    return np.concatenate([logits[group.first : group.first + group.rows] for group in split.groups])


def _slice_columns(
    config: Config, store: Store, dataset: Artifact, split: Any, codes: dict[str, list[np.ndarray]]
) -> Any:
    """The columns of ``gate.slices``: sparse features by their ids, other columns of the dataset by their numbers."""
    columns = {}
    for name in config.gate.slices:
        if name in codes:
            names = slice_names(store, dataset, split.schema, name)
            columns[name] = SliceColumn(codes=np.concatenate(codes[name]), names=names)
            continue
        try:
            columns[name] = SliceColumn(codes=split.column(name).astype(np.int64))
        except (ArtifactError, KeyError):
            raise ConfigError(
                f"gate.slices names {name!r}, expected sparse features or another column of the dataset",
                hint=f"gate.slices=[{next(iter(config.data.sparse))}]",
            ) from None
    return columns


def slice_names(store: Store, dataset: Artifact, schema: DatasetSchema, name: str) -> dict[int, str]:
    """What the values of a slice of feature ``name``, or of a sequence's lengths, are called."""
    from pipeline.serving.scores import length_names

    for sequence in schema.sequences:
        if sequence.name == name:
            return length_names(sequence)
    owners = {column.name: column.owner for column in schema.sparse}
    return id_names(store, dataset, owners.get(name, name))


def id_names(store: Store, dataset: Artifact, feature: str) -> dict[int, str]:
    """What the rows of a feature's table are called: raw ids, where the dataset keeps them."""
    import pyarrow.parquet as pq

    names = {MISSING_ROW: "(missing)", UNSEEN_ROW: "(unseen or rare)"}
    file = f"vocab/{feature}.parquet"
    if file in dataset.files:
        with store.open(f"{dataset.path}/{file}") as source:
            table = pq.read_table(source, columns=["row", "id"])
        names |= dict(zip(table["row"].to_pylist(), map(str, table["id"].to_pylist()), strict=True))
    return names


def _explain_young_labels(dataset: Artifact) -> str | None:
    """That clicks of the dataset's rows may still come, in words; None where its labels are final."""
    part = IngestPart.from_json(dataset.summary)
    if not part.labels_young:
        return None
    return (
        f"labels have the clicks until {part.labels_until} and are final with those of {part.labels_final}: all "
        "figures are of young labels"
    )


def _former_figures(config: Config, store: Store, incumbent: Any) -> Former | None:
    """What the gate found of the incumbent when it was published."""
    from pipeline.evaluation.gate.measure import former_figures

    if not incumbent:
        return None
    path = f"{versions.version_path(config.model_name, incumbent)}/{GATE}"
    return former_figures(read(GateRecord, store, path)) if store.exists(path) else None
