"""``make bench-widths``: test NE with a width for each table by frequency, at half the bytes, against one width.

The planted log has features of 30 to 30,000 ids, popular by Zipf's law. Each id has a latent vector; products of them
in pairs, an effect of each id and a number make the clicks. A seed draws another log and other initial values; both
models of a seed train on the same rows with the same settings, in a process of one thread. ``nightjar widths`` chooses.

``ratio``: mean test NE with several widths over that with one. ``bytes`` and ``even_bytes``: of the tables' weights.
``narrow_ratio``: the same for one width of about as many bytes as the several take.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.harness import PLAIN, finish, means, options, run, test_ne
from benchmarks.logs import clicked, written
from benchmarks.studies import MACHINE, per_case
from pipeline.config.compose import compose
from pipeline.planning import PlanInputs
from pipeline.planning.width_choice import widths
from pipeline.stages.stage_inputs import read_dataset, with_batch
from pipeline.store import Store

FEATURES, FEWEST, MOST = 12, 30, 30_000  # ids of the smallest and of the largest feature
LATENT, PAIRS = 4, 12
DIM, SHARE = 16, 0.5  # the one width, and the share of its bytes that several may take


def main() -> None:
    given = options(__doc__, seeds=5, rows=(400_000, "of a log, a fifth of them to test on"), **MACHINE)
    began = time.monotonic()
    found = per_case(three_widths, given, [(1 + seed,) for seed in range(given.seeds)])
    mean = means([{name: each[name] for name in ("even", "mixed", "narrow")} for each in found])
    finish(
        "widths",
        mean["mixed"] / mean["even"],
        ne_one_width=mean["even"],
        ratios=[round(each["mixed"] / each["even"], 5) for each in found],
        narrow_ratio=mean["narrow"] / mean["even"],
        bytes=found[0]["bytes"],
        even_bytes=found[0]["even_bytes"],
        seeds=given.seeds,
        rows=given.rows,
        seconds=time.monotonic() - began,
    )


def three_widths(given: argparse.Namespace, folder: str, seed: int) -> dict[str, Any]:
    """Test NE with one width, with several, and with one narrow width; bytes of the first two; the widths."""
    world = [*planted(folder, given.rows, seed), "model=dlrm_small", f"model.embedding_dim={DIM}"]
    world += ["train.global_batch=512", "train.lr=0.002", "train.sparse_lr=0.1", f"seed={seed}"]
    world += [f"store={folder}/store", *PLAIN, *given.set]
    even = run([*world, "run=even"])
    schema, profile = read_dataset(Store(f"{folder}/store"), even["ingest"])
    config = with_batch(compose([*world, "run=even"]), schema.rows["train"])
    chosen = widths(PlanInputs.of(config, schema, profile), SHARE)
    narrow = max(4, round(DIM * chosen.bytes / chosen.even_bytes / 4) * 4)
    return {
        "even": float(even["evaluate"].summary["ne"]),
        "mixed": test_ne([*world, "run=mixed", chosen.override]),
        "narrow": test_ne([*world, "run=narrow", f"model.embedding_dim={narrow}"]),
        "even_bytes": chosen.even_bytes,
        "bytes": chosen.bytes,
        "dims": chosen.dims,
    }


def planted(folder: str, rows: int, seed: int) -> list[str]:
    """Write the log of ``seed`` and return the settings that read it."""
    rng = np.random.default_rng([2026, seed])
    sizes = np.geomspace(FEWEST, MOST, FEATURES).astype(int)
    ids = []
    for size in sizes:
        weights = 1.0 / np.arange(1, size + 1) ** 1.05
        ids.append(rng.choice(size, rows, p=weights / weights.sum()))
    latent = [rng.normal(0, 1, (size, LATENT)) for size in sizes]
    logits = sum(rng.normal(0, 0.35, size)[each] for size, each in zip(sizes, ids, strict=True))
    number = rng.normal(0, 1, rows)
    logits = logits + 0.3 * number
    for _ in range(PAIRS):
        one, other = rng.choice(FEATURES, 2, replace=False)
        products = (latent[one][ids[one]] * latent[other][ids[other]]).sum(axis=1)
        logits = logits + 0.5 / np.sqrt(LATENT) * products
    columns = {"x": number} | {f"f{place}": values for place, values in enumerate(ids)}
    return written(folder, clicked(rng, logits - 1.5), columns)


if __name__ == "__main__":
    main()
