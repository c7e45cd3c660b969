"""What stops a checkpoint: dense parameters and optimizer moments that are not finite, the same on every rank."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline.config import GuardConfig, TrainConfig
from pipeline.core.errors import GuardError
from pipeline.training.guards import Collapse, GuardFigures, check_layers
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


def judge(found, *, last=False, rising=0, **guard):
    """Have a guard judge these (step, NE, spread of logits), one after the other."""
    settings = {"window_steps": 10, "collapse_after_steps": 20, **guard}
    collapse = Collapse(TrainConfig(guard=GuardConfig(**settings)), rising)
    for number, (step, ne, spread) in enumerate(found, 1):
        collapse.take(GuardFigures(ne, spread, "9 rows"), step, last=last and number == len(found))


def test_a_model_that_is_worse_than_the_base_rate_goes_on_while_it_becomes_better():
    judge([(20, 1.5, 1.0), (30, 1.3, 1.0), (40, 1.1, 1.0), (50, 0.9, 1.0)])
    judge([(20, 0.9, 1.0), (60, None, 1.0)])
    judge([(30, 1.3, 1.0), (40, 1.2, 1.0)], last=True)


@pytest.mark.parametrize(
    "found",
    [
        [(20, 1.2, 1.0), (30, 1.2, 1.0)],
        [(20, 1.2, 1.0), (30, 1.19999, 1.0)],
        [(10, 1.0, 1.0), (20, 1.0, 1.0), (50, 1.0, 1.0)],
        [(20, 0.9, 1.0), (60, 1.2, 1.0)],
        [(20, 1.2, 1.0), (30, 1.1, 1.0), (40, 1.15, 1.0)],
        [(20, 1.2, 1.0), (30, float("nan"), 1.0)],
        [(20, 1.5, 1.0), (30, 1.3, 1.0), (50, 0.9, 1.0), (60, 1.2, 1.0)],
        [(20, 1.005, 1.0), (40, 1.005, 1.0), (60, 1.00495, 1.0)],
    ],
)
def test_one_that_does_not_is_stopped(found):
    with pytest.raises(GuardError, match="the model is not learning: NE is .* on 9 rows after step"):
        judge(found)


def test_near_the_base_rate_ne_may_fall_slowly():
    """By 5e-5 a window, that is 2e-4 in the four windows that count there."""
    judge([(step, 1.005 - 5e-6 * (step - 20), 1.0) for step in range(20, 400, 10)])
    judge([(200, 1.0002, 1.0), (250, 1.00015, 1.0), (300, 1.0001, 1.0)], window_steps=50, collapse_after_steps=200)
    with pytest.raises(GuardError, match="not learning"):
        judge([(20, 1.0002, 1.0), (30, 1.0001, 1.0)], last=True)


def test_while_the_rates_rise_a_model_need_not_learn_but_its_predictions_must_differ():
    slow = [(step, 1.3, 1.0) for step in range(20, 200, 10)]
    judge(slow, rising=200)
    with pytest.raises(GuardError, match="not learning: NE is 1.3000 on 9 rows after step 210"):
        judge([*slow, (200, 1.3, 1.0), (210, 1.3, 1.0)], rising=201)
    with pytest.raises(GuardError, match="not learning"):
        judge(slow, rising=200, last=True)
    with pytest.raises(GuardError, match="have collapsed"):
        judge([*slow, (200, 1.3, 1e-9)], rising=2000)


def meter(ne=1.2, spread=1e-9):
    return SimpleNamespace(window=SimpleNamespace(logit_std=spread, ne=ne), window_full=True)


def guard_of(rising=0, **settings):
    return Collapse(TrainConfig(guard=GuardConfig(window_steps=10, collapse_after_steps=20, **settings)), rising)


def test_the_last_step_and_what_costs_nothing_are_judged_whatever_was_found_before():
    collapse = guard_of()
    for step in (20, 30, 50, 90):
        collapse.take(GuardFigures(0.9, 1.0, "9 rows"), step, last=False)
    assert not collapse.is_due(meter(), 120)
    assert collapse.is_due(meter(), 120, free=True)
    assert not collapse.is_due(meter(0.9, 1.0), 120, free=True), "nothing asks for it"
    assert not guard_of(collapse=False).is_due(meter(), 120, free=True)
    assert not guard_of().is_due(meter(), 9, free=True), "before its steps"


def test_however_often_the_model_is_well_a_judgement_comes_within_sixteen_windows():
    collapse, step, judged = guard_of(), 0, []
    for step in range(1, 2000):
        if collapse.is_due(meter(), step):
            judged.append(step)
            collapse.take(GuardFigures(0.9, 1.0, "9 rows"), step, last=False)
    assert max(after - before for before, after in pairwise(judged)) == 160
    assert judged[:4] == [10, 20, 40, 80]


def test_a_model_whose_rates_rise_is_not_judged_for_its_ne():
    assert not guard_of(rising=200).is_due(meter(spread=1.0), 100)
    assert guard_of(rising=200).is_due(meter(spread=1.0), 190)
    assert guard_of(rising=200).is_due(meter(spread=1e-9), 100)


def test_before_its_steps_the_guard_stops_nothing_and_predictions_that_are_alike_stop_at_once():
    judge([(5, 1.3, 0.0), (15, 1.3, 0.0)])
    with pytest.raises(GuardError, match="collapsed: the standard deviation of the logits is 1e-05 on 9 rows"):
        judge([(20, 0.99, 1e-5)])


def test_at_the_end_there_is_nothing_to_wait_for():
    with pytest.raises(GuardError, match="not learning"):
        judge([(25, 1.1, 1.0)], last=True)
