"""The clock that cuts sampled steps into phases, read off a host's clock that the tests turn."""

import pytest
import torch

from pipeline.records import PHASES
from pipeline.training.step_phases import EVERY, FIRST, PhaseClock

CPU = torch.device("cpu")


class Host:
    """A clock in seconds that stands still until it is turned."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def spend(self, ms: float) -> None:
        self.seconds += ms / 1000


@pytest.fixture
def host() -> Host:
    return Host()


def take_step(clock: PhaseClock, host: Host, phases=(("lookup", 5), ("dense", 400))) -> bool:
    """One step, with so many ms in each of ``phases``; whether it was sampled."""
    clock.begin()
    sampled = clock.sampling
    for phase, ms in phases:
        clock.enter(phase)
        host.spend(ms)
    clock.end()
    return sampled


def test_every_fifth_step_is_sampled_after_the_first_ones(host: Host) -> None:
    clock = PhaseClock(CPU, host)
    sampled = [step for step in range(20) if take_step(clock, host)]
    assert sampled == [FIRST + EVERY * i for i in range(4)]


def test_time_goes_to_the_phase_it_was_spent_in(host: Host) -> None:
    clock = PhaseClock(CPU, host)
    assert clock.figures() == {}
    for _ in range(40):
        take_step(clock, host)
        host.spend(7)  # between two steps
    figures = clock.figures()
    assert tuple(figures) == PHASES
    assert figures == pytest.approx({**dict.fromkeys(PHASES, 0.0), "lookup": 5, "dense": 400})


def test_slow_and_quick_steps_do_not_count(host: Host) -> None:
    clock = PhaseClock(CPU, host)
    for step in range(FIRST + 8 * EVERY):
        sample = (step - FIRST) // EVERY
        take_step(clock, host, [("dense", {0: 1, 3: 2, 5: 9000, 6: 8000}.get(sample, 100 + sample))])
    assert clock.figures()["dense"] == pytest.approx((101 + 102 + 104 + 107) / 4)


def test_a_phase_within_another_gives_back(host: Host) -> None:
    clock = PhaseClock(CPU, host)
    for _ in range(FIRST + 1):
        clock.begin()
        host.spend(1)
        clock.enter("dense")
        host.spend(2)
        with clock.within("input_exchange"):
            host.spend(300)
        host.spend(4)
        clock.enter("update")
        host.spend(8)
        clock.end()
    spent = {"overhead": 1, "dense": 6, "input_exchange": 300, "update": 8}
    assert clock.figures() == pytest.approx({**dict.fromkeys(PHASES, 0.0), **spent})


def test_waiting_for_data_is_in_no_phase(host: Host) -> None:
    def slow():
        for number in range(FIRST + 1):
            host.spend(300)
            yield number

    clock = PhaseClock(CPU, host)
    batches, seen = clock.between(slow()), []
    for _ in range(FIRST + 1):
        clock.begin()
        clock.enter("dense")
        seen.append(next(batches))
        host.spend(20)
        clock.end()
    assert seen == [0, 1, 2]
    assert next(batches, None) is None
    assert clock.figures() == pytest.approx({**dict.fromkeys(PHASES, 0.0), "dense": 20})


@pytest.mark.measures
def test_without_another_one_it_is_the_host_s_own_clock() -> None:
    clock = PhaseClock(CPU)
    for _ in range(FIRST + 1):
        clock.begin()
        clock.enter("dense")
        torch.ones(64, 64) @ torch.ones(64, 64)
        clock.end()
    assert clock.figures()["dense"] > 0


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
