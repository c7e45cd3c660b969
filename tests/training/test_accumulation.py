"""``train.accumulate``: a step in parts is the step of the whole batch, for every optimizer, and takes less memory."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.config import CheckpointConfig, ClipConfig, TrainConfig
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.models.layers import Ranker, mlp
from pipeline.planning.problem import dense_bytes
from pipeline.records import DatasetSchema, SparseColumn, TaskColumn, TowerModuleSpec
from pipeline.specs import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS
from pipeline.stages.stage_inputs import with_batch
from pipeline.training.accumulation import accumulate, require_rowwise, split_rows
from pipeline.training.model import DensePart
from tests.embeddings.ranks import spawn
from tests.planning.test_cost import inputs
from tests.tiers import Together, with_slow
from tests.towers.cases import STEPS, flat, with_towers
from tests.towers.test_parity import read
from tests.training.test_event_parts import peak_bytes
from tests.training.test_train import run_case, trained

# Float32 alone differs: gradients of parameters are sums over rows, added up in another order.
CLOSE = {"rtol": 0, "atol": 5e-6}
PARTS = {"accumulate": 5}  # of 48 rows, so that they are not equally long


@pytest.mark.parametrize(
    ("rows", "parts", "lengths"), [(8, 1, [8]), (8, 4, [2, 2, 2, 2]), (10, 4, [2, 3, 2, 3]), (3, 8, [1, 1, 1])]
)
def test_parts_are_consecutive_and_of_one_length_but_for_a_row(rows, parts, lengths):
    found = split_rows(rows, parts)
    assert [rows.stop - rows.start for rows in found] == lengths
    assert np.concatenate([np.arange(rows)[part] for part in found]).tolist() == list(range(rows))


def gradients(parts, factor=1.0):
    """Loss, labels and gradients of ten rows in double precision; of four parameters one is frozen and one unused."""
    generator = torch.Generator().manual_seed(0)
    dense, vectors = torch.randn(10, 3, generator=generator).double(), torch.randn(10, 2, 4, generator=generator)
    vectors = vectors.double().requires_grad_()
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)  # in front of the parts, as a normalisation is
    weight = torch.randn(11, generator=generator).double().requires_grad_()
    frozen, unused = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.arange(10.0).double() % 2, torch.linspace(0, 1, 10).double()

    def compute(dense, vectors, labels, weights, extra):
        assert extra is None
        logits = torch.cat([dense, vectors.flatten(1)], dim=1).tanh() @ weight + frozen
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
        return loss, (logits.detach(), labels, weights)

    scaled = dense * scale
    if parts is None:
        loss, output = compute(scaled, vectors, labels, weights, None)
    else:
        parameters = [weight, frozen, unused]
        loss, output = accumulate(compute, split_rows(10, parts), scaled, vectors, (labels, weights, None), parameters)
    (factor * loss).backward()
    assert unused.grad is None and frozen.grad is None
    return [loss.detach(), *output, vectors.grad, scale.grad, weight.grad]


@pytest.mark.parametrize("parts", [1, 3, 10])
def test_loss_and_gradients_are_those_of_all_rows_at_once(parts):
    for factor in (1.0, 0.25):
        for found, expected in zip(gradients(parts, factor), gradients(None, factor), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, check_dtype=False)


# Small rates: Adam and FTRL make steps of one size of gradients that are next to nothing, rounding included.
TABLES = {
    name: {"sparse_optimizer": name, "sparse_lr": 0.01 if "adam" in name else 0.1} for name in TABLE_OPTIMIZERS.names()
}
DENSE = {name: {"dense_optimizer": name, "lr": 0.002} for name in DENSE_OPTIMIZERS.names()}
SETTINGS = {
    **TABLES,
    **{f"dense {name}": each for name, each in DENSE.items()},
    "clipped": {"sparse_optimizer": "sgd", "clip": ClipConfig(dense_norm=0.05, table_value=0.0002)},
    "l2": {"sparse_optimizer": "sgd", "embedding_l2": 0.5},
    "smoothed": {"label_smoothing": 0.2},
}
MIXED = {"a": "row_wise", "c": "data_parallel"}
LAYOUT = [("abd", [0]), ("ce", [1])]
LOW_RANK = TowerModuleSpec(name="dcn", dim=4, cross_layers=1)
# Ranks, then the settings; on two ranks also with towers.
KEYS = [*((1, name) for name in SETTINGS), (2, "rowwise_adagrad"), (2, "clipped"), (2, "towers"), (2, "modules")]
QUICK = [(1, "rowwise_adagrad"), (1, "lazy_adam"), (1, "dense adam"), (2, "clipped"), (2, "towers")]


def train_both(folder, ranks, names):
    """Each of ``names`` with the whole batch and in parts."""
    for name in names:
        settings = SETTINGS.get(name, {"sparse_optimizer": "sgd"})
        for parts in ({}, PARTS):
            case = f"{name}-{'parts' if parts else 'whole'}"
            if name in ("towers", "modules"):
                module = LOW_RANK if name == "modules" else None
                with_towers(folder, {case: (2, LAYOUT, module, MIXED, {**settings, **parts})})
            else:
                flat(folder, {case: (MIXED if ranks > 1 else {}, {**settings, **parts})})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By ranks and settings: what the training left of the whole batch, and in parts."""

    def train_together(keys):
        ranks, folder = keys[0][0], tmp_path_factory.mktemp("parts")
        names = [name for _, name in keys]
        spawn(train_both, ranks, folder, ranks, names)
        found = {}
        for name in names:
            found[ranks, name] = tuple(read(folder, f"{name}-{kind}", ranks) for kind in ("whole", "parts"))
        return found

    groups = []
    for ranks in (1, 2):
        here = [key for key in KEYS if key[0] == ranks]
        groups += [[key for key in here if key in QUICK], [key for key in here if key not in QUICK]]
    return Together(train_together, *groups)


@pytest.mark.parametrize(("ranks", "name"), with_slow(KEYS, QUICK))
def test_a_training_in_parts_is_that_of_whole_batches(runs, ranks, name):
    whole, parts = runs[ranks, name]
    for step in range(STEPS):
        torch.testing.assert_close(parts[0][step], whole[0][step], **CLOSE)
    for table in whole[1]:
        torch.testing.assert_close(parts[1][table], whole[1][table], **CLOSE)
    for found, expected in zip(parts[2], whole[2], strict=True):
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=2e-5)


EXACT = CheckpointConfig(every_steps=3, keep_last=2, quantise="fp32")
STOPPED = {"accumulate": 3, "max_steps": 7, "checkpoint": EXACT}
CASES = {
    "whole": {"checkpoint": EXACT},
    "parts": {"accumulate": 3, "checkpoint": EXACT},
    "stopped": {**STOPPED, "then": {"accumulate": 3}},
    "other": {**STOPPED, "then": {"accumulate": 2}},
    "bf16": {"precision": "bf16"},
    "bf16 parts": {"precision": "bf16", "accumulate": 3},
    "profiled": {"accumulate": 3, "max_steps": 16, "profile": True},
}


def run_cases(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, case in CASES.items():
        outcome = run_case(folder / name, world, rank, **case)
        (folder / f"{name}-rank{rank}.json").write_text(json.dumps(outcome))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each of ``CASES`` left on the first of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    spawn(run_cases, 2, folder)
    found = {name: json.loads((folder / f"{name}-rank0.json").read_text()) for name in CASES}
    for name, outcome in found.items():
        assert "error" not in outcome, (name, outcome)
    return found


def assert_same_scores(found, expected, tolerance):
    np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=tolerance)


def test_a_training_on_two_ranks_ends_the_same_in_parts(outcomes):
    assert_same_scores(outcomes["parts"], outcomes["whole"], 1e-4)
    assert outcomes["parts"]["records"][-1]["ne_window"] == pytest.approx(
        outcomes["whole"]["records"][-1]["ne_window"], abs=1e-4
    )
    assert outcomes["parts"]["summary"]["train"]["steps"] == outcomes["whole"]["summary"]["train"]["steps"] == 18


def test_in_bf16_parts_round_as_whole_batches_do(outcomes):
    assert_same_scores(outcomes["bf16 parts"], outcomes["bf16"], 0.02)


def test_a_resumed_training_ends_with_the_same_bits(outcomes):
    assert trained(outcomes["stopped"]["digests"]) == trained(outcomes["parts"]["digests"])


def test_a_training_may_go_on_in_other_parts(outcomes):
    assert outcomes["other"]["summary"]["train"]["resumed"]["step"] == 7
    assert_same_scores(outcomes["other"], outcomes["whole"], 1e-4)


@pytest.mark.measures
def test_a_profile_counts_the_products_of_all_parts(outcomes):
    first = outcomes["profiled"]["records"][0]
    assert first["gflop_per_s"] > 0 and first["ceiling_share"] > 0


class Wide(Ranker):
    """Layers whose activations are much larger than what they take; logits [b] of one task, or [b, ``tasks``]."""

    def __init__(self, tasks=1):
        super().__init__()
        self.layers = mlp([2 + 3 * 8, 512, 512, tasks], last_activation=False)

    def forward(self, dense, embeddings):
        return self.layers(torch.cat([dense, embeddings.flatten(1)], dim=1)).squeeze(1)

    def start_at(self, logit):
        self.layers[-1].bias.data.fill_(logit)


COLUMNS = tuple(SparseColumn(name=name, rows=9) for name in "abc")
SCHEMA = DatasetSchema(dense=("d0", "d1"), sparse=COLUMNS, rows={}, files={}, groups={})


def test_tasks_weights_and_rows_that_were_left_out_are_those_of_each_part():
    schema = replace(SCHEMA, tasks=(TaskColumn(name="buy", kind="binary"),), row_weights=True, sampled="logit")
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(11, 3, 8, generator=generator), torch.randn(11, 2, generator=generator)
    labels = (torch.rand(11, generator=generator) < 0.5).float()
    extra = torch.rand(11, 3, generator=generator) + 0.1
    extra[:, 0] = torch.where(extra[:, 0] > 0.9, torch.nan, (extra[:, 0] > 0.5).float())
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        part = DensePart(Wide(2), schema, None, train=TrainConfig(accumulate=parts, label_smoothing=0.1))
        embeddings = given[0].clone().requires_grad_()
        loss, output = part(embeddings, given[1], labels, extra[:, 1] / 11, extra)
        loss.backward()
        found.append([loss.detach(), *output, embeddings.grad, *(each.grad for each in part.ranking.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_activations_take_the_memory_of_a_part():
    def train(parts):
        torch.manual_seed(0)
        part = DensePart(Wide(), SCHEMA, None, train=TrainConfig(accumulate=parts))
        embeddings = torch.randn(4096, 3, 8, requires_grad=True)
        loss, _ = part(embeddings, torch.randn(4096, 2), torch.ones(4096), torch.ones(4096))
        loss.backward()
        return embeddings.grad

    torch.testing.assert_close(train(8), train(1), rtol=1e-5, atol=1e-6)
    whole, parts = (peak_bytes(lambda parts=parts: train(parts)) for parts in (1, 8))
    assert parts < 0.35 * whole


def test_a_fault_in_a_later_part_is_named():
    part = DensePart(Wide(), SCHEMA, None, train=TrainConfig(accumulate=4))
    dense = torch.zeros(12, 2)
    dense[10, 1] = float("nan")
    loss, _ = part(torch.zeros(12, 3, 8, requires_grad=True), dense, torch.ones(12), torch.ones(12))
    assert not torch.isfinite(loss)
    assert part.first_fault().part == "dense feature 'd1'"


def test_evaluation_takes_a_batch_as_it_is():
    part = DensePart(Wide(), SCHEMA, None, train=TrainConfig(accumulate=4))
    with torch.no_grad():
        loss, (logits, _, _) = part(torch.zeros(12, 3, 8), torch.zeros(12, 2), torch.ones(12), torch.ones(12))
    assert logits.shape == (12,) and not loss.requires_grad


def test_a_plan_reserves_the_activations_of_a_part():
    whole, parts = (dense_bytes(inputs(accumulate=count)) for count in (1, 8))
    # Besides, all embeddings and their gradients: 1,024 rows, 3 features, width 16, float32.
    assert parts["activations"] == whole["activations"] / 8 + 2 * 4 * 1024 * 3 * 16
    assert {**parts, "activations": 0, "staging": 0} == {**whole, "activations": 0, "staging": 0}


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ["train.global_batch=8", "hardware=laptop2", "train.accumulate=5"],
            "train.accumulate is 5, but a rank has 4 of the 8 samples of train.global_batch, expected at least one "
            "for each part",
            "train.accumulate=4, or train.global_batch=10",
        ),
        (
            ["model.norm=batch", "train.accumulate=2"],
            "train.accumulate is 2, but model.norm is batch: mean and variance are those of the whole batch, and its "
            "parts have others",
            "model.norm=layer, or train.accumulate=1",
        ),
        (
            ["train.rank_loss.kind=pairwise", "train.accumulate=2"],
            "train.accumulate is 2, but train.rank_loss.kind is pairwise: it compares the rows of the whole batch, and "
            "a part has only some of them",
            "train.accumulate=1, or train.rank_loss.kind=none",
        ),
        (["train.accumulate=0"], "train.accumulate is 0, expected at least 1", "train.accumulate=1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(overrides, message, hint):
    with pytest.raises(ConfigError) as caught:
        compose(["run=r", *overrides])
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_an_automatic_batch_is_checked_once_it_is_known():
    config = compose(["run=r", "train.accumulate=65"])
    assert with_batch(config, 100_000).train.batch == 448
    with pytest.raises(ConfigError, match="a rank has 64 of the 64 samples"):
        with_batch(config, 1000)


def test_a_layer_across_rows_is_refused_whoever_wrote_it():
    with pytest.raises(ConfigError, match="train.accumulate is 3, but layer '1' normalises by mean and variance"):
        require_rowwise(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), 3)
    require_rowwise(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)), 3)
