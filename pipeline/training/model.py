"""The trained module: sharded tables, the ranking model on top, and the loss; precision and fault finding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from pipeline.config import Config
from pipeline.contracts import DatasetSchema
from pipeline.embeddings import apply_fused_optimizer, build_collection, pooled_stack
from pipeline.errors import ConfigError
from pipeline.models import build_model
from pipeline.training.data import Batch

TABLES = "collection"
Output = tuple[Tensor, Tensor, Tensor]


class ClickModel(nn.Module):
    """forward(batch) -> (loss, (logits [b], labels [b], weights [b])); the tables lie at path ``TABLES``.

    The tables take their ids straight from the batch, so that TorchRec's pipeline can fetch them ahead.
    """

    def __init__(self, collection: EmbeddingBagCollection, head: Head) -> None:
        super().__init__()
        self.collection = collection
        self.head = head

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        """The rank's loss as ``Batch`` defines it, and what metrics need."""
        return self.head(self.collection(batch.sparse), batch.dense, batch.labels, batch.weights)


class Head(nn.Module):
    """The dense part: ranking model and loss. ``fault``: (forward pass, the first part that was not finite)."""

    def __init__(self, ranking: nn.Module, schema: DatasetSchema, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.ranking = ranking
        self.dense_names = list(schema.dense)
        self.tables = [column.name for column in schema.sparse]
        self.dtype = dtype
        self.fault: tuple[int, str] | None = None
        self._passes = 0
        self._seen: tuple[Tensor, Tensor] | None = None

    def forward(self, pooled: KeyedTensor, dense: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Output]:
        """Loss sum(weights * log loss), logits float32."""
        embeddings = pooled_stack(pooled, self.tables)
        logits = self._rank(dense, embeddings)
        loss = functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
        self._seen = (dense, embeddings.detach())
        self._passes += 1
        # Reading the loss is free on a CPU; an accelerator would have to be waited for, so there the interval looks.
        if self.fault is None and loss.device.type == "cpu" and not torch.isfinite(loss):
            self.fault = (self._passes, self._find_fault())
        return loss, (logits.detach(), labels, weights)

    def _rank(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        with torch.autocast(dense.device.type, self.dtype, enabled=self.dtype is not None):
            return self.ranking(dense, embeddings)

    @property
    def embeddings(self) -> Tensor:
        """The pooled embeddings [B, F, D] of the last forward pass, in the order of the schema, detached."""
        assert self._seen is not None, "no forward pass yet"
        return self._seen[1]

    def first_fault(self) -> tuple[int, str]:
        """What was found when the loss first was not finite, else what the last forward pass shows now."""
        return self.fault or (self._passes, self._find_fault())

    @torch.no_grad()
    def _find_fault(self) -> str:
        if self._seen is None:
            return "the loss"
        dense, embeddings = self._seen
        for name, column in zip(self.dense_names, dense.unbind(1), strict=True):
            if not torch.isfinite(column).all():
                return f"dense feature {name!r}"
        for name, values in zip(self.tables, embeddings.unbind(1), strict=True):
            if not torch.isfinite(values).all():
                return f"table {name!r}"
        with _outputs(self.ranking) as found:
            self._rank(dense, embeddings)
        return found[0] if found else "the loss"


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collects the leaf layers, in order of execution, whose output is not finite; runs uncompiled."""
    found: list[str] = []

    def look(name: str, module: nn.Module, output: object) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            spoilt = [key for key, value in module.named_parameters() if not torch.isfinite(value).all()]
            found.append(f"layer {name!r}" + (f" (its {spoilt[0]} is not finite)" if spoilt else ""))

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [
        module.register_forward_hook(lambda module, _, output, name=name: look(name, module, output))
        for name, module in leaves
    ]
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield found
    finally:
        model._compiled_call_impl = compiled
        for handle in handles:
            handle.remove()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype for ``train.precision``; None: float32. ConfigError where bf16 is asked but not there."""
    able = has_fast_bf16(device)
    if precision == "bf16" and not able and device.type != "cpu":
        raise ConfigError(
            "train.precision is bf16, but this CUDA device cannot compute in it", hint="train.precision=fp32"
        )
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and able) else None


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively: AVX512_BF16 or AMX on a CPU, Ampere or later on CUDA."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def build(config: Config, schema: DatasetSchema, device: torch.device, *, trained: bool) -> ClickModel:
    """The unsharded model, its tables on the meta device; ``trained``: with the tables' optimizer and compilation."""
    collection = build_collection(schema, config.model.embedding_dim, torch.device("meta"))
    apply_fused_optimizer(collection, config.train.sparse_lr)
    ranking = build_model(config.model, len(schema.dense), len(schema.sparse), config.seed).to(device)
    if trained and config.train.compile:
        ranking.compile(dynamic=False)
    return ClickModel(collection, Head(ranking, schema, compute_dtype(config.train.precision, device)))
