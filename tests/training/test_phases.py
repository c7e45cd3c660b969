"""The clock that cuts sampled steps into phases, and the meter of a rank's memory."""

import pytest
import torch

from pipeline.records import PHASES
from pipeline.training.memory import MemoryMeter
from pipeline.training.phases import EVERY, FIRST, PhaseClock


def work(rounds: int) -> None:
    matrix = torch.ones(64, 64)
    for _ in range(rounds):
        matrix = matrix @ matrix / 64


def take_step(clock: PhaseClock, phases=(("lookup", 5), ("dense", 400))) -> bool:
    clock.begin()
    sampled = clock.sampling
    for phase, rounds in phases:
        clock.enter(phase)
        work(rounds)
    clock.end()
    return sampled


def test_every_fifth_step_is_sampled_after_the_first_ones() -> None:
    clock = PhaseClock(torch.device("cpu"))
    sampled = [step for step in range(20) if take_step(clock)]
    assert sampled == [FIRST + EVERY * i for i in range(4)]


def test_time_goes_to_the_phase_it_was_spent_in() -> None:
    clock = PhaseClock(torch.device("cpu"))
    assert clock.figures() == {}
    for _ in range(40):
        take_step(clock)
    figures = clock.figures()
    assert tuple(figures) == PHASES
    assert figures["dense"] > 10 * figures["lookup"] > 0
    assert figures["update"] == 0


def test_a_phase_within_another_gives_back() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(FIRST + 1):
        clock.begin()
        clock.enter("dense")
        with clock.within("input_exchange"):
            work(300)
        clock.enter("update")
        clock.end()
    figures = clock.figures()
    assert figures["input_exchange"] > 10 * figures["dense"] > 0


def test_waiting_for_data_is_in_no_phase() -> None:
    def slow():
        for number in range(FIRST + 1):
            work(300)
            yield number

    clock = PhaseClock(torch.device("cpu"))
    batches, seen = clock.between(slow()), []
    for _ in range(FIRST + 1):
        clock.begin()
        clock.enter("dense")
        seen.append(next(batches))
        work(20)
        clock.end()
    assert seen == [0, 1, 2]
    assert next(batches, None) is None
    # Waiting took 15 times as long as the phase around it.
    assert 0 < clock.figures()["dense"] < clock_of(300)


def clock_of(rounds: int) -> float:
    """Median ms of ``rounds`` of work as the clock sees them."""
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(FIRST + 1):
        take_step(clock, (("dense", rounds),))
    return clock.figures()["dense"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_streams_time_counts_not_the_hosts() -> None:
    clock = PhaseClock(torch.device("cuda"))
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(FIRST + EVERY + 1):
        clock.begin()
        clock.enter("dense")
        for _ in range(20):
            matrix = matrix @ matrix / 4096
        clock.enter("lookup")
        clock.end()
    figures = clock.figures()
    assert figures["dense"] > 10 * figures["lookup"] > 0


def test_memory_counts_what_came_since() -> None:
    before = torch.ones(40_000_000)  # 160 MB that are not of the meter's time
    meter = MemoryMeter(torch.device("cpu"))
    small = meter.peak()
    more = torch.ones(60_000_000)
    del more
    peak = meter.peak()
    assert small < 40e6
    assert 230e6 < peak < 290e6
    assert before.sum() > 0
