"""Settings that only a GPU has: refused elsewhere, and what of them a CPU can show."""

import itertools
from dataclasses import replace

import pytest
import torch

from pipeline.config import Config, DataConfig, HardwareConfig, PartitionConfig, TrainConfig
from pipeline.core.errors import ConfigError
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.embeddings.tables import kernels
from pipeline.models.build import build_model
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, SparseColumn
from pipeline.specs import ModelInputs
from pipeline.training import step
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.model import DensePart, build_dense_part, compute_dtype, use_tf32
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.settings import ModelSettings
from tests.embeddings.ranks import on_tier, plan_for
from tests.training.dataset import write_dataset

CPU = torch.device("cpu")
COLUMNS = tuple(SparseColumn(name=name, rows=9) for name in "abc")
SCHEMA = DatasetSchema(dense=("d",), sparse=COLUMNS, rows={}, files={}, groups={})


def test_tf32_is_refused_on_a_cpu_and_scores_are_plain_float32():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ConfigError, match=r"train.precision is tf32, which this CPU lacks; .* from Ampere on"):
        use_tf32("tf32", CPU)
    use_tf32("fp32", CPU)
    assert torch.get_float32_matmul_precision() == before
    assert compute_dtype("tf32", CPU) is None


def test_cuda_graphs_are_refused_on_a_cpu_and_without_compiling():
    settings = ModelSettings(
        seed=1,
        model=DlrmConfig(embedding_dim=4, bottom_mlp=[8], top_mlp=[8]),
        partition=PartitionConfig(),
        data=DataConfig(name="t", format="synthetic"),
        hardware=HardwareConfig(name="t"),
        train=TrainConfig(cuda_graphs=True, precision="fp32"),
    )
    with pytest.raises(ConfigError, match=r"train.cuda_graphs is true, but the dense part is trained on a CPU"):
        build_dense_part(settings, SCHEMA, ("a", "b", "c"), 4, CPU, trained=True)
    scoring = build_dense_part(settings, SCHEMA, ("a", "b", "c"), 4, CPU, trained=False)
    assert not scoring.replayed and scoring.ranking._compiled_call_impl is None
    with pytest.raises(ConfigError, match=r"train.cuda_graphs is true, but train.compile=false"):
        TrainConfig(cuda_graphs=True, compile=False).check("train")


def test_what_a_replay_writes_over_is_copied():
    inputs = ModelInputs(dense=("d",), vectors=("a", "b", "c"), dim=4, seed=0)
    ranking = build_model(DlrmConfig(embedding_dim=4, bottom_mlp=[8], top_mlp=[8]), inputs)
    kept = torch.zeros(5)

    class Replayed(torch.nn.Module):
        def forward(self, dense, embeddings):
            return kept.copy_(dense[:, 0]).requires_grad_()

    part = DensePart(ranking, SCHEMA, None)
    part.ranking, part.replayed = Replayed(), True
    ones = torch.ones(5)
    _, (first, _, _) = part(torch.zeros(5, 3, 4), torch.full((5, 1), 2.0), ones, ones)
    kept.requires_grad_(False)
    part(torch.zeros(5, 3, 4), torch.full((5, 1), 7.0), ones, ones)
    assert first.tolist() == [2.0] * 5


def test_prefetching_needs_a_table_with_a_cache_and_no_towers():
    plain, cached = plan_for("table_wise", 2), on_tier(plan_for("table_wise", 2), "hbm_cached", 5)
    with pytest.raises(ConfigError, match=r"train.pipeline is prefetch, but no table is on tier hbm_cached"):
        step.pipeline_of("prefetch", plain, towers=False)
    with pytest.raises(ConfigError, match=r"train.pipeline is prefetch, but towers exchange their ids by themselves"):
        step.pipeline_of("prefetch", cached, towers=True)
    assert step.pipeline_of("prefetch", cached, towers=False) is step.PrefetchTrainPipelineSparseDist


def test_kernels_know_that_their_caches_are_filled_ahead():
    cached = replace(on_tier(plan_for("row_wise", 2), "hbm_cached", 5), device="cuda")
    for prefetch in (True, False):
        tables = to_sharding_plan(cached, "collection", prefetch=prefetch).plan["collection"]
        assert {bool(table.cache_params.prefetch_pipeline) for table in tables.values()} == {prefetch}


class PrefetchOnCpu(step.PrefetchTrainPipelineSparseDist):
    """TorchRec's pipeline, which has nothing to fetch on a CPU and leaves out what its forward pass waits for."""

    def _prefetch(self, context):
        for name in [module.forward._name for module in self._pipelined_modules]:
            context.module_input_post_prefetch[name] = context.input_dist_tensors_requests.pop(name).wait()
            context.module_contexts_post_prefetch[name] = context.module_contexts.pop(name)


def trainer_of(root, monkeypatch):
    """A trainer on one rank that exchanges ids with itself, and its rows."""
    store, dataset = write_dataset(root, train=600)
    split = SplitReader(store, dataset, "train")
    rows = {column.name: column.rows for column in split.schema.sparse}
    config = Config(
        data=DataConfig(name="t", format="synthetic"),
        hardware=HardwareConfig(name="t"),
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[16]),
        train=TrainConfig(global_batch=100, schedule="constant", warmup_steps=0, precision="fp32"),
    )
    monkeypatch.setattr(step, "bypass_exchange", lambda _: False)
    plan = plan_for("table_wise", 1, rows=rows, dim=8)
    return step.StepExecutor(select_model_settings(config), split.schema, plan, connect(config.hardware)), split


def losses(root, monkeypatch, kind):
    """Of two legs of three steps, each with a look at other rows behind it."""
    made, split = trainer_of(root, monkeypatch)
    made._pipeline = kind(made.model, made.optimizers, CPU)
    order, got = Order(key="k", seed=1, global_batch=100), []
    with BatchReader(split, order) as reader:
        for _ in range(2):
            leg = itertools.islice(reader, 3)
            got += [made.step(leg)[0].mean().item() for _ in range(3)]
            with made.looking() as model, BatchReader(split, replace(order, shuffle=False)) as others:
                got.append(model(next(iter(others)))[1][0].mean().item())
    return got


def test_a_prefetching_training_goes_on_after_a_look_at_validation_rows(tmp_path, monkeypatch):
    expected = losses(tmp_path / "plain", monkeypatch, step.TrainPipelineSparseDist)
    assert losses(tmp_path / "prefetch", monkeypatch, PrefetchOnCpu) == expected


def test_a_look_leaves_no_row_of_a_cache_locked(tmp_path, monkeypatch):
    made, _ = trainer_of(tmp_path, monkeypatch)
    for kernel in kernels(made.model):
        kernel.module.lxu_cache_locking_counter = torch.zeros(2, 4, dtype=torch.int32)  # a GPU's; on a CPU it is empty
    with made.looking() as model:
        for kernel in kernels(model):
            kernel.module.lxu_cache_locking_counter += 1  # as a lookup does, until its backward pass
    assert not any(kernel.module.lxu_cache_locking_counter.any() for kernel in kernels(made.model))
