"""``make bench-train``: samples per second of our training loop against plain ones, and their test AUC.

The plain loops are TorchRec's own DLRM, sharded tables and pipeline (``ratio``), and an eager one with
``nn.EmbeddingBag`` and Adam (``ratio_eager``); they share no code with ``pipeline/`` but the batches. All train in
float32 but ours on the same generated rows in the same order, from the same initial values, with the same learning
rates and threads, turn by turn in short rounds; a ratio is the median over rounds. 26 tables, D 16, batch 8192, MLPs
512-256-16 and 512-256-1, row-wise Adagrad. ``--no-bf16`` leaves bf16 out where the CPU has it (with
``ONEDNN_MAX_CPU_ISA=AVX512_CORE`` it stands in for one that lacks it). ``ceiling_share`` is the FLOP/s of our step over
what its matrix products reach alone, one after the other, in the same dtype. ``ratio_most`` and ``ratio_eager_most``
are the ratios of a step that takes no longer than these products alone.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import finish, in_turns, median_ratio, options, seconds_of, silent
from benchmarks.models_and_rows import BATCH, config_of, generate, logits_of, trainer_of
from pipeline.config import Config
from pipeline.embeddings.tables import kernels
from pipeline.evaluation.metrics import exact_auc, split_by_class
from pipeline.records import DatasetSchema
from pipeline.store import Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor
from pipeline.training.train_metrics import MetricAccumulator

ROUND_STEPS = 10
Step = Callable[[Iterator[Batch]], object]


def main() -> None:
    given = options(
        __doc__,
        rows=(1_638_400, "train rows; a fifth of them more to test on"),
        threads=(None, "threads of every loop; all cores unless given", {"type": int}),
        no_bf16=(False, "our loop with train.precision=fp32"),
    )
    silent()
    config = config_of(threads=given.threads, **({"precision": "fp32"} if given.no_bf16 else {}))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        split = SplitReader(store, dataset, "train")
        ours = trainer_of(config, split.schema)
        plain, eager = PlainLoop(config, split.schema, ours), EagerLoop(config, split.schema, ours)
        seconds = race({"ours": _with_metrics(ours), "plain": plain.step, "eager": eager.step}, split)
        step = {name: statistics.median(rounds) / ROUND_STEPS for name, rounds in seconds.items()}
        reached = ours.measure_speed(BATCH)
        print("testing ...", flush=True)
        models = {"ours": ours.finished(), "plain": plain.model.eval(), "eager": eager.model.eval()}
        test = SplitReader(store, dataset, "test")
        clicks = test.column("label") > 0
        aucs = {name: exact_auc(split_by_class(clicks, logits_of(model, test))) for name, model in models.items()}
    finish(
        "train",
        median_ratio(seconds["plain"], seconds["ours"]),
        samples_per_s=BATCH / step["ours"],
        baseline_samples_per_s=BATCH / step["plain"],
        auc=aucs["ours"],
        baseline_auc=aucs["plain"],
        auc_difference=aucs["ours"] - aucs["plain"],
        ratio_eager=median_ratio(seconds["eager"], seconds["ours"]),
        eager_samples_per_s=BATCH / step["eager"],
        eager_auc=aucs["eager"],
        rounds=len(seconds["ours"]),
        threads=torch.get_num_threads(),
        avx512_bf16=bool(torch.cpu._is_avx512_bf16_supported()),
        **reached.figures(step["ours"]),
        products_ms=1000 * reached.least_seconds,
        ratio_most=step["plain"] / reached.least_seconds,
        ratio_eager_most=step["eager"] / reached.least_seconds,
    )


def _with_metrics(trainer: StepExecutor) -> Step:
    """Our loop's step, its metrics at the usual interval included."""
    metrics = MetricAccumulator(window_steps=50)

    def step(batches: Iterator[Batch]) -> None:
        metrics.add(trainer.step(batches))
        if metrics.steps == 20:
            metrics.close(0.0)

    return step


def race(loops: dict[str, Step], split: SplitReader) -> dict[str, list[float]]:
    """Seconds of each loop's rounds, taken in turn; the first round of each warms up and is not counted."""
    rounds, least = split.rows // BATCH // ROUND_STEPS, 2 * ROUND_STEPS * BATCH
    if rounds < 2:
        raise SystemExit(f"--rows={split.rows} makes {rounds} rounds, expected 2 or more: --rows={least}")
    order = Order(key=split.dataset.key, seed=1, global_batch=BATCH)
    readers = {name: BatchReader(split, order) for name in loops}
    # Whole batches only: the plain loop knows no padding.
    batches = {name: itertools.islice(reader, rounds * ROUND_STEPS) for name, reader in readers.items()}

    def steps(name: str) -> None:
        for _ in range(ROUND_STEPS):
            loops[name](batches[name])

    def timed_round(name: str) -> float:
        seconds = seconds_of(lambda: steps(name))
        print(f"{name} {ROUND_STEPS * BATCH / seconds:,.0f} samples/s", flush=True)
        return seconds

    seconds = in_turns({name: lambda name=name: timed_round(name) for name in loops}, rounds - 1, warm_up=1)
    for reader in readers.values():
        reader.close()
    return seconds


class _WithLoss(nn.Module):
    """The mean loss of a ``model`` of dense features and ids, and (logits, labels)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = self.model(batch.dense, batch.sparse).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach(), batch.labels)


def _warmed_up(optimizer: torch.optim.Optimizer, config: Config) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, config.train.warmup_steps)))


def _copy_linears(model: nn.Module, trainer: StepExecutor) -> None:
    parts = [model, trainer.dense_part.ranking]
    pairs = ([each for each in part.modules() if isinstance(each, nn.Linear)] for part in parts)
    for mine, source in zip(*pairs, strict=True):
        mine.bias.copy_(source.bias)
        mine.weight.copy_(source.weight)


class PlainLoop:
    """TorchRec's DLRM from the initial values of ``trainer``: ``step`` trains on the next batch. One rank, CPU."""

    def __init__(self, config: Config, schema: DatasetSchema, trainer: StepExecutor) -> None:
        settings, dim, device = config.model, config.model.embedding_dim, torch.device("cpu")
        tables = [
            EmbeddingBagConfig(name=each.name, embedding_dim=dim, num_embeddings=each.rows, feature_names=[each.name])
            for each in schema.sparse
        ]
        collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        sparse = {"lr": config.train.sparse_lr, "eps": 1e-8}
        _apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), sparse)
        dlrm = DLRM(collection, len(schema.dense), [*settings.bottom_mlp, dim], [*settings.top_mlp, 1])
        self.model = DistributedModelParallel(_WithLoss(dlrm), device=device)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=config.train.lr),
        )
        optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self._schedule = _warmed_up(optimizer, config)  # type: ignore[arg-type]
        self._pipeline = TrainPipelineBase(self.model, optimizer, device)  # type: ignore[arg-type]
        self._start_from(trainer, dim)

    def step(self, batches: Iterator[Batch]) -> None:
        self._pipeline.progress(batches)
        self._schedule.step()

    @torch.no_grad()
    def _start_from(self, trainer: StepExecutor, dim: int) -> None:
        ours = {shard.table: shard.weight for shard in trainer.rows.local_shards()}
        for kernel in kernels(self.model):
            for table, weight in zip(kernel.tables, kernel.module.split_embedding_weights(), strict=True):
                weight.copy_(ours[table.name])
        dlrm = self.model.module.model
        _copy_linears(dlrm, trainer)
        # Theirs lists the pairs by the upper triangle, ours by the lower one.
        first = next(layer for layer in dlrm.over_arch.modules() if isinstance(layer, nn.Linear))
        vectors = len(ours) + 1
        low, up = torch.tril_indices(vectors, vectors, -1), torch.triu_indices(vectors, vectors, 1)
        place = torch.zeros(vectors, vectors, dtype=torch.long)
        place[low[1], low[0]] = torch.arange(low.shape[1])
        first.weight[:, dim:] = first.weight[:, dim:][:, place[up[0], up[1]]]


class _EagerDlrm(nn.Module):
    """DLRM of PyTorch's own modules: the top takes the first vector, then the pairs i > j by rows. One id a feature."""

    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        super().__init__()
        model, vectors = config.model, len(schema.sparse) + 1
        dim = model.embedding_dim
        self.tables = nn.ModuleList(nn.EmbeddingBag(column.rows, dim, mode="sum") for column in schema.sparse)
        self.bottom = _mlp([len(schema.dense), *model.bottom_mlp, dim])
        self.top = _mlp([dim + vectors * (vectors - 1) // 2, *model.top_mlp])
        self.head = nn.Linear(model.top_mlp[-1], 1)
        self.low = torch.tril_indices(vectors, vectors, -1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        ids, first = sparse.values().view(len(self.tables), -1, 1), self.bottom(dense)
        vectors = torch.stack([first, *(table(ids[i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.mT)[:, self.low[0], self.low[1]]
        logits: Tensor = self.head(self.top(torch.cat([first, products], dim=1)))
        return logits


def _mlp(widths: list[int]) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers))


class EagerLoop:
    """The eager model from the initial values of ``trainer``: ``step`` trains on the next batch. One rank, CPU."""

    def __init__(self, config: Config, schema: DatasetSchema, trainer: StepExecutor) -> None:
        dlrm = _EagerDlrm(config, schema)
        with torch.no_grad():
            for table, shard in zip(dlrm.tables, trainer.rows.local_shards(), strict=True):
                table.weight.copy_(shard.weight)
            _copy_linears(dlrm, trainer)
        self.model = _WithLoss(dlrm)
        self._optimizer = torch.optim.Adam(dlrm.parameters(), lr=config.train.lr)
        self._schedule = _warmed_up(self._optimizer, config)

    def step(self, batches: Iterator[Batch]) -> None:
        self._optimizer.zero_grad()
        self.model(next(batches))[0].backward()
        self._optimizer.step()
        self._schedule.step()


if __name__ == "__main__":
    main()
