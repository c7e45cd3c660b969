"""The compiled steps of table optimizers: those of torch to rounding, and the same bits however they are run."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from pipeline.core.kernels import LOADED, open_installed
from pipeline.embeddings.table_training import RowOptimizer
from pipeline.embeddings.tables import Kernel
from pipeline.plugins.cpu_kernels.row_kernels import RowKernels
from pipeline.specs import TABLE_OPTIMIZERS
from tests import compile

OPTIMIZERS = ("lazy_adam", "partial_rowwise_adam", "ftrl")
BATCH, STEPS = 37, 4
FEATURES = {"one": 1, "shared": 2, "small": 1}  # of each table
WIDTHS = {"one": 16, "shared": 20, "small": 40}
ROWS = {"one": 300, "shared": 50, "small": 3}


class Table:
    """What ``RowOptimizer`` reads of a table of a kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.feature_names = name, [f"{name}{i}" for i in range(FEATURES[name])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built as an installation builds it."""
    path = compile.built("rowsteps", tmp_path_factory.mktemp("native"))
    if path is None:
        pytest.skip("there is no C compiler")
    return path


def lookup(step: int, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Ids, offsets and weights of a batch: bags of 0 to 4 ids, some of them twice in a bag."""
    generator = torch.Generator().manual_seed(step)
    lengths, ids = [], []
    for name, features in FEATURES.items():
        for _ in range(features):
            each = torch.randint(0, 5, (BATCH,), generator=generator)
            lengths.append(each)
            ids.append(torch.randint(0, ROWS[name], (int(each.sum()),), generator=generator))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(lengths).cumsum(0)])
    weights = torch.rand(int(offsets[-1]), generator=generator) if weighted else None
    return torch.cat(ids), offsets, weights


def trained(
    monkeypatch: pytest.MonkeyPatch,
    kernels: RowKernels | None,
    optimizer: str,
    pooling: PoolingMode = PoolingMode.SUM,
    weighted: bool = False,
    **options: float,
) -> list[torch.Tensor]:
    """Weights and states of the tables after a few steps, whose rows ``kernels`` train; None: torch."""
    monkeypatch.setitem(LOADED, "rowsteps", kernels)
    specs = [(ROWS[name], WIDTHS[name], EmbeddingLocation.HOST, ComputeDevice.CPU) for name in FEATURES]
    order = [i for i, features in enumerate(FEATURES.values()) for _ in range(features)]
    module = SplitTableBatchedEmbeddingBagsCodegen(specs, feature_table_map=order, pooling_mode=pooling)
    generator = torch.Generator().manual_seed(99)
    for weights in module.split_embedding_weights():
        weights.copy_(torch.randn(weights.shape, generator=generator))
    tables = [Table(name) for name in FEATURES]
    learner = RowOptimizer(
        Kernel(module, tables),
        replace(TABLE_OPTIMIZERS.get(optimizer), **options),  # type: ignore[type-var]
    )
    for step in range(STEPS):
        learner.lr = 0.1 / (step + 1) if step != 2 else 0.0
        ids, offsets, weights_of_ids = lookup(step, weighted)
        output = module(ids, offsets, weights_of_ids)
        gradient = 0.1 * torch.randn(output.shape, generator=generator)
        gradient[3:9] = 0.0
        output.backward(gradient)
    return [*module.split_embedding_weights(), *(value for state in learner._states for value in state.values())]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_compiled_and_torch_train_alike(built: Path, optimizer: str, level: int, monkeypatch) -> None:
    options = {"l1": 0.02, "l2": 0.1, "beta": 0.5} if optimizer == "ftrl" else {}
    for pooling, weighted in ((PoolingMode.SUM, False), (PoolingMode.SUM, True), (PoolingMode.MEAN, False)):
        given = optimizer, pooling, weighted
        by_torch = trained(monkeypatch, None, *given, **options)
        compiled = trained(monkeypatch, RowKernels(built, level), *given, **options)
        for one, two in zip(compiled, by_torch, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_instruction_sets_and_threads_do_not_change_a_bit(built: Path, optimizer: str, monkeypatch) -> None:
    outcomes = []
    for level, threads in ((0, 1), (1, 3), (2, 1), (2, 2)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outcomes.append(trained(monkeypatch, RowKernels(built, level), optimizer))
    for outcome in outcomes[1:]:
        assert all(torch.equal(one, two) for one, two in zip(outcome, outcomes[0], strict=True))


def test_a_lazy_optimizer_leaves_rows_without_a_gradient_alone(built: Path, monkeypatch) -> None:
    table = torch.ones(4, 8)
    moments = torch.ones(4, 8), torch.ones(4, 8)
    ids, offsets = torch.tensor([2, 0, 2]), torch.arange(4)
    gradient = torch.stack([torch.ones(8), torch.zeros(8), -torch.ones(8)])
    step = TABLE_OPTIMIZERS.get("lazy_adam").compiled_step(0.1, 1)
    tables = RowKernels(built).tables([table], [moments], [1], mean=False)
    tables.learn(ids, offsets, None, gradient, step, lazy=True, threads=1)
    assert all(bool((each == 1).all()) for each in (table, *moments))
    tables.learn(ids, offsets, None, gradient, step, lazy=False, threads=1)
    assert moments[0][:, 0].tolist() == pytest.approx([0.9, 1.0, 0.9, 1.0])


def test_denormals_are_those_of_the_calling_thread(built: Path, monkeypatch) -> None:
    """On helpers too: a result must not depend on which thread trains a table."""
    # Two tables of a row, one for each thread.
    weights = [torch.zeros(1, 4), torch.zeros(1, 4)]
    states = [(torch.zeros(1, 4), torch.ones(1, 4)) for _ in weights]
    ids, offsets, gradient = torch.tensor([0, 0]), torch.arange(3), torch.full((1, 8), 1e-20)
    # So late that no bias is left to correct.
    step = TABLE_OPTIMIZERS.get("lazy_adam").compiled_step(1e-20, 1_000_000)
    tables = RowKernels(built).tables(weights, states, [1, 1], mean=False)
    for flush in (True, False):
        for table in weights:
            table.zero_()
        torch.set_flush_denormal(flush)
        try:
            tables.learn(ids, offsets, None, gradient, step, lazy=False, threads=2)
        finally:
            torch.set_flush_denormal(False)
        assert all(bool((table == 0).all()) == flush for table in weights)


def test_a_library_that_is_not_ours_is_left_out_with_a_warning(tmp_path: Path, caplog) -> None:
    assert open_installed(tmp_path, "rowsteps", RowKernels, "slowly") is None
    (tmp_path / f"rowsteps{EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    with caplog.at_level(logging.WARNING):
        assert open_installed(tmp_path, "rowsteps", RowKernels, "slowly") is None
    assert "slowly: " in caplog.text and "install the package again" in caplog.text
