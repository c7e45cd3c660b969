"""``make bench-widths``: test NE with a width for each table by frequency, at half the bytes, against one width.

The planted log has features of 30 to 30,000 ids, popular by Zipf's law. Each id has a latent vector; products of them
in pairs, an effect of each id and a number make the clicks. A seed draws another log and other initial values; both
models of a seed train on the same rows with the same settings, in a process of one thread. ``nightjar widths`` chooses.

``ratio``: mean test NE with several widths over that with one. ``bytes`` and ``even_bytes``: of the tables' weights.
``narrow_ratio``: the same for one width of about as many bytes as the several take. ``log flights``: the real log of
``benchmarks.logs`` in place of planted ones; a seed draws initial values and the order of rows.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import PLAIN, SET, finish, means, options, processes, run, show, test_ne
from benchmarks.logs import flights, flights_settings
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus
from pipeline.planning import PlanInputs
from pipeline.planning.width_choice import widths
from pipeline.stages.stage_inputs import read_dataset, with_batch
from pipeline.store import Store

FEATURES, FEWEST, MOST = 12, 30, 30_000  # ids of the smallest and of the largest feature
LATENT, PAIRS = 4, 12


def main() -> None:
    given = options(
        __doc__,
        log=("planted", None, {"choices": ("planted", "flights")}),
        seeds=5,
        rows=(400_000, "of a planted log, a fifth of them to test on"),
        dim=16,
        share=0.5,
        jobs=(available_cpus(), "processes at a time"),
        set=SET,
    )
    began, found = time.monotonic(), []
    jobs = [(given.log, 1 + seed, given.rows, given.dim, given.share, given.set) for seed in range(given.seeds)]
    with processes(given.jobs, runs_each=1) as pool:
        for number, figures in enumerate(pool.map(run_seed, *zip(*jobs, strict=True)), 1):
            show(f"seed {number}", figures)
            found.append(figures)
    mean = means([{name: each[name] for name in ("even", "mixed", "narrow")} for each in found])
    finish(
        "widths",
        mean["mixed"] / mean["even"],
        log=given.log,
        ne_one_width=mean["even"],
        ratios=[round(each["mixed"] / each["even"], 5) for each in found],
        narrow_ratio=mean["narrow"] / mean["even"],
        bytes=found[0]["bytes"],
        even_bytes=found[0]["even_bytes"],
        seeds=given.seeds,
        rows=given.rows,
        dim=given.dim,
        seconds=time.monotonic() - began,
    )


def run_seed(log: str, seed: int, rows: int, dim: int, share: float, more: list[str]) -> dict[str, Any]:
    """Test NE with one width, with several, and with one narrow width; bytes of the first two; the widths."""
    with tempfile.TemporaryDirectory() as folder:
        if log == "flights":
            path = flights()
            if path is None:
                raise SystemExit("the flights could not be fetched")
            data = [each for each in flights_settings(path) if not each.startswith(("model.", "train."))]
        else:
            data = planted(Path(folder), rows, seed)
        world = [*data, "model=dlrm_small", f"model.embedding_dim={dim}", "train.global_batch=512", "train.lr=0.002"]
        world += ["train.sparse_lr=0.1", f"seed={seed}", f"store={folder}/store", *PLAIN, *more]
        even = run([*world, "run=even"])
        schema, profile = read_dataset(Store(f"{folder}/store"), even["ingest"])
        config = with_batch(compose([*world, "run=even"]), schema.rows["train"])
        chosen = widths(PlanInputs.of(config, schema, profile), share)
        narrow = max(4, round(dim * chosen.bytes / chosen.even_bytes / 4) * 4)
        return {
            "even": float(even["evaluate"].summary["ne"]),
            "mixed": test_ne([*world, "run=mixed", chosen.override]),
            "narrow": test_ne([*world, "run=narrow", f"model.embedding_dim={narrow}"]),
            "even_bytes": chosen.even_bytes,
            "bytes": chosen.bytes,
            "dims": chosen.dims,
        }


def planted(folder: Path, rows: int, seed: int) -> list[str]:
    """Write the log of ``seed`` and return the settings that read it."""
    rng = np.random.default_rng([2026, seed])
    sizes = np.geomspace(FEWEST, MOST, FEATURES).astype(int)
    ids = []
    for size in sizes:
        weights = 1.0 / np.arange(1, size + 1) ** 1.05
        ids.append(rng.choice(size, rows, p=weights / weights.sum()))
    latent = [rng.normal(0, 1, (size, LATENT)) for size in sizes]
    logit = sum(rng.normal(0, 0.35, size)[each] for size, each in zip(sizes, ids, strict=True))
    number = rng.normal(0, 1, rows)
    logit = logit + 0.3 * number
    for _ in range(PAIRS):
        one, other = rng.choice(FEATURES, 2, replace=False)
        products = (latent[one][ids[one]] * latent[other][ids[other]]).sum(axis=1)
        logit = logit + 0.5 / np.sqrt(LATENT) * products
    clicked = rng.random(rows) < 1 / (1 + np.exp(1.5 - logit))
    columns = {f"f{place}": pa.array([f"v{each}" for each in values]) for place, values in enumerate(ids)}
    pq.write_table(pa.table({"label": clicked.astype(int), "x": number, **columns}), folder / "log.parquet")
    features = [f"+data.sparse.{name}={{}}" for name in columns]
    source = ["data=parquet", f"data.path={folder}/log.parquet", "+data.dense.x={}"]
    return [*source, "data.sparse_defaults.min_count=1", *features]


if __name__ == "__main__":
    main()
