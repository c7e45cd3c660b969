"""The synthetic truth: which ids a synthetic log has, how popular they are, and what they do to the label.

Effects turn with the days and new ids replace old ones. Each day draws from its own seeds, so the truth of a day does
not depend on what earlier days drew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from pipeline.config.synthetic import SyntheticConfig

DENSE, SPARSE = 13, 26
SMALLEST_FEATURE = 10


@dataclass(frozen=True)
class Effects:
    """A pair of independent draws; ``at`` rotates from one to the other, keeping their size."""

    start: np.ndarray
    turn: np.ndarray

    def at(self, angle: float) -> np.ndarray:
        """Return the effects after drifting by ``angle`` (radians): same size, other direction."""
        return (np.cos(angle) * self.start + np.sin(angle) * self.turn).astype(np.float32)


@dataclass(frozen=True)
class Truth:
    """The planted truth. ``ids``: strings per feature; ``odds``: cumulative popularity by rank.

    ``ranked``: which id has each rank; empty where they are in this order already. ``quads``: features whose effects
    multiply.
    """

    ids: list[pl.Series]
    odds: list[np.ndarray]
    first: list[Effects]
    dense: Effects
    pairs: list[tuple[int, int, Effects, Effects]]
    scale: np.ndarray
    spread: np.ndarray
    ranked: list[np.ndarray] = field(default_factory=list)
    quads: list[dict[int, Effects]] = field(default_factory=list)


def feature_sizes(config: SyntheticConfig) -> list[int]:
    """Return the distinct ids of C1..C26: log-spaced between 10 and ``ids_per_feature``, large and small ones mixed."""
    low = min(SMALLEST_FEATURE, config.ids_per_feature)
    sizes = np.geomspace(low, config.ids_per_feature, SPARSE).round().astype(int)
    # 11 and SPARSE have no common divisor, so every size is taken once.
    return sizes[(np.arange(SPARSE) * 11 + 7) % SPARSE].tolist()


def _draw(rng: np.random.Generator, scale: float, *shape: int) -> Effects:
    return Effects(scale * rng.standard_normal(shape), scale * rng.standard_normal(shape))


def planted_truth(config: SyntheticConfig, seed: int) -> Truth:
    """Draw the truth of ``seed``, as of the first day."""
    # The order of draws is part of the truth: an additional draw would change what every seed plants.
    rng = np.random.default_rng([seed, 0])
    sizes = feature_sizes(config)
    # The smaller half of the features: each combination of their ids is seen often enough to be learnt.
    small = np.argsort(sizes)[: SPARSE // 2]
    ids, odds = [], []
    for size in sizes:
        numbers = rng.choice(1 << 32, size=size, replace=False)
        ids.append(pl.Series([f"{number:08x}" for number in numbers.tolist()]))
        weights = np.arange(1, size + 1, dtype=np.float64) ** -config.zipf
        odds.append(np.cumsum(weights) / weights.sum())
    first_scale = config.first_order_effect / np.sqrt(SPARSE)
    first = [_draw(rng, first_scale, size) for size in sizes]
    dense = _draw(rng, config.dense_effect / np.sqrt(DENSE), DENSE)
    if config.blocks:
        pairs = _block_pairs(config, sizes, seed)
    else:
        pairs = []
        latent = config.latent_dim
        # Take the square root, because two effects are multiplied.
        pair_scale = (config.pairwise_effect / np.sqrt(max(config.pairs, 1) * latent)) ** 0.5
        for _ in range(config.pairs):
            a, b = rng.choice(small, 2, replace=False).tolist()
            pairs.append((a, b, _draw(rng, pair_scale, sizes[a], latent), _draw(rng, pair_scale, sizes[b], latent)))
    scale, spread = rng.uniform(0.5, 4.0, DENSE), rng.uniform(0.7, 1.5, DENSE)

    # Groups of four features, each in one at most, with an effect of standard deviation 1 for every id. They have a
    # generator of their own, so the rest of the truth is the same with and without them.
    rng = np.random.default_rng([seed, 9])
    quads = []
    for four in rng.permutation(small)[: 4 * config.quads].reshape(config.quads, 4).tolist():
        quads.append({feature: _draw(rng, 1.0, sizes[feature]) for feature in four})
    truth = Truth(ids, odds, first, dense, pairs, scale, spread, quads=quads)
    if config.id_groups and not config.blocks:
        # Every id has the effects of one of the feature's first `id_groups` ids, drawn at random.
        rng = np.random.default_rng([seed, 8])
        group = [rng.integers(0, min(config.id_groups, size), size) for size in sizes]
        truth = _map_effects(
            truth, lambda effects, feature: Effects(effects.start[group[feature]], effects.turn[group[feature]])
        )
    return truth


def quad_logits(quads: list[dict[int, Effects]], places: np.ndarray, angle: float, effect: float) -> np.ndarray:
    """Return the log odds [rows] that ``quads`` add to ids at ``places`` [features, rows].

    Each of the ``quads`` adds the product of 1 + effect over its four features, minus 1. Such a product has terms of
    every order up to the fourth. Together they have the standard deviation ``effect``. A missing id has the factor 1.
    """
    total = np.zeros(places.shape[1])
    for four in quads:
        factors = []
        for feature, effects in four.items():
            # The last factor is that of missing ids.
            factors.append(np.append(1 + effects.at(angle), 1.0)[places[feature]])
        total += np.prod(factors, axis=0) - 1
    # 15 = 2 ** 4 - 1: the variance of such a product.
    return effect / np.sqrt(15 * max(len(quads), 1)) * total


def _map_effects(truth: Truth, change: Callable[[Effects, int], Effects]) -> Truth:
    # `change` gets the effects of ids, and their feature: first-order ones, then those of pairs, then those of quads.
    # `aged` draws new effects by how many arrays came before, so another order would plant another truth.
    first = [change(effects, feature) for feature, effects in enumerate(truth.first)]
    pairs, quads = [], []
    for a, b, left, right in truth.pairs:
        pairs.append((a, b, change(left, a), change(right, b)))
    for four in truth.quads:
        quads.append({feature: change(effects, feature) for feature, effects in four.items()})
    return replace(truth, first=first, pairs=pairs, quads=quads)


def planted_blocks(config: SyntheticConfig, seed: int) -> list[list[str]]:
    """Return the features of each of the ``blocks`` planted blocks: C1..C26 shuffled by ``seed``, evenly divided."""
    order = np.random.default_rng([seed, 3]).permutation(SPARSE)
    blocks = []
    for block in range(config.blocks):
        # Take every `blocks`-th of the shuffled features, so that block sizes differ by one at most.
        features = sorted(order[block :: config.blocks])
        blocks.append([f"C{feature + 1}" for feature in features])
    return blocks


def _block_pairs(config: SyntheticConfig, sizes: list[int], seed: int) -> list[tuple[int, int, Effects, Effects]]:
    # Returns all pairs within each block, of one latent vector per id: a factorisation machine (Rendle 2010) per block.
    within = list[tuple[int, int]]()
    for block in planted_blocks(config, seed):
        within += itertools.combinations([int(name[1:]) - 1 for name in block], 2)
    rng = np.random.default_rng([seed, 4])
    # Take the square root, because two latent vectors are multiplied.
    scale = (config.pairwise_effect / np.sqrt(max(len(within), 1) * config.latent_dim)) ** 0.5
    latent = [_draw(rng, scale, size, config.latent_dim) for size in sizes]
    return [(a, b, latent[a], latent[b]) for a, b in within]


def aged(truth: Truth, config: SyntheticConfig, seed: int, days: int) -> Truth:
    """Return the truth ``days`` later: new ids have replaced some, others have changed places in popularity."""
    ids, ranked, added = [], [], []
    for feature, first in enumerate(truth.ids):
        size = len(first)
        order, fresh = np.arange(size), round(config.new_ids * size)
        for day in range(1, days + 1):
            rng = np.random.default_rng([seed, 5, feature, day])
            moved = rng.choice(size, round(config.popularity_drift * size), replace=False)
            order[moved] = order[rng.permutation(moved)]
            born = size + fresh * (day - 1)
            order[rng.choice(size, fresh, replace=False)] = np.arange(born, born + fresh)
        # New ids are longer than those of the first day, so none is equal to one of them.
        names = [f"{feature:02x}{number:08x}" for number in range(fresh * days)]
        ids.append(pl.concat([first, pl.Series(names, dtype=pl.String)]))
        ranked.append(order)
        added.append((fresh, days))
    # An id keeps its effects: those of new ids are drawn day by day. Pairs of a block share their arrays, each of which
    # grows once.
    grown: dict[int, Effects] = {}

    def grow(effects: Effects, feature: int) -> Effects:
        if id(effects) not in grown:
            number, (fresh, days) = len(grown), added[feature]
            scale, shape = float(effects.start.std()), (fresh, *effects.start.shape[1:])
            starts, turns = [effects.start], [effects.turn]
            for day in range(1, days + 1):
                new = _draw(np.random.default_rng([seed, 6, number, day]), scale, *shape)
                starts.append(new.start)
                turns.append(new.turn)
            grown[id(effects)] = Effects(np.concatenate(starts), np.concatenate(turns))
        return grown[id(effects)]

    return replace(_map_effects(truth, grow), ids=ids, ranked=ranked)


def with_bias(logits: np.ndarray, rate: float, weights: np.ndarray | None = None) -> float:
    """Return the bias that makes the (weighted) mean of sigmoid(logits + bias) ``rate``, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        rates = sigmoid(logits + middle)
        mean = rates.mean() if weights is None else np.average(rates, weights=weights)
        if mean < rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of log odds."""
    return 1.0 / (1.0 + np.exp(-logits))
