"""The publish stage's gate: models score the same rows, a share of them fits the calibrator, the gate decides.

The rows are those of split ``test`` (only some row groups if it has more than ``gate.max_rows``), scored anew by the
versions as they serve. The figures of stage evaluate decide nothing; only its logits are read, to compare the version
with what was trained.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Config
from pipeline.config.gate import GateConfig
from pipeline.core.errors import ArtifactError, ConfigError, OtherCodeError, UnreachableError
from pipeline.core.units import MIB
from pipeline.publishing import versions
from pipeline.publishing.promotion import better_by_record
from pipeline.records.dataset import LABEL, MISSING_ROW, SPLIT_HOUR, UNSEEN_ROW, DatasetSchema
from pipeline.records.error_budget import BudgetLedger
from pipeline.records.gate import GATE, PASS, Best, Calibrated, Former, GateRecord
from pipeline.records.model_version import CALIBRATOR, CalibrationCurve, CalibratorRecord
from pipeline.records.record import read
from pipeline.records.result import IngestPart
from pipeline.records.runs import Step
from pipeline.specs.gate_check import ScoredRows, ScoredTask, SliceColumn
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.evaluation.gate.budget import LedgerFile
    from pipeline.training.parquet import SplitReader

LOGITS = "logits.npy"


@dataclass(frozen=True)
class WrittenModel:
    """The model as written: tables by name, values that are not finite by table or parameter, number of members."""

    tables: dict[str, Any]
    not_finite: dict[str, int]
    members: int = 1


def judge_version(
    config: Config, store: Store, step: Step, inputs: dict[str, Artifact], draft: Draft, written: WrittenModel
) -> GateRecord | None:
    """Score the version in ``draft`` and the others; returns the gate's record on rank 0. Collective.

    Args:
        inputs: The artifacts of the earlier stages, by name.
        draft: The version, whose files are all written except for its calibrator. If one is asked for, it is fitted on
            some of the held-out rows and written, and the other rows are judged with it.
    """
    from pipeline.evaluation.gate.budget import judge_within_budget
    from pipeline.evaluation.gate.measure import measure
    from pipeline.serving.scores import serving_cost
    from pipeline.stages.release_ranks import score_on_ranks
    from pipeline.training.parquet import SplitReader

    # 1. Score the held-out rows on all ranks, as candidate, incumbent and the best of the last versions serve them.
    ledger = _open_ledger(config, store)  # opened first, so that an unreadable one costs no scores
    dataset = inputs["ingest"]
    split = SplitReader(store, dataset, "test")
    split.spread(config.gate.max_rows)
    owners = {column.name: column.owner for column in split.schema.sparse}
    sliceable = owners.keys() | {sequence.name for sequence in split.schema.sequences}
    sliced_by = dict.fromkeys([*config.gate.slices, config.publish.calibrator.slices])
    features = [name for name in sliced_by if name in sliceable]
    incumbent = cast(str | None, step.config.get("incumbent"))
    with _open_models(config, store, draft.path, dataset, incumbent) as opened:
        looked_up = owners | {column.name: column.owner for column in split.schema.event_columns}
        trained_rows = {name: written.tables[table].trained for name, table in looked_up.items()}
        scores = score_on_ranks(split, opened.models, trained_rows, features)
        measured = _measure_importance(config, store, inputs, split, opened.models["candidate"][0])
        if scores is None:
            return None
        if written.members > 1:
            layouts = {name: table.layout for name, table in written.tables.items()}
            measured["cost"] = serving_cost(split, opened.models, layouts, written.members)

    # 2. Fit the calibrator on a share of the rows, if one is asked for. Rank 0 continues alone from here.
    logits = {name: np.concatenate(parts or [np.zeros(0, np.float32)]) for name, parts in scores.logits.items()}
    uncalibrated = main_task(logits["candidate"])
    fitted = fit_calibrator(config, split, logits["candidate"], scores.codes)
    if fitted is not None:
        draft.write_json(CALIBRATOR, fitted.record.to_json())
        logits["candidate"] = fitted.logits

    # 3. Select the other rows, or all of them, for the gate to judge by.
    scored = ScoredRows(
        labels=split.column(LABEL),
        candidate=main_task(logits["candidate"]),
        incumbent=main_task(logits.get("incumbent")),
        best=main_task(logits.get("best")),
        baseline=None if incumbent else _score_baseline(config, store, dataset, split),
        trained=main_task(_trained_logits(store, inputs["evaluate"], split)),
        slices=_slice_columns(config, store, dataset, split, scores.codes),
        tasks=_score_tasks(split, opened.models, logits),
        weights=split.row_weights(),
        users=number_groups(config, split),
        users_by=config.evaluate.group_by,
    )
    if fitted is not None:
        scored = replace(scored, uncalibrated=uncalibrated, calibrated=fitted.about).select_rows(fitted.judged)

    # 4. Measure figures, add what else publishing knows, and take the verdict.
    record = measure(scored, config.gate, config.seed)
    best = opened.best
    if best is not None and record.best is not None:
        best = replace(record.best, version=best.version, notes=best.notes)
    record = replace(
        record,
        best=best,
        incumbent_version=incumbent,
        weights_not_finite=written.not_finite,
        coverage=scores.coverage(),
        former=_read_former(config, store, incumbent),
        not_comparable=opened.problem or None,
        young_labels=_explain_young_labels(dataset),
        **measured,
    )
    name, may_publish = draft.path.rpartition("/")[2], config.publish.judge_beside is None
    return judge_within_budget(record, config.gate, scored, ledger, _day_of(config), name, may_publish=may_publish)


def would_pass(held: GateRecord, settings: GateConfig, limits: GateConfig) -> bool:
    """Return whether a model that the gate held passes under other limits, by its record alone.

    Args:
        held: The record under ``settings``.
        limits: The other settings; a reason that overrides the gate does not count.

    Returns:
        Whether it passes; False, too, if the record does not tell why the model was held, because a check that measures
            its own rows did it.
    """
    from pipeline.evaluation.gate.gate import judge

    # Judge it again under its own limits, so that a difference is due to the limits and not to another release.
    again, other = judge(held, replace(settings, force=None)), judge(held, replace(limits, force=None))
    failed, failed_again = set[str](), set[str]()
    for record, names in ((held, failed), (again, failed_again)):
        names.update(check.name for check in record.checks if not check.passed)
    return failed == failed_again and other.verdict == PASS


def _open_ledger(config: Config, store: Store) -> LedgerFile | None:
    # Opens the ledger of gate.budget; None without a budget. Collective: if it cannot be read, all ranks end before
    # they score.
    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.evaluation.gate.budget import LedgerFile, check_day

    if config.gate.budget is None:
        return None
    check_day(_day_of(config), "data.day=")
    ledger = LedgerFile(store, f"{versions.model_path(config.model_name)}/{BudgetLedger.FILE}")
    run_on_rank0("reading the error budget", lambda: ledger.read().to_json())
    return ledger


def _read_former(config: Config, store: Store, incumbent: str | None) -> Former | None:
    # Reads what the incumbent's own record says about it.
    from pipeline.evaluation.gate.measure import former_figures

    path = f"{versions.version_path(config.model_name, incumbent or '')}/{GATE}"
    if not incumbent or not store.exists(path):
        return None
    return former_figures(read(GateRecord, store, path))


def _day_of(config: Config) -> date:
    # Returns the day of the rows, the last one of a range of days; if they have none, the clock's day.
    from pipeline.evaluation.gate.budget import utc_day

    if config.data.day is None:
        return utc_day()
    return date.fromisoformat(config.data.day.rpartition("..")[2])


def main_task(logits: Any) -> Any:
    """Return the main task's logits [n] from ``logits`` [n], or [n, T] of several tasks; None for None."""
    if logits is None or logits.ndim == 1:
        return logits
    return np.ascontiguousarray(logits[:, 0])


def _score_tasks(split: Any, models: dict[str, Any], logits: dict[str, np.ndarray]) -> dict[str, Any]:
    # Returns the dataset's further tasks as candidate and incumbent score them; an incumbent may lack some.
    labels, weights, scored = split.labels(), split.row_weights(), {}
    known: dict[str, str] = {}
    if "incumbent" in models:
        known = models["incumbent"][0].description.tasks or {}
    # Column 0 of the logits is the main task's; the incumbent's further ones are in its own order.
    columns = {name: column for column, name in enumerate(known, start=1)}
    for place, task in enumerate(split.schema.tasks, start=1):
        incumbent = None
        # Logits of a task of another kind mean something else, so they are not compared.
        if known.get(task.name) == task.kind:
            incumbent = logits["incumbent"][:, columns[task.name]]
        scored[task.name] = ScoredTask(task.kind, labels[task.name], logits["candidate"][:, place], incumbent, weights)
    return scored


def _measure_importance(
    config: Config, store: Store, inputs: dict[str, Artifact], split: Any, candidate: Any
) -> dict[str, Any]:
    # Returns the candidate's features and towers by importance, as entries of the record, if asked for. Collective.
    from pipeline.stages.release_ranks import importance_on_ranks
    from pipeline.stages.stage_inputs import read_trained_towers

    rows, schema = config.gate.importance_rows, split.schema
    if not rows or not split.rows:
        return {}
    columns = {}
    for name in (*schema.dense, *(column.name for column in schema.sparse)):
        columns[name] = [name]
    # The columns of a sequence are shuffled together; shuffling one alone would make up events.
    for sequence in schema.sequences:
        columns[sequence.name] = [column.name for column in sequence.columns]
    measured = {"importance": importance_on_ranks(split, candidate, columns, rows, config.seed)}
    towers = read_trained_towers(config, store, inputs)
    if not towers.is_flat:
        groups = {}
        for number, tower in enumerate(towers.towers):
            groups[f"tower {number}"] = list(chain.from_iterable(columns[name] for name in tower.features))
        measured["tower_importance"] = importance_on_ranks(split, candidate, groups, rows, config.seed)
    return measured


@dataclass
class _OpenModels:
    """The ``models`` to score, each with its translation.

    ``problem`` says why the incumbent is not among them ("": it is, or there is none). ``best`` is for the record,
    without figures; None if it is not asked for.
    """

    models: dict[str, Any]
    problem: str = ""
    best: Best | None = None


@contextlib.contextmanager
def _open_models(config: Config, store: Store, path: str, dataset: Artifact, incumbent: Any) -> Iterator[_OpenModels]:
    # Opens candidate (uncalibrated), incumbent and the best of the previous versions. Collective: each rank opens them
    # all.
    from pipeline.serving.incumbent_features import NotComparableError
    from pipeline.stages.release_ranks import open_version, require_sound, translated

    model, memory = config.model_name, int(config.publish.cache_mib * MIB)
    with contextlib.ExitStack() as stack:

        def open_other(version: str) -> Any:
            path = versions.version_path(model, version)
            translation = translated(store, dataset.path, path, config.checkpoint.allow)
            return stack.enter_context(open_version(store, path, memory)), translation

        candidate = stack.enter_context(open_version(store, path, memory, calibrate=False))
        opened = _OpenModels({"candidate": (candidate, None)})
        if incumbent:
            # Read every byte, since figures of a damaged incumbent would let a bad candidate through.
            try:
                require_sound(store, versions.version_path(model, incumbent))
            except ArtifactError as error:
                hint = f"nightjar rollback {model}, which the gate then compares with"
                raise ArtifactError(error.message, hint=hint) from None
            try:
                opened.models["incumbent"] = open_other(incumbent)
            except NotComparableError as error:
                opened.problem = str(error)
            except OtherCodeError as error:
                # The installed code computes another model, which was never in service.
                opened.problem = error.message
        if incumbent and config.gate.best_of_last > 1:
            opened.best = _open_best(config, store, incumbent, open_other, opened.models)
        yield opened


def _open_best(
    config: Config, store: Store, incumbent: str, open_model: Callable[[str], Any], models: dict[str, Any]
) -> Best:
    # Adds the best of the last versions to ``models`` as "best", if it is not the incumbent. One that is gone, damaged
    # or cannot be scored is noted, and the next best is taken, so that no night fails because of it.
    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.serving.incumbent_features import NotComparableError
    from pipeline.stages.release_ranks import require_sound

    def is_committed(path: str) -> bool:
        return store.find(path) is not None

    notes, model, count = list[str](), config.model_name, config.gate.best_of_last
    by_record = run_on_rank0("looking for better versions", lambda: better_by_record(store, model, incumbent, count))
    for version in by_record:
        path = versions.version_path(model, version)
        try:
            # Rank 0 answers for all, so that all ranks skip a version that is removed meanwhile.
            if not run_on_rank0(f"looking for {version}", partial(is_committed, path)):
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


def _score_baseline(config: Config, store: Store, dataset: Artifact, test: Any) -> np.ndarray | None:
    # Returns the logits that a quick simple model, trained on the train rows, gives the rows of ``test``; None: not
    # asked for.
    from pipeline.evaluation.baseline import Baseline
    from pipeline.serving.scores import row_blocks
    from pipeline.training.parquet import SplitReader

    train = SplitReader(store, dataset, "train")
    if config.gate.min_baseline_gain is None or not train.rows:
        return None
    train.spread(config.gate.max_rows)
    simple = Baseline({column.name: column.rows for column in train.schema.sparse}, len(train.schema.dense))
    simple.fit(row_blocks(train))
    # Include an empty array, since a split without rows has no blocks and ``concatenate`` needs at least one array.
    return np.concatenate([np.zeros(0, np.float32), *map(simple.score, row_blocks(test))])


def read_logits(store: Store, evaluation: Artifact) -> np.ndarray:
    """Read the trained model's logits [n], or [n, T] of several tasks, for the held-out rows, and verify the file."""
    store.verify(evaluation, LOGITS)
    with store.open(f"{evaluation.path}/{LOGITS}") as source:
        logits: np.ndarray = np.load(io.BytesIO(source.read()), allow_pickle=False)
    return logits


def _trained_logits(store: Store, evaluation: Artifact, split: Any) -> np.ndarray | None:
    # Returns the trained model's logits for the rows of ``split``; None if its evaluation kept no logits.
    if LOGITS not in evaluation.files:
        return None
    logits = read_logits(store, evaluation)
    return np.concatenate([logits[group.first : group.first + group.rows] for group in split.groups])


def _slice_columns(
    config: Config, store: Store, dataset: Artifact, split: Any, codes: dict[str, list[np.ndarray]]
) -> Any:
    # Returns the columns of ``gate.slices``: sparse features by their ids, other columns of the dataset by their
    # numbers.
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


def number_groups(config: Config, split: SplitReader) -> NDArray[np.int64] | None:
    """Number the groups of ``evaluate.group_by`` of held-out rows, -1 for none, [n]; None if rows have no groups."""
    feature = config.evaluate.group_by
    # A feature that is left out has no ids in the dataset.
    if feature is None or feature in config.data.leave_out:
        return None
    return split.number_ids(feature)


def slice_names(store: Store, dataset: Artifact, schema: DatasetSchema, name: str) -> dict[int, str]:
    """Return the names of a slice's values: raw ids for a sparse feature, if the dataset keeps them.

    The slices of a sequence are ranges of its length.
    """
    import pyarrow.parquet as pq

    from pipeline.serving.scores import length_names

    for sequence in schema.sequences:
        if sequence.name == name:
            return length_names(sequence)
    # Features that share a table have the vocabulary of its owner.
    owners = {column.name: column.owner for column in schema.sparse}
    names = {MISSING_ROW: "(missing)", UNSEEN_ROW: "(unseen or rare)"}
    file = f"vocab/{owners.get(name, name)}.parquet"
    if file in dataset.files:
        with store.open(f"{dataset.path}/{file}") as source:
            table = pq.read_table(source, columns=["row", "id"])
        names |= dict(zip(table["row"].to_pylist(), map(str, table["id"].to_pylist()), strict=True))
    return names


def _explain_young_labels(dataset: Artifact) -> str | None:
    # Says in words that clicks of the dataset's rows may still come; None if its labels are final.
    part = IngestPart.from_json(dataset.summary)
    if not part.labels_young:
        return None
    message = f"labels have the clicks until {part.labels_until} and are final with those of {part.labels_final}: "
    return message + "all figures are of young labels"


@dataclass(frozen=True)
class FittedCalibrator:
    """A calibrator, the candidate's ``logits`` of all rows with it, and the rows [n] that it was not fitted on.

    ``about`` is what the gate's record says of it, without figures. If logits are not finite, which the gate holds, it
    has no curves and was fitted on no rows.
    """

    record: CalibratorRecord
    logits: NDArray[np.float32]
    judged: NDArray[np.bool_]
    about: Calibrated | None = None


def fit_calibrator(
    config: Config, split: SplitReader, logits: NDArray[np.float32], codes: dict[str, list[NDArray[np.integer]]]
) -> FittedCalibrator | None:
    """Fit a model's calibrator on a share of the held-out rows; None if none is asked for.

    Args:
        logits: The model's logits of the rows of ``split``, [n], or [n, T] of several tasks.
        codes: Table rows of the slices' feature, by row group.

    Raises:
        DataError: The rows to fit on are of one class. A further task with such rows has no curve.
    """
    from pipeline.evaluation.calibration_curves import calibrated, fit_curve

    options, spec = config.publish.calibrator, config.publish.calibrator.spec
    if spec is None:
        return None
    record = CalibratorRecord(method=spec.name, share=options.share, slices=options.slices)
    # No curve can be fitted to logits that are not finite, and the gate holds such a model anyway.
    if not np.isfinite(logits).all():
        return FittedCalibrator(record, logits, np.ones(len(logits), bool))
    slices = None if options.slices is None else np.concatenate(codes[options.slices])
    hours = split.column(SPLIT_HOUR) if config.data.split.by == "hours" else None
    chosen = chosen_rows(split, options.share, config.seed, hours)
    weights = split.row_weights()

    # Collect labels [n] of every task in the order of the logits, NaN where missing; tasks without classes have no
    # curve.
    further, labels_of = split.labels(), {MAIN_TASK: split.column(LABEL)}
    for task in split.schema.tasks:
        labels_of[task.name] = np.full(split.rows, np.nan, np.float32)
        if LABEL_KINDS.get(task.kind).classes:
            labels_of[task.name] = further[task.name]
    columns = logits[:, None] if logits.ndim == 1 else logits
    curves = dict[str, CalibrationCurve]()
    for place, (name, labels) in enumerate(labels_of.items()):
        rows = np.flatnonzero(chosen & np.isfinite(labels))
        if name != MAIN_TASK and len(np.unique(labels[rows])) < 2:
            continue
        curves[name] = fit_curve(
            spec,
            labels[rows],
            columns[rows, place],
            None if weights is None else weights[rows],
            None if slices is None else slices[rows],
            options.slice_values,
        )

    record = replace(record, curves=curves)
    main = curves[MAIN_TASK]
    about = Calibrated(
        method=record.method,
        rows=main.rows,
        clicks=main.clicks,
        slices=record.slices,
        values=len(main.shifts or ()) if record.slices else None,
    )
    ids = {} if options.slices is None else {options.slices: slices}
    tasks = [task.name for task in split.schema.tasks]
    return FittedCalibrator(record, calibrated(record, tasks, logits, ids), ~chosen, about)


def chosen_rows(
    split: SplitReader, share: float, seed: int, hours: NDArray[np.floating] | None = None
) -> NDArray[np.bool_]:
    """Choose the rows [n] of ``split`` that the calibrator is fitted on: about ``share`` of them.

    Args:
        hours: [n], the hours of test rows that are the last hours of a day. The first of these hours fit the curve, so
            that it is judged as it will serve, by what comes later. Without hours, or with only one, rows are chosen by
            a hash of ``seed`` and number.
    """
    if hours is not None and len(hours) and hours.min() != hours.max():
        values, counts = np.unique(hours, return_counts=True)
        # The share of the rows up to each hour; the last hour, with all rows, is left out.
        before = np.cumsum(counts)[:-1] / len(hours)
        return np.asarray(hours <= values[int(np.argmin(np.abs(before - share)))])
    # Hash the rows' numbers by SplitMix64's finaliser (Steele et al. 2014), so that neighbours fall independently.
    numbers = [np.zeros(0, np.uint64)]
    for group in split.groups:
        # Number rows by place in the whole split, so that a row's choice does not depend on which groups are read.
        numbers.append(np.arange(group.first, group.first + group.rows, dtype=np.uint64))
    mixed = np.concatenate(numbers)
    with np.errstate(over="ignore"):
        mixed = (mixed + np.uint64(seed % 2**32 + 1) * np.uint64(2**32)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(32)) < np.uint64(round(share * 2.0**32)))
