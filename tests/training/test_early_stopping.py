"""What looks at the validation rows decide, by their figures alone."""

import json

import pytest

from pipeline.config.train import ValidateConfig
from pipeline.training.early_stopping import Stopping, StoppingDecision, ValidationResult, is_due, looks_after

BETTER, WORSE, LOWER, STOP = (
    StoppingDecision.BETTER,
    StoppingDecision.WORSE,
    StoppingDecision.LOWER,
    StoppingDecision.STOP,
)


def decided(stopping, values, monitor="ne"):
    looks = [
        ValidationResult(step, v, 0.5, 0.6) if monitor == "ne" else ValidationResult(step, 0.9, v, 0.6)
        for step, v in enumerate(values)
    ]
    return [stopping.decide(look) for look in looks]


def test_a_plateau_lowers_the_rates_and_the_next_one_stops():
    stopping = Stopping(ValidateConfig(patience=2, lr_drops=1, lr_factor=0.1))
    assert decided(stopping, [0.9, 0.8, 0.81, 0.80, 0.79, 0.795]) == [BETTER, BETTER, WORSE, LOWER, BETTER, WORSE]
    assert stopping.lr_scale == pytest.approx(0.1) and not stopping.stopped
    assert stopping.decide(ValidationResult(9, 0.79, 0.5, 0.6)) is STOP
    assert stopping.stopped and stopping.best.step == 4


def test_a_look_must_be_better_by_more_than_min_delta():
    assert decided(Stopping(ValidateConfig(min_delta=0.01)), [0.9, 0.895, 0.88]) == [BETTER, WORSE, BETTER]


def test_auc_is_better_where_it_is_larger():
    assert decided(Stopping(ValidateConfig(monitor="auc")), [0.7, 0.69, 0.71], "auc") == [BETTER, WORSE, BETTER]


def test_without_patience_nothing_stops():
    assert STOP not in decided(Stopping(ValidateConfig(patience=None)), [0.5] + [0.9] * 100)


@pytest.mark.parametrize("cut", range(7))
def test_the_state_goes_through_json_and_decides_the_same(cut):
    config, values = ValidateConfig(patience=2, lr_drops=1), [0.9, 0.8, 0.81, 0.80, 0.79, 0.795, 0.8]
    whole = decided(Stopping(config), values)
    first, second = Stopping(config), Stopping(config)
    verdicts = decided(first, values[:cut])
    second.load(json.loads(json.dumps(first.state())))
    assert verdicts + decided(second, values[cut:]) == whole
    assert second.lr_scale == pytest.approx(config.lr_factor)


@pytest.mark.parametrize("per_epoch", [1, 2, 3, 4, 5, 84, 1001])
def test_four_looks_an_epoch_the_last_at_its_end(per_epoch):
    looks = list(looks_after(ValidateConfig(), 0, per_epoch, 3 * per_epoch))
    assert len(looks) == 3 * min(4, per_epoch)
    assert {per_epoch, 2 * per_epoch, 3 * per_epoch} <= set(looks)


def test_looks_every_n_steps_and_at_the_end():
    assert list(looks_after(ValidateConfig(every_steps=4), 3, 7, 10)) == [4, 8, 10]
    assert is_due(ValidateConfig(every_steps=100), 10, 7, 10)


def test_only_the_best_look_keeps_the_parts_of_its_loss_also_when_it_is_resumed():
    stopping = Stopping(ValidateConfig())
    for step, ne in ((10, 0.9), (20, 0.8), (30, 0.85)):
        stopping.decide(ValidationResult(step, ne, 0.7, 0.5, parts=[float(step), 1.0]))
    again = Stopping(ValidateConfig())
    again.load(json.loads(json.dumps(stopping.state())))
    assert again.best == ValidationResult(20, 0.8, 0.7, 0.5, parts=[20.0, 1.0])
    assert [look.parts for look in again.looks] == [None] * 3
