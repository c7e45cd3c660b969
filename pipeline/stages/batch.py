"""``train.global_batch=auto``: how many samples a step has, from the rows there are to train on.

The number depends on the train rows and the checkpoint that training starts from, never on the hardware. A training
that goes on elsewhere therefore takes the same batches, and one night takes the batches of the night before.
"""

from __future__ import annotations

import dataclasses

from pipeline.config import Config
from pipeline.errors import ArtifactError, ConfigError, UnreachableError
from pipeline.stages.init import recorded_init
from pipeline.store import Store

STEPS = 200  # of an epoch, at least: fewer updates leave a model that has hardly begun to learn
LARGEST = 4096  # samples a step: what the default learning rates are meant for
SMALLEST = 64  # samples a step: below, a step costs as much and its gradient is mostly noise
MULTIPLE = 64  # samples: ranks get equal parts


def automatic_batch(rows: int) -> int:
    """Samples a step for ``rows`` train rows (0: not known, as for a list of tables): an epoch of 200 steps or more.

    A multiple of 64, between 64 and 4,096 samples; so fewer than 12,800 rows give fewer than 200 steps.
    """
    if rows == 0:
        return LARGEST
    return min(LARGEST, max(SMALLEST, rows // STEPS // MULTIPLE * MULTIPLE))


def with_batch(config: Config, rows: int) -> Config:
    """``config`` with ``train.global_batch`` as a number where it is auto, for a dataset of ``rows`` train rows.

    Raises ConfigError where that number is smaller than the number of ranks.
    """
    if isinstance(config.train.global_batch, int):
        return config
    batch = automatic_batch(rows)
    ranks = config.hardware.workers
    if batch < ranks:
        raise ConfigError(
            f"train.global_batch=auto is {batch} for {rows:,} train rows, expected at least one sample for each of "
            f"the {ranks} ranks",
            hint=f"train.global_batch={64 * ranks}, or fewer ranks: hardware.hosts=1",
        )
    return _with(config, batch)


def with_former_batch(config: Config, store: Store) -> Config:
    """``config`` with ``train.global_batch``, where it is auto, as in the checkpoint ``checkpoint.init_from`` names.

    A checkpoint removed since then counts by what this run recorded when it began. ``config`` itself where training
    starts from nothing, or where that checkpoint cannot be read: what is wrong with it, ``covered_init`` says.
    """
    if isinstance(config.train.global_batch, int) or config.checkpoint.init_from is None:
        return config
    from pipeline.checkpoint.reference import find_checkpoint

    former, known = (None, None) if config.force else recorded_init(config, store)
    try:
        artifact = find_checkpoint(store, config.checkpoint.init_from, *(known or ()))
    except UnreachableError:
        raise
    except ArtifactError:
        return config if former is None else _with(config, former.train.global_batch)
    return _with(config, artifact.config.get("train", {}).get("global_batch"))


def _with(config: Config, batch: object) -> Config:
    """``config`` with that global batch; itself where ``batch`` is no number."""
    if not isinstance(batch, int):
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
