"""``make bench-bipartite``: a cluster of workers and embedding hosts against a flat one, and Twitter's shape.

**Same model.** Four hosts (network namespaces, 150 MB/s each), flat and as 2 + 2, these also with ``--exchange``: test
NE, and the bytes that a sample sends between hosts, counted, beside those of the formula
(``planning.bipartite.sample_bytes``).

**Twitter's shape.** A sparse linear layer of 23 M weights. Measured here: processor seconds a sample of one host's
Hogwild threads, of a worker and of the embedding ranks of 2 + 2 hosts, the bytes sent, and the latency of a small
all-to-all. Carried by the model below: 32 workers. Wall clocks do not count, since four hosts share this machine.

A step of W workers and E embedding hosts, each with C cores and a link of B bytes/s, with b samples a worker, takes

    b w / C + W b e / (E C) + 4 l + sum over exchanges of max(b x, W b x / E) / B + 2 (W - 1) / W d / B

w, e: processor seconds of a sample on a worker and on all embedding ranks; l: latency; x: bytes of a sample of the
pooled embeddings and their gradients; d: bytes of the dense part. Only the exchange of the next batch's ids overlaps
with it, and counts where it takes longer. Hogwild's C threads are taken to be C times as
fast as one, which memory would not let them be. ``ratio``: samples/s of 32 workers over those of Hogwild on one host of
as many cores; the bar is 8.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import finish, options, run, words
from benchmarks.network.bed import Bed, require_bed
from benchmarks.network.ranks import Ranks

RANK = "benchmarks.bipartite_ranks"
HOSTS = 4


@dataclass(frozen=True)
class Measured:
    """Processor seconds of a sample, the latency in seconds, and bytes of a sample and of the dense part."""

    worker: float
    owners: float
    latency: float
    ids: float
    pooled: float
    dense: float

    def step(self, workers: int, owners: int, batch: int, cores: int, rate: float) -> dict[str, float]:
        """Seconds of a step by part."""
        carried = {"ids": self.ids, "pooled": self.pooled, "gradients": self.pooled}
        link = {name: max(batch * size, workers * batch * size / owners) / rate for name, size in carried.items()}
        return {
            "worker": batch * self.worker / cores,
            "lookups": workers * batch * self.owners / (owners * cores),
            "latency": 4 * self.latency,
            **link,
            "all_reduce": 2 * (workers - 1) / workers * self.dense / rate,
        }


def seconds_of(parts: dict[str, float]) -> float:
    """Seconds of a step: the ids of the next batch travel beside all the rest, as the planner counts, too."""
    return max(sum(parts.values()) - parts["ids"], parts["ids"])


def main() -> None:
    given = options(
        __doc__,
        mb_per_s=(150.0, "what a host sends at most"),
        rows=(60_000, "of the synthetic log"),
        weights=(23_040_000, "of the sparse linear layer"),
        dim=(48, "weights of an id"),
        wide=(40, "of them outputs of the sparse linear layer"),
        parts=(8, "tables, into which ids are dealt"),
        shards=(4, "blocks of columns into which each of them is cut"),
        exchange=("fp16", "of pooled embeddings", {"choices": ["fp32", "fp16", "bf16"]}),
        ids=(96, "of a sample"),
        batch=(2048, "samples of a worker or Hogwild thread in a step"),
        steps=(10, "of a round"),
        rounds=5,
        cores=(2, "of a host, in the carried figures"),
        workers=32,
        owners=([32, 16, 8], "the first one is judged", {"nargs": "+"}),
    )
    require_bed()
    began = time.monotonic()
    same = _same_model(given)
    shape = {
        "rows": given.weights // given.dim,
        "dim": given.dim,
        "wide": given.wide,
        "parts": given.parts,
        "shards": given.shards,
        "ids": given.ids,
        "batch": given.batch,
        "threads": given.cores,
        "exchange": given.exchange,
    }
    alone = _hogwild(given, shape)
    measured, counted = _measure(given, shape)
    carried = {}
    for owners in given.owners:
        parts = measured.step(given.workers, owners, given.batch, given.cores, 1e6 * given.mb_per_s)
        speed = given.workers * given.batch / seconds_of(parts)
        carried[str(owners)] = {
            "samples_per_s": round(speed),
            "ratio": round(speed * alone / given.cores, 2),
            "step_ms": {name: round(1e3 * seconds, 3) for name, seconds in parts.items()},
        }
        print(f"carried: {given.workers} workers, {owners} embedding hosts: {carried[str(owners)]}", flush=True)
    finish(
        "bipartite",
        carried[str(given.owners[0])]["ratio"],
        seconds=time.monotonic() - began,
        **same,
        measured={
            "hogwild_cpu_us": 1e6 * alone,
            "worker_cpu_us": 1e6 * measured.worker,
            "embedding_cpu_us": 1e6 * measured.owners,
            "latency_us": 1e6 * measured.latency,
            **counted,
        },
        carried={
            "workers": given.workers,
            "cores": given.cores,
            "hogwild_samples_per_s": given.cores / alone,
            "embedding_hosts": carried,
        },
    )


def _same_model(given: argparse.Namespace) -> dict[str, Any]:
    """NE and bytes of both kinds of clusters, trained one after the other on the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = words(f"""data=synthetic data.synthetic.rows={given.rows} data.synthetic.days=1 hardware=laptop
                model=dlrm_small train.global_batch=1024 train.precision=fp32 train.warmup_steps=10
                train.threads_per_rank=1 train.guard.collapse=false store={folder} partition=flat
                plan.sharding_types=[table_wise]""")
        dataset = run([*settings, "run=data", "stages=[ingest]"])["ingest"].path
        found = {}
        with Bed(HOSTS) as bed, Ranks(bed, 1, RANK) as ranks:
            bed.limit(1e6 * given.mb_per_s)
            for name, owners, exchange in (("flat", 0, "fp32"), ("bipartite", 2, "fp32"), ("half", 2, given.exchange)):
                own = [f"hardware.hosts={HOSTS}", f"hardware.embedding_hosts={owners}", f"run={name}"]
                own.append(f"partition.exchange={exchange}")
                before = bed.sent()
                found[name] = ranks.ask(what="fit", overrides=[*settings, *own], dataset=dataset)[0]
                wire = [after - start for after, start in zip(bed.sent(), before, strict=True)]
                print(f"{name}: {found[name]}, {[round(each / 2**20, 1) for each in wire]} MiB a host", flush=True)
    flat, apart, half = found["flat"], found["bipartite"], found["half"]
    return {
        "ne_flat": flat["ne"],
        "ne_bipartite": apart["ne"],
        "ne_change": abs(apart["ne"] / flat["ne"] - 1),
        f"ne_{given.exchange}": half["ne"],
        f"ne_change_{given.exchange}": abs(half["ne"] / flat["ne"] - 1),
        "bytes_flat": flat["sent"],
        "bytes_bipartite": apart["sent"],
        "bytes_formula": apart["formula"],
        "bytes_of_formula": apart["sent"] / apart["formula"],
        f"bytes_{given.exchange}": half["sent"],
    }


def _hogwild(given: argparse.Namespace, shape: dict[str, int]) -> float:
    """Processor seconds of a sample with as many threads as a host has cores: the median of the rounds."""
    with Bed(1) as bed, Ranks(bed, 1, RANK) as ranks:
        ranks.ask(what="build", hosts=1, owners=0, **shape)
        spent = [ranks.ask(what="steps", count=given.steps)[0]["cpu"] for _ in range(given.rounds)]
    seconds = statistics.median(spent) / given.steps / given.batch
    print(f"hogwild, {given.cores} threads: {1e6 * seconds:.2f} us of a processor a sample", flush=True)
    return seconds


def _measure(given: argparse.Namespace, shape: dict[str, int]) -> tuple[Measured, dict[str, float]]:
    """What 2 + 2 hosts take, and the bytes that each side sent beside those of the formula."""
    workers, samples = HOSTS - 2, given.steps * given.batch
    with Bed(HOSTS) as bed, Ranks(bed, 1, RANK) as ranks:
        bed.limit(1e6 * given.mb_per_s)
        built = ranks.ask(what="build", hosts=HOSTS, owners=2, **shape)[0]
        rounds, wires = [], []
        for _ in range(given.rounds):
            before = bed.sent()
            rounds.append(ranks.ask(what="steps", count=given.steps))
            wires.append([after - start for after, start in zip(bed.sent(), before, strict=True)])
        latency = ranks.ask(what="latency", times=50)[0]["seconds"]
    worker = statistics.median(each["cpu"] for found in rounds for each in found[:workers]) / samples
    owners = statistics.median(sum(each["cpu"] for each in found[workers:]) for found in rounds) / samples / workers
    measured = Measured(worker, owners, latency, built["ids"], built["pooled"], built["dense_bytes"])
    wall = statistics.median(found[0]["wall"] for found in rounds) / given.steps
    there, back = measured.ids + measured.pooled, measured.pooled
    reduced = 2 * (workers - 1) / workers * measured.dense * given.steps
    wire = [statistics.median(each[host] for each in wires) for host in range(HOSTS)]
    counted = {
        "sent_of_formula_there": statistics.median(found[0]["sent"] for found in rounds) / (there * samples),
        "sent_of_formula_back": statistics.median(found[-1]["sent"] for found in rounds) * 2 / (back * samples * 2),
        "wire_of_formula_worker": wire[0] / (there * samples + reduced),
        "wire_of_formula_embedding": wire[-1] / (back * samples * workers / 2),
        "bytes_there": there,
        "bytes_back": back,
        "dense_bytes": measured.dense,
        "step_ms_here": 1e3 * wall,
    }
    print(f"2 + 2 hosts: {measured}, {counted}", flush=True)
    return measured, counted


if __name__ == "__main__":
    main()
