"""Tables that the compiled kernels look up and train: as FBGEMM's kernels, for any widths, lengths and threads."""

from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from pipeline.core.errors import GuardError
from pipeline.core.kernels import load_kernels
from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.specs import TABLE_OPTIMIZERS

KERNELS = load_kernels("steps")
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the compiled kernels are not installed")
ROWS, FEATURES, BATCH = (7, 3000, 40), (0, 0, 1, 2), 50  # the first table has two features


@pytest.fixture(params=[0, 1, 2], ids=["any CPU", "AVX2", "all"])
def level(request):
    KERNELS.limit(request.param)
    yield
    KERNELS.limit(2)


def kernel_of(dim, pooling, *, compiled):
    torch.manual_seed(1)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        feature_table_map=list(FEATURES),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
        pooling_mode=pooling,
    )
    for weights in kernel.split_embedding_weights():
        weights.copy_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(len(weights))))
    if compiled:
        tables = [SimpleNamespace(name=f"t{i}", feature_names=["f"] * FEATURES.count(i)) for i in range(len(ROWS))]
        spec = TABLE_OPTIMIZERS.get("rowwise_adagrad")
        kernel.forward = CompiledTables(SimpleNamespace(module=kernel, tables=tables), spec, KERNELS)
    return kernel


def lookup(step, most):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(int(most == 1), most + 1, (len(FEATURES), BATCH), generator=generator)
    counts = zip(FEATURES, lengths.sum(1).tolist(), strict=True)
    ids = [(torch.rand(count, generator=generator) ** 3 * ROWS[table]).long() for table, count in counts]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])


def train(kernel, dim, most):
    outputs = []
    for step in range(4):
        kernel.set_learning_rate(0.1 / (step + 1))
        pooled = kernel(*lookup(step, most))
        outputs.append(pooled.detach().clone())
        pooled.backward(torch.randn(BATCH, len(FEATURES) * dim, generator=torch.Generator().manual_seed(step)))
    states = [state[0] for state in kernel.split_optimizer_states()]
    return [*outputs, *kernel.split_embedding_weights(), *states]


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize(("dim", "pooling"), [(16, PoolingMode.SUM), (4, PoolingMode.SUM), (20, PoolingMode.MEAN)])
def test_rows_and_states_are_those_of_fbgemm(level, dim, pooling, most):
    expected = train(kernel_of(dim, pooling, compiled=False), dim, most)
    got = train(kernel_of(dim, pooling, compiled=True), dim, most)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_threads_do_not_change_a_bit():
    threads = torch.get_num_threads()
    outcomes = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        outcomes.append(train(kernel_of(16, PoolingMode.SUM, compiled=True), 16, 4))
    torch.set_num_threads(threads)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize(("dim", "pooling"), [(16, PoolingMode.SUM), (4, PoolingMode.SUM), (36, PoolingMode.MEAN)])
def test_embeddings_rounded_to_bf16_train_the_bits_of_those_rounded_afterwards(level, dim, pooling):
    after, rounded = (kernel_of(dim, pooling, compiled=True) for _ in range(2))
    rounded.forward.trained_dtype = torch.bfloat16
    for step in range(4):
        ids, offsets = lookup(step, 4)
        one, other = after(ids, offsets).bfloat16(), rounded(ids, offsets)
        assert other.dtype == torch.bfloat16 and torch.equal(one, other)
        gradient = torch.randn(one.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        one.backward(gradient)
        other.backward(gradient)
    for one, other in zip(after.split_embedding_weights(), rounded.split_embedding_weights(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert rounded(*lookup(0, 4)).dtype == torch.float32


@pytest.mark.parametrize("row", [-1, 3000])
def test_a_row_outside_of_its_table_is_refused_by_name(row):
    kernel, (ids, offsets) = kernel_of(16, PoolingMode.SUM, compiled=True), lookup(0, 1)
    ids[2 * BATCH + 3] = row
    with pytest.raises(GuardError, match=rf"table 't1': row {row} is looked up, expected 0 to 2999"):
        kernel(ids, offsets)


def test_weighted_ids_and_evaluation():
    plain, compiled = (kernel_of(16, PoolingMode.SUM, compiled=each) for each in (False, True))
    ids, offsets = lookup(0, 4)
    weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(ids, offsets, weights), compiled(ids, offsets, weights))
    with torch.no_grad():
        pooled = compiled(ids, offsets)
    assert not pooled.requires_grad and torch.equal(pooled, plain(ids, offsets))


def test_a_batch_of_no_samples():
    kernel = kernel_of(16, PoolingMode.SUM, compiled=True)
    pooled = kernel(torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert pooled.shape == (0, 64)
    pooled.sum().backward()
