"""``make bench-widths``: test NE with a width for each table by frequency, at half the bytes, against one width.

The planted log has features of 30 to 30,000 ids, popular by Zipf's law. Each id has a latent vector; products of them
in pairs, an effect of each id and a number make the clicks. A seed draws another log and other initial values; both
models of a seed train on the same rows with the same settings, in a process of one thread. ``nightjar widths`` chooses.

``ratio``: mean test NE with several widths over that with one. ``bytes`` and ``even_bytes``: of the tables' weights.
``narrow_ratio``: the same for one width of about as many bytes as the several take. ``logs flights``: the real log of
``benchmarks.flights`` in place of planted ones; a seed draws initial values and the order of rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import flights
from benchmarks.common import finish
from benchmarks.runs import processes, run
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus
from pipeline.planning import PlanInputs
from pipeline.planning.width_choice import widths
from pipeline.stages.stage_inputs import read_dataset, with_batch
from pipeline.store import Store

FEATURES, FEWEST, MOST = 12, 30, 30_000  # ids of the smallest and of the largest feature
LATENT, PAIRS = 4, 12


@dataclass(frozen=True)
class Job:
    """Both models with one seed. ``more``: overrides of every run."""

    log: str
    seed: int
    rows: int
    dim: int
    share: float
    more: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Test NE with one width, with several, and with one narrow width; bytes of the first two; the widths."""

    even: float
    mixed: float
    narrow: float
    even_bytes: int
    bytes: int
    dims: dict[str, int]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--log", default="planted", choices=("planted", "flights"))
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rows", type=int, default=400_000, help="of a planted log, a fifth of them to test on")
    options.add_argument("--dim", type=int, default=16)
    options.add_argument("--share", type=float, default=0.5)
    options.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began = time.monotonic()
    jobs = [
        Job(given.log, 1 + seed, given.rows, given.dim, given.share, tuple(given.set)) for seed in range(given.seeds)
    ]
    found = []
    with processes(given.jobs, runs_each=1) as pool:
        for job, each in zip(jobs, pool.map(run_job, jobs), strict=True):
            line = f"seed {job.seed}: NE {each.even:.5f} with one width, {each.mixed:.5f} with several"
            print(f"{line}, {each.narrow:.5f} with a narrow one; {json.dumps(each.dims)}", flush=True)
            found.append(each)
    even = float(np.mean([each.even for each in found]))
    finish(
        "widths",
        float(np.mean([each.mixed for each in found])) / even,
        log=given.log,
        ne_one_width=even,
        ratios=[round(each.mixed / each.even, 5) for each in found],
        narrow_ratio=float(np.mean([each.narrow for each in found])) / even,
        bytes=found[0].bytes,
        even_bytes=found[0].even_bytes,
        seeds=given.seeds,
        rows=given.rows,
        dim=given.dim,
        seconds=time.monotonic() - began,
    )


def run_job(job: Job) -> Found:
    """Ingest once, choose the widths, train all models."""
    with tempfile.TemporaryDirectory() as folder:
        data = _flights() if job.log == "flights" else planted(Path(folder), job.rows, job.seed)
        own = [
            *data,
            "model=dlrm_small",
            f"model.embedding_dim={job.dim}",
            "train.global_batch=512",
            "train.lr=0.002",
            "train.sparse_lr=0.1",
            f"seed={job.seed}",
            f"store={folder}/store",
            "train.threads_per_rank=1",
            "train.precision=fp32",
            "train.log_every_steps=1000",
            "train.guard.collapse=false",
            *job.more,
        ]
        even = run([*own, "run=even"])
        schema, profile = read_dataset(Store(f"{folder}/store"), even["ingest"])
        config = with_batch(compose([*own, "run=even"]), schema.rows["train"])
        inputs = PlanInputs.of(config, schema, profile)
        chosen = widths(inputs, job.share)
        mixed = run([*own, "run=mixed", chosen.override])
        less = max(4, round(job.dim * chosen.bytes / chosen.even_bytes / 4) * 4)
        narrow = run([*own, "run=narrow", f"model.embedding_dim={less}"])
    nes = (float(made["evaluate"].summary["ne"]) for made in (even, mixed, narrow))
    return Found(*nes, chosen.even_bytes, chosen.bytes, chosen.dims)


def _flights() -> list[str]:
    path = flights.flights()
    if path is None:
        raise SystemExit("the flights could not be fetched")
    return [each for each in flights.overrides(path) if not each.startswith(("model.", "train."))]


def planted(folder: Path, rows: int, seed: int) -> list[str]:
    """Write the log of ``seed`` and return the settings that read it."""
    rng = np.random.default_rng([2026, seed])
    sizes = np.geomspace(FEWEST, MOST, FEATURES).astype(int)
    ids = [_zipf(rng, size, rows) for size in sizes]
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
    return [
        "data=parquet",
        f"data.path={folder}/log.parquet",
        "+data.dense.x={}",
        "data.sparse_defaults.min_count=1",
        *(f"+data.sparse.f{place}={{}}" for place in range(FEATURES)),
    ]


def _zipf(rng: np.random.Generator, size: int, rows: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, size + 1) ** 1.05
    return rng.choice(size, rows, p=weights / weights.sum())


if __name__ == "__main__":
    main()
