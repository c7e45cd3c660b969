"""``make bench-dryrun``: dry runs of 64 and 512 ranks in one process each.

``ratio``: metadata of the rank that has most, at 512 ranks over at 64: 8 would be all ranks' lists on every rank.
``ratio_mean``: the same of the mean rank. ``seconds`` (wall), ``cpu_seconds`` and ``peak_gib`` are those of the run of
512; ``problems``: what did not fit together in either.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import finish
from pipeline.core.units import GIB

NIGHTJAR = (sys.executable, "-m", "pipeline.cli")


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--experiment", default="dlrmv2")
    options.add_argument("--hardware", default="h100x16x8")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"experiment={given.experiment}", f"hardware={given.hardware}", f"store={folder}/store")
        subprocess.run([*NIGHTJAR, "ingest", *settings, "run=data"], check=True, capture_output=True)
        few, _, _ = _run(settings, 64)
        many, seconds, cpu = _run(settings, 512)
    finish(
        "dryrun",
        _metadata(many["largest"]) / _metadata(few["largest"]),
        seconds=seconds,
        cpu_seconds=cpu,
        peak_gib=many["peak"] / GIB,
        largest_metadata_bytes=_metadata(many["largest"]),
        largest_rank=many["largest"]["rank"],
        ratio_mean=many["mean_metadata"] / few["mean_metadata"],
        mean_metadata_bytes=many["mean_metadata"],
        plan_bytes=many["plan_bytes"],
        files=many["files"],
        problems=len(few["problems"]) + len(many["problems"]),
        experiment=given.experiment,
    )


def _run(settings: tuple[str, ...], ranks: int) -> tuple[dict[str, Any], float, float]:
    """What a dry run found, its wall seconds and its processor seconds."""
    import resource

    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [*NIGHTJAR, "dry-run", *settings, "--ranks", str(ranks), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, cpu


def _metadata(rank: dict[str, Any]) -> int:
    return int(rank["sharding"] + rank["exchanged"])


if __name__ == "__main__":
    main()
