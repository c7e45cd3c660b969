"""Stage publish on 1, 2 and 4 ranks, for ``benchmarks.ranks``: CPU seconds of the busiest one, and equal versions.

What all ranks share is counted: tables, and the held-out rows and features scored for the gate. What rank 0 then does
alone (bootstrap, verdict, pages) is told apart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.runs import run_config, silent
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.stages.steps import steps
from pipeline.store import Store


def published(folder: str, rows: int, ids: int, ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """By number of ranks: seconds of the ``busiest``, of ``all`` and ``alone``, and a ``digest`` of files and record.

    A model of the demo is trained with ``ids`` a feature, and half of ``rows`` are held out.
    """
    config = compose(
        [
            "experiment=demo",
            "run=p",
            f"store={folder}/published",
            f"data.synthetic.rows={rows}",
            f"data.synthetic.ids_per_feature={ids}",
            "data.split.test_share=0.5",
            "train.max_steps=20",
            "train.threads_per_rank=1",
            "train.guard.collapse=false",
            f"gate.max_rows={rows}",
            "gate.force=to be measured",
            "stages=[ingest,plan,partition,train,evaluate,publish]",
        ]
    )
    run_config(dataclasses.replace(config, stages=config.stages[:-1]))
    return {world: _published(Path(folder) / f"publish{world}", config, world) for world in ranks}


def _published(place: Path, config: Config, world: int) -> dict[str, Any]:
    place.mkdir()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, place, config)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(world)]
    spent = [each["seconds"] for each in found]
    return {"busiest": max(spent), "all": sum(spent), "alone": found[0]["alone"], "digest": found[0]["digest"]}


def _rank(rank: int, world: int, place: Path, config: Config) -> None:
    import torch.distributed as dist
    import torch.export._trace  # noqa: F401 (what reading a program imports)

    from pipeline.stages import release, release_gate
    from pipeline.stages.release_ranks import join_ranks

    silent()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # as torchrun says it
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=world)
    store = Store(config.store)
    *earlier, last = steps(config, store)
    inputs = {step.name: store.get(step.path, step.name) for step in earlier}
    config.hardware = dataclasses.replace(config.hardware, ranks_per_host=world)
    config.publish = dataclasses.replace(config.publish, model=f"ranks{world}")
    join_ranks(config)
    shared, importance = [0.0], release_gate._measure_importance

    def noted(*given: Any) -> dict[str, Any]:  # the last thing that ranks share
        worth = importance(*given)
        shared[0] = time.process_time()
        return worth

    release_gate._measure_importance = noted
    dist.barrier()
    began = time.process_time()
    version, digest = release.version_of(config, store, last, inputs), ""
    if version is not None:
        gate = store.read_json(f"{version.path}/gate.json") | {"model": ""}
        files = {name: entry.checksum for name, entry in version.files.items() if name.startswith("tables/")}
        digest = hashlib.sha256(json.dumps([files, gate], sort_keys=True).encode()).hexdigest()
    record = {"seconds": shared[0] - began, "alone": time.process_time() - shared[0], "digest": digest}
    (place / f"{rank}.json").write_text(json.dumps(record))
