"""When a checkpoint is a new baseline and when a delta (Check-N-Run, NSDI'22, section 4.1).

Sizes are shares of a full checkpoint. *one_shot*: each delta holds all rows changed since the baseline.
*consecutive*: each holds the rows changed since the checkpoint before it, and needs all of them to be restored.
*intermittent*: one-shot deltas, and a new baseline as soon as that is predicted to write less.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointChain:
    """The checkpoints since the newest baseline: its path and those of the deltas after it, oldest first.

    ``shares``: bytes of each delta as a share of the baseline's.
    """

    paths: tuple[str, ...]
    shares: tuple[float, ...] = ()


def wants_baseline(policy: str, chain: CheckpointChain | None, longest: int) -> bool:
    """Whether the next checkpoint is a baseline. ``longest``: deltas a chain may hold."""
    if chain is None or policy == "full" or len(chain.paths) > longest:
        return True
    return policy == "intermittent" and rebase_pays(chain.shares)


def rebase_pays(shares: tuple[float, ...]) -> bool:
    """The paper's rule: with deltas S_1..S_i written, rebase when 1 + S_1 + ... + S_i <= (i + 1) * S_i.

    The left side is what the last i + 1 checkpoints cost on average times i + 1 if the chain began anew; the right
    side is what going on costs, because a one-shot delta never shrinks.
    """
    return bool(shares) and 1.0 + sum(shares) <= (len(shares) + 1) * shares[-1]


def parents(policy: str, chain: CheckpointChain) -> tuple[str, ...]:
    """What a delta after ``chain`` is restored on top of: the whole chain if consecutive, else the baseline."""
    return chain.paths if policy == "consecutive" else chain.paths[:1]
