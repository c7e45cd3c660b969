"""Hit-rate curves: predicted against replayed caches, and the properties that the planner builds on."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.hitrate import HitCurve
from pipeline.records import FeatureProfile
from pipeline.specs.id_mapping import access_histogram

ROWS, LOOKUPS = 200_000, 2_000_000
SIZES = (0.001, 0.01, 0.05, 0.2)


def profile_of(counts: np.ndarray) -> FeatureProfile:
    hot_rows, hot_share = access_histogram(counts)
    distinct = int(np.count_nonzero(counts))
    return FeatureProfile(
        rows=len(counts), distinct=distinct, missing_share=0.0, pooling=1.0, hot_rows=hot_rows, hot_share=hot_share
    )


@pytest.fixture(scope="module")
def halves() -> tuple[np.ndarray, np.ndarray]:
    """Two halves of a Zipf 1.1 log whose hot rows lie anywhere in the table."""
    rng = np.random.default_rng(7)
    mass = np.cumsum(np.arange(1, ROWS + 1) ** -1.1)
    ranks = np.searchsorted(mass / mass[-1], rng.random(LOOKUPS))
    ids = rng.permutation(ROWS)[ranks]
    return ids[: LOOKUPS // 2], ids[LOOKUPS // 2 :]


@pytest.fixture(scope="module")
def curve(halves) -> HitCurve:
    return HitCurve.from_profile(profile_of(np.bincount(halves[0], minlength=ROWS)), lookups=len(halves[0]))


def lru_hits(warm: list[int], ids: list[int], size: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    for part in (warm, ids):
        hits = 0
        for row in part:
            if row in cache:
                hits += 1
                cache.move_to_end(row)
            else:
                if len(cache) >= size:
                    cache.popitem(last=False)
                cache[row] = None
    return hits / len(ids)


@pytest.mark.parametrize("size", SIZES)
def test_lru_replay_of_later_ids_is_within_two_points(halves, curve, size) -> None:
    replayed = lru_hits(halves[0].tolist(), halves[1].tolist(), int(ROWS * size))
    assert curve.lru_share(int(ROWS * size)) == pytest.approx(replayed, abs=0.02)


@pytest.mark.parametrize("size", SIZES)
def test_lfu_replay_of_later_ids_is_within_two_points(halves, curve, size) -> None:
    by_heat = np.argsort(-np.bincount(halves[0], minlength=ROWS), kind="stable")
    pinned = np.zeros(ROWS, bool)
    pinned[by_heat[: int(ROWS * size)]] = True  # what a cache filled by the first half's frequency holds
    assert curve.share(int(ROWS * size)) == pytest.approx(pinned[halves[1]].mean(), abs=0.02)


def test_a_sample_flatters_its_tail_unless_its_lookups_are_told(halves, curve) -> None:
    raw = HitCurve.from_profile(profile_of(np.bincount(halves[0], minlength=ROWS)))
    truth = HitCurve.zipf(ROWS, 1.1).share(ROWS * 0.2)
    assert raw.share(ROWS * 0.2) > truth + 0.01
    assert curve.share(ROWS * 0.2) == pytest.approx(truth, abs=0.005)


@pytest.mark.parametrize("lookups", [10, 1_000, 100_000])
def test_distinct_rows_of_a_batch(halves, curve, lookups) -> None:
    ids = halves[1]
    counted = np.mean([len(np.unique(ids[at : at + lookups])) for at in range(0, 9 * lookups, lookups)])
    assert curve.distinct(lookups) == pytest.approx(counted, rel=0.05)
    assert curve.distinct(1) == pytest.approx(1.0)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_zipf_agrees_with_the_sum_over_rows(exponent) -> None:
    mass = np.arange(1, 50_001) ** -exponent
    shares = np.cumsum(mass) / mass.sum()
    zipf = HitCurve.zipf(50_000, exponent)
    for k in (1, 7, 100, 1234, 40_000):
        assert zipf.share(k) == pytest.approx(shares[k - 1], abs=1e-4)
    assert zipf.distinct(20_000) == pytest.approx(-np.expm1(-20_000 * mass / mass.sum()).sum(), rel=2e-3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=400), st.booleans())
def test_curves_are_monotone_concave_and_exact_at_measured_points(counts, corrected) -> None:
    per_row = np.array(counts, np.int64)
    profile = profile_of(per_row)
    curve = HitCurve.from_profile(profile, lookups=float(per_row.sum()) if corrected else 0.0)
    ks = np.arange(0, len(counts) + 1)
    for shares in (np.array([curve.share(k) for k in ks]), np.array([curve.lru_share(k) for k in ks])):
        assert shares[0] == 0 and shares[-1] == pytest.approx(1.0)
        assert (np.diff(shares) >= -1e-9).all() and shares.max() <= 1 + 1e-9
    shares = np.array([curve.share(k) for k in ks])
    if not corrected:
        assert (np.diff(shares, 2) <= 1e-6).all()
        if per_row.sum():
            assert [curve.share(k) for k in profile.hot_rows] == pytest.approx(profile.hot_share)


def test_lru_never_beats_perfect_frequency(curve) -> None:
    for k in (10, 1_000, 30_000, 150_000):
        assert curve.lru_share(k) <= curve.share(k) + 1e-6


def test_rows_that_no_lookup_asks_for_do_not_widen_the_tail() -> None:
    counts = np.bincount(np.random.default_rng(1).integers(0, 2_000, 10_000), minlength=100_000)
    curve = HitCurve.from_profile(profile_of(counts), lookups=10_000)
    assert curve.share(2_500) > 0.99
    assert curve.distinct(1e7) < 2_500


def test_a_log_without_lookups_has_no_hot_rows() -> None:
    curve = HitCurve.from_profile(profile_of(np.zeros(1_000, np.int64)))
    assert curve.share(100) == pytest.approx(0.1)


def test_a_log_of_rare_ids_gives_a_curve_without_gaps():
    """More distinct ids than rows (the rare ones share a row), all rows seen: the tail ends where the table does."""
    counts = np.concatenate([[931, 91, 63], np.full(103, 4)]) / (931 + 91 + 63 + 412)
    rows = [1, 2, 3, 5, 9, 20, 50, 106]
    share = [float(counts[:k].sum()) for k in rows]
    profile = FeatureProfile(rows=106, distinct=1035, missing_share=0, pooling=1.0, hot_rows=rows, hot_share=share)
    for lookups in (1579.0, 1497.0, 5e4):
        curve = HitCurve.from_profile(profile, lookups=lookups)
        assert (np.diff(curve.knots) > 1e-9).all()
        assert np.isfinite([curve.distinct(5000.0), curve.lru_share(50), curve.share(60)]).all()
