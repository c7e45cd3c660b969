"""Steps on a GPU: the host does not wait for the device, and the model learns as on the CPU."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

from pipeline.config import Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.models.settings import DlrmConfig
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor
from tests.embeddings.ranks import on_tier, plan_for
from tests.training.dataset import write_dataset

WARM_UP, STEPS = 6, 6


# What a GPU can do besides, each with how far its logits may be from the CPU's.
WAYS = {
    "plain": ({}, 1e-3),
    "tf32": ({"precision": "tf32"}, 1e-2),
    "prefetch": ({"pipeline": "prefetch"}, 1e-3),
    "graphs": ({"cuda_graphs": True}, 1e-3),
    "compiled": ({"compile": True}, 1e-3),
}


def steps(root, device, **changes):
    """What the warnings of PyTorch's sync debug mode name in ``STEPS`` steps, by file, and the losses."""
    store, dataset = write_dataset(root, train=400 * (WARM_UP + STEPS + 2))
    split = SplitReader(store, dataset, "train")
    rows = {column.name: column.rows for column in split.schema.sparse}
    plan = plan_for("table_wise", 1, rows=rows, dim=8)
    plan = replace(plan, device=device)
    if changes.get("pipeline") == "prefetch":
        plan = replace(on_tier(plan, "hbm_cached", 5), device=device)
        cached = {name: replace(table, kernel="fused_uvm_caching") for name, table in plan.tables.items()}
        plan = replace(plan, tables=cached)
    config = Config(
        data=DataConfig(name="t", format="synthetic"),
        hardware=HardwareConfig(name="t", device=device),
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[16]),
        train=TrainConfig(
            **{"global_batch": 400, "schedule": "constant", "warmup_steps": 0, "precision": "fp32", **changes}
        ),
    )
    place = connect(config.hardware)
    trainer = StepExecutor(select_model_settings(config), split.schema, plan, place)
    losses, waits = [], []
    with BatchReader(split, Order(key="k", seed=1, global_batch=400), pin=device == "cuda") as reader:
        for _ in range(WARM_UP):
            losses.append(trainer.step(reader)[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            for _ in range(STEPS):
                losses.append(trainer.step(reader)[0])
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        waits = [str(w.filename) for w in caught if "synchroniz" in str(w.message)]
    return waits, [float(logits.float().mean()) for logits in losses]


def on_cuda(_, root, changes):
    waits, means = steps(root, "cuda", **changes)
    (root / "outcome.json").write_text(json.dumps([waits, means]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_no_step_waits_for_the_device_in_our_code(tmp_path, way):
    changes, apart = WAYS[way]
    mp.spawn(on_cuda, args=(tmp_path, changes), nprocs=1)
    waits, means = json.loads((tmp_path / "outcome.json").read_text())
    assert not [name for name in waits if "/pipeline/" in name], waits
    expected = steps(tmp_path / "cpu", "cpu")[1]
    assert means == pytest.approx(expected, abs=apart)


def test_the_same_steps_run_on_the_cpu(tmp_path):
    waits, means = steps(tmp_path, "cpu")
    assert not waits and len(means) == WARM_UP + STEPS and all(mean == mean for mean in means)
