"""The tower partitioner on planted matrices: blocks found, bounds kept, wishes obeyed, the same answer every time."""

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from pipeline.config import PartitionConfig
from pipeline.records import Tower, Towers
from pipeline.towers.partitioner import (
    ExchangeDescent,
    between,
    distances,
    make_problem,
    partition,
    place,
    stress,
    stretched,
)


def planted(features: int, blocks: int, seed: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """(similarity [F, F], block of every feature): 0.45 within blocks, 0.25 across, and noise."""
    rng = np.random.default_rng(seed)
    block = rng.permutation(features) % blocks
    found = np.where(block[:, None] == block, 0.45, 0.25) + noise * rng.normal(size=(features, features))
    found = np.clip((found + found.T) / 2, 0, 1)
    np.fill_diagonal(found, 1.0)
    return found, block


def names(count: int) -> list[str]:
    return [f"C{i + 1}" for i in range(count)]


def run(similarity, towers, loads=None, **settings):
    given = PartitionConfig(name="dmt", **{"strategy": "coherent", **settings})
    features = names(len(similarity))
    return partition(features, towers, given, similarity, loads or {}, source="a test")


def homes(towers: list[list[str]], count: int) -> np.ndarray:
    home = {name: number for number, tower in enumerate(towers) for name in tower}
    return np.array([home[name] for name in names(count)])


@pytest.mark.parametrize("blocks", [2, 3, 4, 8])
def test_coherent_towers_are_the_planted_blocks(blocks):
    for seed in range(3):
        similarity, block = planted(26, blocks, seed)
        towers, _ = run(similarity, blocks)
        assert adjusted_rand_score(block, homes(towers, 26)) == 1.0


def test_diverse_towers_cut_across_the_blocks():
    similarity, block = planted(24, 4, 0)
    towers, _ = run(similarity, 4, strategy="diverse")
    for tower in towers:
        of_block = np.bincount([block[int(name[1:]) - 1] for name in tower], minlength=4)
        assert of_block.max() <= 2, of_block


def test_the_same_input_gives_the_same_towers_and_every_feature_is_in_one():
    similarity, _ = planted(30, 4, 1, noise=0.4)
    first, evidence = run(similarity, 4)
    assert first == run(similarity, 4)[0]
    assert sorted(name for tower in first for name in tower) == sorted(names(30))
    again = Towers(
        partition="dmt", towers=tuple(Tower(features=tuple(t), hosts=(0,)) for t in first), evidence=evidence
    )
    assert Towers.from_json(again.to_json()) == again


def test_towers_keep_to_the_imbalance_of_every_load():
    similarity, _ = planted(40, 4, 2)
    rng = np.random.default_rng(0)
    loads = {"ms": rng.lognormal(0, 0.5, 40), "bytes": rng.lognormal(0, 0.5, 40)}
    towers, evidence = run(similarity, 4, loads, imbalance=0.1)
    home = homes(towers, 40)
    for load in (np.ones(40), *loads.values()):
        used = np.bincount(home, weights=load, minlength=4)
        assert used.max() <= 1.1 * load.sum() / 4 + 1e-9
    assert 0 < evidence.excess <= 0.1 + 1e-9


def test_cost_moves_features_that_similarity_alone_would_keep_together():
    similarity, block = planted(16, 2, 3, noise=0.01)
    heavy = np.where(block == 0, 3.0, 1.0)
    free = homes(run(similarity, 2, imbalance=0.0)[0], 16)
    bounded = homes(run(similarity, 2, {"ms": heavy}, imbalance=0.1)[0], 16)
    assert np.bincount(free, weights=heavy).max() == pytest.approx(24)
    assert np.bincount(bounded, weights=heavy).max() <= 1.1 * 16 + 1e-9


def test_a_load_binds_only_beyond_the_room_there_is():
    similarity, block = planted(16, 2, 3, noise=0.01)
    heavy = {"bytes": np.where(block == 0, 3.0, 1.0)}
    given = PartitionConfig(name="dmt", strategy="coherent", imbalance=0.1)
    for room, most in ((0.8, 24), (0.6, 19.2), (0.1, 17.6)):
        towers, _ = partition(names(16), 2, given, similarity, heavy, source="a test", room={"bytes": room})
        used = np.bincount(homes(towers, 16), weights=heavy["bytes"])
        assert used.max() <= most + 1e-9 and (used.max() == 24) == (room == 0.8)


def test_one_table_above_an_even_share_is_a_tower_s_bound_and_the_excess_is_told():
    similarity, _ = planted(8, 2, 4)
    load = [20.0, *[1.0] * 7]
    towers, evidence = run(similarity, 2, {"bytes": load}, imbalance=0.1)
    assert ["C1"] in towers or min(len(tower) for tower in towers) >= 1
    assert evidence.excess >= 20 / 27 * 2 - 1 - 1e-9


def test_pins_and_groups_are_kept_and_named_as_the_reason():
    similarity, block = planted(12, 3, 5)
    one, other = (names(12)[int(np.flatnonzero(block == b)[0])] for b in (0, 1))
    towers, evidence = run(similarity, 3, pins={one: 2}, groups=[[one, other]])
    assert {one, other} <= set(towers[2])
    assert evidence.reasons[one] == "pinned to tower 2"
    assert evidence.reasons[other] == f"stays with {one}"
    free = next(name for name in names(12) if name not in (one, other))
    assert evidence.reasons[free].startswith("similarity 0.")


def test_as_many_towers_as_features_and_one_tower():
    similarity, _ = planted(5, 2, 0)
    assert sorted(run(similarity, 5)[0]) == [[name] for name in names(5)]
    assert run(similarity, 1)[0] == [names(5)]


def test_no_similarity_at_all_still_gives_even_towers():
    towers, _ = run(np.eye(9), 3)
    assert [len(tower) for tower in towers] == [3, 3, 3]


def test_distances_of_the_two_strategies_are_complements():
    similarity, _ = planted(9, 3, 6)
    near, far = distances(similarity, "coherent"), distances(similarity, "diverse")
    off = ~np.eye(9, dtype=bool)
    assert np.allclose((near + far)[off], 1.0)
    assert not near.diagonal().any() and not far.diagonal().any()
    assert stretched(similarity)[off].min() == 0.0 and stretched(similarity)[off].max() == 1.0


def test_the_plane_shows_distances_that_lie_in_a_plane_exactly_and_stress_only_falls():
    points = np.random.default_rng(0).normal(size=(12, 2))
    exact = between(points, points)
    assert stress(place(exact), exact) < 1e-6
    similarity, _ = planted(12, 3, 7)
    found = distances(similarity, "coherent")
    assert stress(place(found), found) < stress(place(found) * 1.2, found)
    assert stress(place(found), found) < 0.5 * stress(np.random.default_rng(1).normal(size=(12, 2)), found)


def test_exchange_never_makes_towers_worse_and_counts_its_cost_right():
    rng = np.random.default_rng(8)
    raw = rng.random((20, 20))
    found = (raw + raw.T) / 2
    np.fill_diagonal(found, 0.0)
    items = [[0, 1, 2], [3, 4], *([i] for i in range(5, 20))]
    problem = make_problem(items, 3, {"n": np.ones(20), "c": rng.random(20)}, {1: 2}, 0.2)
    start = rng.integers(0, 3, len(items))
    start[:4] = 0, 2, 1, 2

    def cost(assigned):
        home = np.zeros(20, int)
        for item, tower in zip(items, assigned, strict=True):
            home[item] = tower
        return sum(found[np.ix_(home == t, home == t)].sum() for t in range(3)) / 20

    end, told = ExchangeDescent(problem, start, found).run()
    assert end[1] == 2
    assert (problem.used(end) <= problem.capacity[:, None] + 1e-8).all()
    assert told == pytest.approx(cost(end))
    again, _ = ExchangeDescent(problem, end, found).run()
    assert np.array_equal(again, end)


def test_a_loose_tower_does_not_draw_features_of_a_tight_one():
    block = np.repeat([0, 1], 6)
    found = np.where(block[:, None] == block, np.where(block == 0, 0.2, 0.65)[:, None], 0.8)
    found[0, :] = found[:, 0] = np.where(block == 0, 0.55, 0.7)
    np.fill_diagonal(found, 0.0)
    problem = make_problem([[i] for i in range(12)], 2, {"n": np.ones(12)}, {}, 0.4)
    assert np.array_equal(ExchangeDescent(problem, block.copy(), found).run()[0], block)
