"""Predictions of a checkpoint for every held-out row, in row order, the same on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.embeddings.sharding import whole_tables_pay
from pipeline.embeddings.single_rank_lookup import without_exchange
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.workers import Workers
from pipeline.evaluation.ensemble_members import ne_of, shares
from pipeline.models.layers.jagged import EVEN_ROWS
from pipeline.records.dataset import LABEL
from pipeline.records.ensemble import Member
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.attention import EventAttention, watching
from pipeline.training.data import Batch, BatchReader
from pipeline.training.distributed import connect, shared_failure, workers_of
from pipeline.training.guards import GuardFigures
from pipeline.training.model import assemble
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import BatchSampler, Order, shuffle_key
from pipeline.training.settings import PredictionSettings
from pipeline.training.shared_memory import memory_between
from pipeline.training.ssd import ssd_store

if TYPE_CHECKING:
    from pipeline.training.step import StepExecutor

# So many rows tell NE to less than a percent.
JUDGED_ROWS = 1 << 16
# Batches from one meeting of ranks that have all tables to the next.
MEETING = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Predictions:
    """Labels, logits and (where known) true click probabilities of all test rows, float32 [rows], in row order.

    With further ``tasks``, logits are [rows, T], the main task's first; their labels by name, NaN where missing.
    ``weights``: of the rows, None where the dataset has none. ``attention``: of an example row, by sequence.
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
    """Logits of the checkpoint at path ``checkpoint`` for the dataset's test rows; on rank 0, None elsewhere.

    ``members``: of an ensemble, whose logits are added up by their weights; none: the checkpoint alone.

    Every rank calls it. Raises DataError where there are no test rows, ArtifactError for a bad checkpoint.
    """
    device = connect(settings.hardware, settings.train.threads_per_rank, one_machine=settings.one_machine)
    with shared_failure():
        split = SplitReader(store, dataset, "test")
        with ssd_store(settings.hardware, store, plan) as ssd:
            workers = workers_of(settings.hardware)
            global_batch = even_batch(settings.global_batch, workers.count)
            if ssd is not None and ssd.cached:
                # Its slots are for the rows of a batch of the plan, not of a larger one.
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
            alone = (towers is None or towers.is_flat) and device.type == "cpu" and _alone(settings, plan, split.rows)
            whole = alone and dist.get_world_size() > 1
            sharded = assemble(settings, split.schema, plan, towers, device, trained=False, ssd=ssd, whole=whole)
            if alone:
                without_exchange(sharded.model)
            memory = None if alone else memory_between(device, settings, sharded.towers)
            exchanging = nullcontext if memory is None else memory.exchanging
            target = RestoreTarget(sharded.rows, dict(dense_parameters(sharded.model)), states=False)
            parts = []
            # Of an ensemble, its first member. Towers see the events of other ranks' rows.
            with watching(sharded.dense_part.histories if sharded.towers is None else None) as seen:
                for path in [each.checkpoint for each in members] or [checkpoint]:
                    with BatchReader(split, order, pin=device.type == "cuda", apart=whole) as reader:
                        restore(store, store.get(path, "train"), target)
                        with exchanging():
                            parts.append(score(sharded.model, reader, device, workers, apart=whole))
        logits = _together(parts, members, len(split.schema.tasks))
        if logits is None:
            return None
        # Of this rank in the first batch, which has the example rows.
        rows = BatchSampler(order, split.groups).owned(0, order.rank, order.world_size)
        return Predictions(
            split.column(LABEL),
            logits,
            split.true_probability(),
            split.labels(),
            split.row_weights(),
            seen.examples(rows),
        )


def _alone(settings: PredictionSettings, plan: Plan, rows: int) -> bool:
    """Whether a rank scores its part of the ``rows`` without the others: it is the only one, or has all tables."""
    if plan.world_size == 1:
        return True
    # Other exchanges round embeddings, and scores without an exchange would differ.
    exact = settings.partition.exchange == "fp32"
    pays = exact and whole_tables_pay(plan, settings.hardware, rows // plan.world_size)
    # Ranks may differ on it, where each machine was measured for itself.
    alone = all(all_gather_records(pays))
    if alone and dist.get_rank() == 0:
        log.info("all %d tables are on every rank, which scores its rows without the others", len(plan.tables))
    return alone


def even_batch(rows: int, ranks: int) -> int:
    """At least ``rows``, so many that each of ``ranks`` has a multiple of ``EVEN_ROWS`` of them.

    Kernels multiply the last few rows of a matrix by other steps, whose sums may differ in the last bit. Where there
    are none, a row's logit does not depend on the number of ranks.
    """
    return -(-rows // (ranks * EVEN_ROWS)) * EVEN_ROWS * ranks


def _together(parts: Sequence[np.ndarray | None], members: Sequence[Member], tasks: int) -> np.ndarray | None:
    """The logits of an ensemble, from those of its ``members``; the only part as it is."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    counted = shares(np.asarray([each.weight for each in members]), tasks).astype(np.float32)
    each = zip(parts, counted, strict=True)
    return np.asarray(sum(part * share for part, share in each if part is not None), np.float32)


def score(
    model: torch.nn.Module, reader: BatchReader, device: torch.device, workers: Workers, *, apart: bool = False
) -> np.ndarray | None:
    """Logits of all rows of the ``reader``'s split, which is not shuffled, in row order: on rank 0, None elsewhere.

    Collective, on ranks without samples too; float32 [rows], or [rows, T] of several tasks. ``apart``: the model needs
    nothing of other ranks, which meet now and then.
    """
    own = _run(model, _meeting(reader) if apart else reader, torch.device("cpu") if workers.remote else device)
    gathered = _gather(own, workers) if workers.here else None
    return None if gathered is None else _in_row_order(gathered, reader.deal)


def score_published(executor: StepExecutor, split: SplitReader, order: Order) -> np.ndarray | None:
    """Logits that the model in training gives the rows of ``split`` as it would be published: ``score``. Collective.

    Training goes on as if nothing had been scored. Its pipeline must be empty: see ``StepExecutor.must_drain``.
    """
    device = next(iter(executor.dense.values())).device
    with (
        executor.looking() as model,
        torch.compiler.set_stance("force_eager"),
        BatchReader(split, replace(order, shuffle=False, lanes=order.world_size), pin=device.type == "cuda") as reader,
    ):
        return score(model, reader, device, executor.workers)


def judge_train_rows(executor: StepExecutor, train: SplitReader, order: Order) -> GuardFigures:
    """How the model in training does on ``JUDGED_ROWS`` train rows, of evenly spread row groups. Collective."""
    rows = SplitReader(train.store, train.dataset, "train")
    rows.spread(JUDGED_ROWS)
    logits = score_published(executor, rows, order)
    figures = all_gather_records(None if logits is None else _judged(rows, main_logits(logits)))[0]
    return GuardFigures(rows=f"{rows.rows:,} train rows", **figures)


def _judged(rows: SplitReader, logits: np.ndarray) -> dict[str, float | None]:
    labels, weights = rows.column(LABEL), rows.row_weights()
    counted = labels if weights is None else labels[weights > 0]
    both = 0 < int((counted == 1).sum()) < len(counted)
    return {"ne": ne_of(logits, labels, weights) if both else None, "logit_std": float(logits.std())}


def main_logits(logits: np.ndarray) -> np.ndarray:
    """Those of the main task [rows], of ``logits`` of one or of several tasks."""
    return logits if logits.ndim == 1 else np.ascontiguousarray(logits[:, 0])


@torch.no_grad()
def _run(model: torch.nn.Module, batches: Iterable[Batch], device: torch.device) -> torch.Tensor:
    """This rank's logits, one row per global batch: [batches, b], or [batches, b, T]."""
    model.eval()
    return torch.stack([model(batch.to(device, non_blocking=True))[1][0].float() for batch in batches])


def _meeting(batches: Iterable[Batch]) -> Iterator[Batch]:
    """``batches``, of which all ranks have equally many, and do not run far ahead of each other.

    So the failure of one reaches the others, and none waits at the end for as long as a collective may take.
    """
    for number, batch in enumerate(batches, start=1):
        yield batch
        if number % MEETING == 0:
            dist.barrier()


def _gather(logits: torch.Tensor, workers: Workers) -> torch.Tensor | None:
    """The logits of the W workers on rank 0: [batches, W, b], or [batches, W, b, T]."""
    parts = [torch.empty_like(logits) for _ in workers.ranks] if dist.get_rank() == 0 else None
    dist.gather(logits, parts, group=workers.group)
    return torch.stack(parts, dim=1) if parts else None


def _in_row_order(logits: torch.Tensor, deal: BatchSampler) -> np.ndarray:
    """Of the logits of all ranks those of rows, which ``deal`` does not shuffle, without the padding: [rows, ...]."""
    found, ordered = logits.cpu().numpy(), np.empty((deal.rows, *logits.shape[3:]), np.float32)
    for batch, ranks in enumerate(found):
        for rank, own in enumerate(ranks):
            at = 0
            for take in deal.takes(batch, rank, len(ranks)):
                count = take.stop - take.start
                ordered[deal.places(take)] = own[at : at + count]
                at += count
    return ordered
