"""``make bench-dryrun``: dry runs of MLPerf's DLRMv2 on 64 and 512 H100s in one process each.

``ratio``: metadata of the rank that has most, at 512 ranks over at 64: 8 would be all ranks' lists on every rank.
``seconds`` (wall), ``cpu_seconds`` and ``peak_gib`` are those of the run of 512; ``problems``: what did not fit
together in either.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time

from benchmarks.harness import NIGHTJAR, finish, options, python
from pipeline.core.units import GIB


def main() -> None:
    options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        settings = ("experiment=dlrmv2", "hardware=h100x16x8", f"store={folder}/store")
        python(*NIGHTJAR, "ingest", *settings, "run=data")
        few = json.loads(python(*NIGHTJAR, "dry-run", *settings, "--ranks", "64", "--json"))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        many = json.loads(python(*NIGHTJAR, "dry-run", *settings, "--ranks", "512", "--json"))
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    least, most = (int(each["largest"]["sharding"] + each["largest"]["exchanged"]) for each in (few, many))
    finish(
        "dryrun",
        most / least,
        seconds=seconds,
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        peak_gib=many["peak"] / GIB,
        largest_metadata_bytes=most,
        problems=len(few["problems"]) + len(many["problems"]),
    )


if __name__ == "__main__":
    main()
