"""What stops a checkpoint: dense parameters and optimizer moments that are not finite, the same on every rank."""

import json

import pytest
import torch
import torch.distributed as dist

from pipeline.config import GuardConfig, TrainConfig
from pipeline.errors import GuardError
from pipeline.training.guards import Collapse, Judged, check_layers
from tests.embeddings.ranks import spawn
from tests.tiers import with_slow

SPOILT = {
    "weight": "layer parameter 'bottom.weight' is not finite",
    "exp_avg": "exp_avg of layer parameter 'bottom.weight' is not finite",
    "exp_avg_sq": "exp_avg_sq of layer parameter 'bottom.weight' is not finite",
}


def run(folder):
    """Spoil one part on the last rank after each of three steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for part in SPOILT:
        layer = torch.nn.Linear(3, 2)
        dense = {f"bottom.{name}": value for name, value in layer.named_parameters()}
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)
        check_layers(dense, optimizer, 0, TrainConfig())  # no state yet
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        check_layers(dense, optimizer, 1, TrainConfig())
        if rank == world - 1:
            spoilt = layer.weight.detach() if part == "weight" else optimizer.state[layer.weight][part]
            spoilt[1, 1] = float("inf")
        with pytest.raises(GuardError) as caught:
            check_layers(dense, optimizer, 2, TrainConfig())
        found[part] = str(caught.value)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_layers_and_moments_that_are_not_finite_stop_every_rank(tmp_path, world):
    spawn(run, world, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        for part, message in SPOILT.items():
            assert f"{message} after step 2; no checkpoint was written" in found[part]
            assert "train.clip.dense_norm=" in found[part]


def judge(found, *, last=False, **guard):
    """Have a guard judge these (step, NE, spread of logits), one after the other."""
    settings = {"window_steps": 10, "collapse_after_steps": 20, **guard}
    collapse = Collapse(TrainConfig(guard=GuardConfig(**settings)))
    for number, (step, ne, spread) in enumerate(found, 1):
        collapse.take(Judged(ne, spread, "9 rows"), step, last=last and number == len(found))


def test_a_model_that_is_worse_than_the_base_rate_goes_on_while_it_becomes_better():
    judge([(20, 1.5, 1.0), (30, 1.3, 1.0), (40, 1.1, 1.0), (50, 0.9, 1.0), (60, 1.2, 1.0)][:4])
    judge([(20, 0.9, 1.0), (60, None, 1.0)])
    judge([(30, 1.3, 1.0), (40, 1.2, 1.0)], last=True)


@pytest.mark.parametrize(
    "found",
    [
        [(20, 1.2, 1.0), (30, 1.2, 1.0)], [(20, 1.2, 1.0), (30, 1.19999, 1.0)], [(10, 1.0, 1.0), (20, 1.0, 1.0)],
        [(20, 0.9, 1.0), (60, 1.2, 1.0)], [(20, 1.2, 1.0), (30, 1.1, 1.0), (40, 1.15, 1.0)],
        [(20, 1.2, 1.0), (30, float("nan"), 1.0)],
    ],
)  # fmt: skip
def test_one_that_does_not_is_stopped(found):
    with pytest.raises(GuardError, match="the model is not learning: NE is .* on 9 rows after step"):
        judge(found)


def test_before_its_steps_the_guard_stops_nothing_and_predictions_that_are_alike_stop_at_once():
    judge([(5, 1.3, 0.0), (15, 1.3, 0.0)])
    with pytest.raises(GuardError, match="collapsed: the standard deviation of the logits is 1e-05 on 9 rows"):
        judge([(20, 0.99, 1e-5)])


def test_at_the_end_there_is_nothing_to_wait_for():
    with pytest.raises(GuardError, match="not learning"):
        judge([(25, 1.1, 1.0)], last=True)
