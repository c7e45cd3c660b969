"""The census log in five folds: its 6,500 held-out rows alone cannot tell models apart by hundredths of a per cent.

Seed s, from 1, tests on fold (s - 1) % 5 of partition (s - 1) // 5 and trains on the other four: seeds 1 to 5, 6 to 10
and so on test on every row once. Rows that are alike but for their weight (fnlwgt, which no model sees) and label fall
into the same fold.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pipeline.config.compose import compose

FOLDS = 5
TRAIN, TEST = 1, 2  # days: a split by day holds out the last one
FNLWGT = 2


def overrides(source: Path, folder: str, seed: int) -> list[str]:
    """Settings for the fold of ``seed``, whose log is written into ``folder``, and the flat model that is best for it.

    Chosen by rows held out of the training rows of the experiment's own split.
    """
    path = Path(folder) / f"adult-{seed}.csv"
    with source.open() as lines, path.open("w") as sink:
        sink.writelines(f"{line.strip()}, {_day(line, seed)}\n" for line in lines if line.strip())
    os.utime(path, (1, 1))  # the key of its dataset, which the order of rows is drawn from, covers a file's time
    columns = compose(["experiment=adult", f"data.path={path}"]).data.columns
    return [
        "experiment=adult",
        f"data.path={path}",
        f"data.columns=[{','.join([*columns, 'fold'])}]",
        "data.day_column=fold",
        "data.split.by=day",
        "model.embedding_dim=16",
        "train.schedule=linear",
        "train.decay_ratio=1",
    ]


def _day(line: str, seed: int) -> int:
    values = line.split(",")[:-1]
    values.pop(FNLWGT)
    partition, fold = divmod(seed - 1, FOLDS)
    drawn = hashlib.blake2b(f"{partition} {values}".encode(), digest_size=8).digest()
    return TEST if int.from_bytes(drawn, "little") % FOLDS == fold else TRAIN
