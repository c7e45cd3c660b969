"""Scores held-out rows: with a checkpoint for reports, and with the model in training for guards and its level."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.warm import check_order, feature_order
from pipeline.embeddings.sharding import whole_tables_pay
from pipeline.embeddings.single_rank_lookup import bypass_exchange
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.workers import Workers
from pipeline.evaluation.metrics import compute_member_shares, compute_ne
from pipeline.models.layers.jagged import EVEN_ROWS, EventWeights, fillers
from pipeline.records.dataset import BY_LOGIT, LABEL, NEGATIVE_RATE, ROW_WEIGHT, DatasetSchema
from pipeline.records.ensemble import Member
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.batches import BatchReader
from pipeline.training.distributed import connect, shared_failure, workers_of
from pipeline.training.guards import GuardFigures
from pipeline.training.memory import open_row_store
from pipeline.training.model import assemble
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import BatchSampler, Order, shuffle_key
from pipeline.training.sequence_vectors import SequenceEncoders
from pipeline.training.settings import PredictionSettings
from pipeline.training.shared_memory import memory_between
from pipeline.training.step import StepExecutor

# NE of this many rows is known within a percent.
JUDGED_ROWS = 1 << 16
# The number of batches after which ranks that score alone wait for each other.
MEETING = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Predictions:
    """Labels, logits and (where known) true click probabilities of all test rows, float32 [rows], in row order.

    With further ``tasks``, logits are [rows, T], the main task's first, and the tasks' labels are by name, NaN where
    missing. ``weights`` are those of the rows, None where the dataset has none. ``attention`` is that of an example
    row, by sequence.
    """

    labels: np.ndarray
    logits: np.ndarray
    true_probability: np.ndarray | None
    tasks: dict[str, np.ndarray] = field(default_factory=dict)
    weights: np.ndarray | None = None
    attention: dict[str, EventAttention] = field(default_factory=dict)


def predict(
    settings: PredictionSettings,
    store: Store,
    dataset: Artifact,
    plan: Plan,
    checkpoint: str,
    towers: Towers | None = None,
    members: Sequence[Member] = (),
) -> Predictions | None:
    """Compute the logits of the checkpoint at path ``checkpoint`` for the test rows; on rank 0, None elsewhere.

    ``members`` are those of an ensemble, whose weighted logits are added up; without any, the checkpoint scores alone.

    Every rank calls it. Raises DataError where there are no test rows, ArtifactError for a bad checkpoint.
    """
    device = connect(settings.hardware, settings.train.threads_per_rank, one_machine=settings.one_machine)
    with shared_failure():
        split = SplitReader(store, dataset, "test")
        with open_row_store(settings.hardware, store, plan) as row_store:
            workers = workers_of(settings.hardware)
            global_batch = even_batch(settings.global_batch, workers.count)
            if row_store is not None and row_store.cached:
                # The SSD cache has slots for the rows of a batch of the plan, not of a larger one.
                global_batch = min(global_batch, plan.global_batch)
            order = Order(
                key=shuffle_key(dataset),
                seed=settings.seed,
                global_batch=global_batch,
                shuffle=False,
                lanes=workers.count,
                rank=dist.get_rank(),
                world_size=workers.count,
                without=workers.world - workers.count,
            )
            flat = towers is None or towers.is_flat
            alone = flat and device.type == "cpu" and _scores_alone(settings, plan, split.rows)
            # If there are several ranks, each has whole tables. The reader and ``score`` call such ranks independent.
            whole = alone and dist.get_world_size() > 1
            sharded = assemble(
                settings, split.schema, plan, towers, device, trained=False, row_store=row_store, whole=whole
            )
            if alone:
                bypass_exchange(sharded.model)
            exchanging: Callable[[], AbstractContextManager[None]] = nullcontext
            memory = None if alone else memory_between(device, settings, sharded.towers)
            if memory is not None:
                exchanging = memory.exchanging
            target = RestoreTarget(sharded.rows, dict(dense_parameters(sharded.model)), states=False)
            parts = []
            # Towers also process the events of other ranks' rows, so only a flat model is watched.
            histories = sharded.dense_part.histories if sharded.towers is None else None
            # Only the first pass is watched: in an ensemble, that of the first member.
            with watching(histories) as seen:
                for path in [each.checkpoint for each in members] or [checkpoint]:
                    with BatchReader(split, order, pin=device.type == "cuda", independent=whole) as reader:
                        state = restore(store, store.get(path, "train"), target)
                        check_order(state.order, feature_order(split.schema), path)
                        with exchanging():
                            parts.append(score(sharded.model, reader, device, workers, independent=whole))
        logits = parts[0]
        if logits is None:
            return None
        if len(parts) > 1:
            weights = np.asarray([each.weight for each in members])
            shares = compute_member_shares(weights, len(split.schema.tasks)).astype(np.float32)
            # Add in the members' order, so that the sum has the same bits wherever it is computed.
            logits = np.asarray(sum(map(operator.mul, parts, shares)), np.float32)
        # The rows of this rank in the first batch, from which the example rows are chosen.
        rows = BatchSampler(order, split.groups).owned(0, order.rank, order.world_size)
        return Predictions(
            split.column(LABEL),
            logits,
            split.true_probability(),
            split.labels(),
            split.row_weights(),
            seen.examples(rows),
        )


def _scores_alone(settings: PredictionSettings, plan: Plan, rows: int) -> bool:
    # Whether each rank scores its part of the rows without the others: it is the only one, or has all tables.
    if plan.world_size == 1:
        return True
    # Other exchanges round embeddings, so scores without an exchange would differ.
    exact = settings.partition.exchange == "fp32"
    pays = exact and whole_tables_pay(plan, settings.hardware, rows // plan.world_size)
    # Each machine was measured for itself, so ranks may differ.
    alone = all(all_gather_records(pays))
    if alone and dist.get_rank() == 0:
        log.info("all %d tables are on every rank, which scores its rows without the others", len(plan.tables))
    return alone


def even_batch(rows: int, ranks: int) -> int:
    """Return the smallest number, at least ``rows``, that gives each rank a multiple of ``EVEN_ROWS`` rows.

    Kernels multiply the last few rows of a matrix in other steps, whose sums may differ in the last bit. Without such
    remaining rows, a row's logit does not depend on the number of ranks.
    """
    return -(-rows // (ranks * EVEN_ROWS)) * EVEN_ROWS * ranks


def score(
    model: torch.nn.Module, reader: BatchReader, device: torch.device, workers: Workers, *, independent: bool = False
) -> np.ndarray | None:
    """Compute the logits of all rows of the ``reader``'s unshuffled split, in row order: on rank 0, None elsewhere.

    Collective, on ranks without samples too. Returns float32 [rows], or [rows, T] with several tasks. ``independent``:
    the model needs nothing of other ranks, which only meet every ``MEETING`` batches.
    """
    model.eval()
    # Embedding hosts hold the tables in host memory, so ids stay there whichever device the dense part is on.
    input_device = torch.device("cpu") if workers.remote else device
    scored = []
    with torch.no_grad():
        for number, batch in enumerate(reader, start=1):
            _, output = model(batch.to(input_device, non_blocking=True))
            scored.append(output[0].float())
            # All ranks have equally many batches. The barrier keeps them close together, so that a failure of one soon
            # reaches the others, and none waits at the end for as long as a collective may take.
            if independent and number % MEETING == 0:
                dist.barrier()
    if not workers.here:
        return None

    # Reorder [batches, b] of each of W workers to [batches, W, b] on rank 0; with several tasks there is a last
    # dimension T.
    local = torch.stack(scored)
    parts = [torch.empty_like(local) for _ in workers.ranks] if dist.get_rank() == 0 else None
    dist.gather(local, parts, group=workers.group)
    if parts is None:
        return None
    sampler, found = reader.sampler, torch.stack(parts, dim=1).cpu().numpy()
    logits = np.empty((sampler.rows, *found.shape[3:]), np.float32)
    for batch_number, ranks in enumerate(found):
        for rank, own in enumerate(ranks):
            # Padding follows a rank's own rows, and no take reaches it.
            at = 0
            for take in sampler.takes(batch_number, rank, len(ranks)):
                count = take.stop - take.start
                logits[sampler.places(take)] = own[at : at + count]
                at += count
    return logits


def score_published(executor: StepExecutor, split: SplitReader, order: Order) -> np.ndarray | None:
    """Score ``split`` with the model in training, as it would be published; returns as ``score``. Collective.

    Training continues as if nothing had been scored. Its pipeline must be empty: see ``StepExecutor.must_drain``.
    """
    device = next(iter(executor.dense.values())).device
    with (
        executor.looking() as model,
        torch.compiler.set_stance("force_eager"),
        BatchReader(split, replace(order, shuffle=False, lanes=order.world_size), pin=device.type == "cuda") as reader,
    ):
        return score(model, reader, device, executor.workers)


def judge_train_rows(executor: StepExecutor, train: SplitReader, order: Order) -> GuardFigures:
    """Evaluate the model in training on ``JUDGED_ROWS`` train rows from evenly spread row groups. Collective."""
    rows = SplitReader(train.store, train.dataset, "train")
    rows.spread(JUDGED_ROWS)
    logits = score_published(executor, rows, order)
    figures: dict[str, float | None] | None = None
    if logits is not None:
        main, labels, weights = main_logits(logits), rows.column(LABEL), rows.row_weights()
        counted = labels if weights is None else labels[weights > 0]
        figures = {"ne": None, "logit_std": float(main.std())}
        # NE is not defined for rows of one class.
        if 0 < int((counted == 1).sum()) < len(counted):
            figures["ne"] = compute_ne(main, labels, weights)
    return GuardFigures(rows=f"{rows.rows:,} train rows", **all_gather_records(figures)[0])


def main_logits(logits: np.ndarray) -> np.ndarray:
    """Return the main task's logits, [rows], from ``logits`` of one or of several tasks."""
    return logits if logits.ndim == 1 else np.ascontiguousarray(logits[:, 0])


# The example is a row with at most this many events, if the first batch has one.
MOST_EVENTS = 12


@dataclass(frozen=True)
class EventAttention:
    """``weights`` float32 [L] of the events of row ``row`` of the split, the oldest first, averaged over the heads.

    ``target`` is the weight of the target, where the block treats it as one more event.
    """

    row: int
    weights: np.ndarray
    target: float | None = None


@dataclass
class Watched:
    """The observations of the first batch, by sequence: each event's sample, and the events' weights [m, H]."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def examples(self, rows: int) -> dict[str, EventAttention]:
        """Choose a row for each sequence whose block has weights, among the ``rows`` first samples of the batch."""
        examples = {}
        for name, parts in self.weights.items():
            # A block without weights, such as a mean, has nothing to show.
            if parts:
                # Average the weights over the heads.
                weights = torch.cat(parts).float().mean(1).cpu()
                examples[name] = _example(self.rows[name].cpu(), weights, rows)
        return examples


@contextmanager
def watching(histories: SequenceEncoders | None) -> Iterator[Watched]:
    """Record the first pass of ``histories``; with None there is nothing to record."""
    seen, hooks = Watched(), list[Any]()
    if histories is not None:
        for name, vector in histories.vectors.items():
            hooks += _watch_weights(vector, seen.weights.setdefault(name, []))

        def end(module: SequenceEncoders, given: tuple[Any, ...], made: Tensor) -> None:
            seen.rows.update(zip(module.vectors, given[1], strict=True))
            # Remove the hooks after the first pass: later ones, of other batches or members, run without them.
            while hooks:
                hooks.pop().remove()

        hooks.append(histories.register_forward_hook(end))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _watch_weights(vector: torch.nn.Module, into: list[Tensor]) -> list[Any]:
    # Weights are kept for each pass: a block may process its events in parts (``train.max_events``), one pass each.
    events = samples = 0

    def before(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal events, samples
        _, rows, _, samples = given
        events = len(rows)

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        # If the lengths differ, every sample's target follows its events.
        alone = len(made) == events + fillers(events, samples)[0]
        into.append(made.detach()[: events if alone else events + samples])

    hooks = [vector.register_forward_pre_hook(before)]
    for module in vector.modules():
        if isinstance(module, EventWeights):
            hooks.append(module.register_forward_hook(keep))
    return hooks


def _example(sample: Tensor, weights: Tensor, rows: int) -> EventAttention:
    # Chooses the sample with the most events, but at most ``MOST_EVENTS`` if possible; ``sample`` is that of each
    # event.
    lengths = torch.bincount(sample)
    among = lengths[:rows]
    # Among samples beyond ``MOST_EVENTS``, shorter ones are better.
    fits = torch.where(among <= MOST_EVENTS, among, -among)
    # ``argmax`` returns the first of equal ones.
    row = int(fits.numpy().argmax())
    # This is 1 where every sample's target follows its events, else 0.
    behind = (len(weights) - len(sample)) // len(lengths)
    start = int(lengths[:row].sum()) + behind * row
    end, target = start + int(lengths[row]), None
    if behind:
        target = float(weights[end])
    return EventAttention(row, weights[start:end].numpy().astype(np.float32), target)


# The level of this many rows is known within a few thousandths.
MOST_ROWS = 1 << 20
# The number of times that the interval which holds the level is halved.
_HALVINGS = 60
# The interval extends this far beyond the largest logit, where all predictions are 0 or 1.
_REACH = 40.0


def ends_with_level(schema: DatasetSchema) -> bool:
    """Whether a training on such rows ends with ``calibrate_last_bias``: if its loss uses the logits of kept rows."""
    return schema.sampled == BY_LOGIT and not schema.tasks


def calibrate_last_bias(executor: StepExecutor, train: SplitReader, order: Order) -> dict[str, list[float]]:
    """Set the last bias of the model of ``executor``, of one task, to the ``level_of`` the train rows. Collective.

    Of more than ``MOST_ROWS`` rows, evenly spread row groups are used. Where an average is published, its bias is set.

    Returns:
        The values that the level replaced, by name of the parameter: training continues with them.
    """
    rows = SplitReader(train.store, train.dataset, "train")
    rows.spread(MOST_ROWS)
    device = next(iter(executor.dense.values())).device
    with executor.looking() as model, torch.compiler.set_stance("force_eager"):
        before = {name: parameter.detach().clone() for name, parameter in executor.dense.items()}
        executor.dense_part.start_at([0.0])
        with BatchReader(rows, replace(order, shuffle=False), pin=device.type == "cuda") as reader:
            logits = score(model, reader, device, executor.workers)
        level: float | None = None
        if logits is not None:
            # Use the rate of the kept rows, to which training fits the model. At the true rate the level would be 3 %
            # too high: kept rows without a click would stand for those that were left out, to which it was not fitted.
            kept = logits.astype(np.float64) - np.log(rows.column(NEGATIVE_RATE).astype(np.float64))
            weights = rows.column(ROW_WEIGHT) if rows.schema.row_weights else None
            level = level_of(rows.column(LABEL), kept, weights)
        level = all_gather_records(level)[0]
        executor.dense_part.start_at([level])
        moved = [name for name, parameter in executor.dense.items() if not torch.equal(parameter, before[name])]
    if dist.get_rank() == 0:
        log.info("the last bias is %.4f, by the clicks of %s train rows", level, f"{rows.rows:,}")
    return {name: before[name].flatten().tolist() for name in moved}


@torch.no_grad()
def restore_last_bias(executor: StepExecutor, former: Mapping[str, list[float]]) -> None:
    """Restore what ``calibrate_last_bias`` returned; a published average must still be in place of the weights."""
    for name, values in former.items():
        parameter = executor.dense[name]
        parameter.copy_(torch.tensor(values, dtype=parameter.dtype).view_as(parameter))


def level_of(
    labels: NDArray[np.float32], logits: NDArray[np.float64], weights: NDArray[np.float32] | None = None
) -> float:
    """Return what to add to ``logits`` so that probabilities add up to the clicks of ``labels``; all [rows].

    Clicks count as at least half a click and at most half a row less than all, since no finite level gives none or all.
    """
    clicked = (labels > 0).astype(np.float64)
    counts = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    total = float(counts.sum())
    clicks = min(max(float(counts @ clicked), 0.5), max(total - 0.5, 0.5))
    # Use bisection, since the sum of probabilities rises with the level.
    high = float(np.abs(logits).max(initial=0.0)) + _REACH
    low = -high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if float(counts @ (1 / (1 + np.exp(-(logits + middle))))) < clicks:
            low = middle
        else:
            high = middle
    return (low + high) / 2
