"""The assignment of tables to tiers and ranks: against brute force, against its bound, and what it must never do."""

import dataclasses
import os

import pytest
from assign_cases import brute_force, check, cluster_problem, small_problem

from pipeline.planning.assign import assign
from pipeline.planning.assign_model import AssignmentProblem, Candidate, ShardCost
from pipeline.planning.assign_programs import silence_native_output

GIB = 2**30


def piece(ms: float, hbm: int = 0, ddr: int = 0, ssd: int = 0) -> ShardCost:
    return ShardCost(ms=ms, usage=(hbm, ddr, ssd))


def whole(ms: float, hbm: int = 0, ddr: int = 0, ssd: int = 0) -> Candidate:
    return Candidate(shards=(piece(ms, hbm, ddr, ssd),), places=None)


@pytest.mark.parametrize(
    "start", [0, 20, 40, *(pytest.param(start, marks=pytest.mark.slow) for start in range(60, 200, 20))]
)
def test_small_problems_are_within_two_percent_of_brute_force(start) -> None:
    for seed in range(start, start + 20):
        problem = small_problem(seed)
        best, assignment = brute_force(problem), assign(problem)
        assert (assignment is None) == (best is None), f"seed {seed}"
        if best is not None and assignment is not None:
            check(problem, assignment)
            assert assignment.ms <= best * 1.02, f"seed {seed}"
            assert assignment.bound <= best * (1 + 1e-6), f"seed {seed}"


def test_the_small_problems_are_of_every_kind() -> None:
    answers = [brute_force(small_problem(seed)) for seed in range(200)]
    assert 20 <= sum(answer is None for answer in answers) <= 100
    problems = [small_problem(seed) for seed in range(200)]
    assert {len(problem.candidates) for problem in problems} == set(range(1, 7))


@pytest.mark.parametrize(
    ("tables", "ranks", "tightness"),
    [
        (26, 16, 0.5),
        pytest.param(26, 128, 1.5, marks=pytest.mark.slow),
        pytest.param(120, 32, 2.0, marks=pytest.mark.slow),
    ],
)
def test_large_problems_come_near_their_bound(tables, ranks, tightness) -> None:
    problem = cluster_problem(5, tables=tables, ranks=ranks, splits=(1, 2, 4), tightness=tightness)
    assignment = assign(problem)
    assert assignment is not None
    check(problem, assignment)
    assert assignment.gap < 0.1


def test_two_ranks_are_solved_to_a_thousandth() -> None:
    problem = cluster_problem(2, tables=26, ranks=2, splits=(1, 2), tightness=1.5)
    assignment = assign(problem)
    assert assignment is not None
    check(problem, assignment)
    assert assignment.gap <= 2e-3


def test_equal_problems_give_equal_assignments() -> None:
    for tables, ranks in ((8, 2), (16, 16)):  # solved whole; searched, with neighbourhoods solved
        problem = cluster_problem(9, tables=tables, ranks=ranks, splits=(1, 2), tightness=1.0)
        assert assign(problem, tolerance=0.075) == assign(problem, tolerance=0.075)


def test_the_solver_prints_nothing(capfd) -> None:
    with silence_native_output():
        os.write(1, b"a native line")
    assign(cluster_problem(9, tables=6, ranks=2, splits=(1, 2), tightness=1.0))
    print("a line of ours")
    assert capfd.readouterr().out == "a line of ours\n"


def test_bytes_that_fill_every_rank_to_the_last_byte_fit() -> None:
    sizes = [7, 5, 4, 4, 3, 1]
    candidates = {f"T{i}": (whole(1.0, size * GIB + 1),) for i, size in enumerate(sizes)}
    problem = AssignmentProblem(candidates=candidates, capacity=((12 * GIB + 3, 0, 0),) * 2, base_ms=(0.0, 0.0))
    assignment = assign(problem)
    assert assignment is not None
    check(problem, assignment)
    assert assign(dataclasses.replace(problem, capacity=((12 * GIB + 2, 0, 0),) * 2)) is None


def test_a_dear_tier_is_taken_only_where_the_cheap_one_is_full() -> None:
    both = (whole(1.0, hbm=6), whole(5.0, ssd=6))
    problem = AssignmentProblem(candidates={"A": both, "B": both}, capacity=((6, 0, 100),), base_ms=(0.0,))
    assignment = assign(problem)
    assert assignment is not None and sorted(assignment.chosen.values()) == [0, 1] and assignment.ms == 6.0
    assignment = assign(dataclasses.replace(problem, capacity=((12, 0, 100),)))
    assert assignment is not None and set(assignment.chosen.values()) == {0} and assignment.ms == 2.0


def test_a_busy_rank_gets_less() -> None:
    tables = {f"T{i}": (whole(1.0, hbm=1),) for i in range(4)}
    assignment = assign(AssignmentProblem(candidates=tables, capacity=((9, 9, 9),) * 2, base_ms=(2.0, 0.0)))
    assert assignment is not None and assignment.ms == 3.0
    assert sorted(ranks[0] for ranks in assignment.ranks.values()) == [0, 1, 1, 1]


def test_the_answer_counts_only_candidates_as_they_were_given() -> None:
    never = whole(0.1, hbm=50)  # fits no rank, so the second candidate is the table's first that fits
    problem = AssignmentProblem(candidates={"A": (never, whole(2.0, hbm=5))}, capacity=((9, 0, 0),), base_ms=(1.0,))
    assignment = assign(problem)
    assert (
        assignment is not None
        and assignment.chosen == {"A": 1}
        and assignment.ranks == {"A": (0,)}
        and assignment.ms == 3.0
    )


def test_pieces_go_to_one_of_the_places_in_order() -> None:
    pieces = (piece(2.0, hbm=1), piece(1.0, hbm=3))
    problem = AssignmentProblem(
        candidates={"A": (Candidate(shards=pieces, places=((0, 1), (3, 2))),)},
        capacity=((9, 0, 0), (2, 0, 0), (9, 0, 0), (9, 0, 0)),
        base_ms=(0.0,) * 4,
    )
    assignment = assign(problem)
    assert assignment is not None and assignment.ranks == {"A": (3, 2)} and assignment.ms == 2.0


def test_no_tables_cost_what_the_slowest_rank_does_anyway() -> None:
    assignment = assign(AssignmentProblem(candidates={}, capacity=((0, 0, 0),) * 2, base_ms=(1.0, 4.0)))
    assert assignment is not None and assignment.ms == 4.0 and assignment.chosen == {}


def test_a_place_with_one_rank_twice_is_refused() -> None:
    twice = Candidate(shards=(piece(1.0), piece(1.0)), places=((0, 0),))
    with pytest.raises(ValueError, match="'A', candidate 0: a place names one rank for two pieces"):
        assign(AssignmentProblem(candidates={"A": (twice,)}, capacity=((1, 1, 1),) * 2, base_ms=(0.0, 0.0)))


def test_anything_else_that_has_a_limit_is_taken_up_like_memory() -> None:
    quick, slow = ShardCost(ms=1.0, usage=(1, 0, 0, 0.7)), ShardCost(ms=2.0, usage=(1, 0, 0, 0.2))
    both = tuple(Candidate(shards=(each,), places=None) for each in (quick, slow))
    capacity = ((9, 0, 0, 1.0),) * 2
    assignment = assign(
        AssignmentProblem(candidates=dict.fromkeys("ABC", both), capacity=capacity, base_ms=(0.0, 0.0)), thorough=False
    )
    assert assignment is not None and sorted(assignment.chosen.values()) == [0, 0, 1] and assignment.ms == 3.0
