"""Which checkpoint is a baseline, and what a delta rests on."""

import pytest

from pipeline.checkpoint.index import CheckpointChain, parents, rebase_pays, wants_baseline


def test_the_papers_rule() -> None:
    assert not rebase_pays(())
    assert not rebase_pays((0.25,))
    assert not rebase_pays((0.25, 0.4))
    # 1 + .25 + .4 + .7 = 2.35 <= 4 * .7
    assert rebase_pays((0.25, 0.4, 0.7))


@pytest.mark.parametrize(
    ("policy", "shares", "expected"),
    [
        ("intermittent", (0.25,), False),
        ("intermittent", (0.25, 0.4, 0.7), True),
        ("one_shot", (0.25, 0.4, 0.7), False),
        ("consecutive", (0.25, 0.9, 0.9), False),
        ("full", (0.1,), True),
    ],
)
def test_baselines_by_policy(policy: str, shares: tuple[float, ...], expected: bool) -> None:
    chain = CheckpointChain(("base", *(f"d{i}" for i in range(len(shares)))), shares)
    assert wants_baseline(policy, chain, longest=10) is expected


def test_first_checkpoint_and_full_chains_are_baselines() -> None:
    assert wants_baseline("one_shot", None, longest=4)
    chain = CheckpointChain(("base", "a", "b"), (0.1, 0.1))
    assert not wants_baseline("consecutive", chain, longest=3)
    assert wants_baseline("consecutive", chain, longest=2)


def test_consecutive_rests_on_the_chain_and_one_shot_on_the_baseline() -> None:
    chain = CheckpointChain(("base", "a", "b"), (0.1, 0.1))
    assert parents("consecutive", chain) == ("base", "a", "b")
    assert parents("one_shot", chain) == parents("intermittent", chain) == ("base",)
