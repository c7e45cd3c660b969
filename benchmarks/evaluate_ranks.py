"""Stage evaluate on 1, 2 and 4 ranks, for ``benchmarks.ranks``: seconds, those of the busiest CPU, and equal figures.

A rank has one thread and an equal share of the CPUs. It is timed from when all have imported what they need, up to the
figures, as in the stage.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.cgroup import equal_share, shares
from benchmarks.runs import silent
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store


def evaluated(folder: str, rows: int, ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """By number of ranks: ``wall`` seconds, CPU ``busiest`` and of ``all``, and a ``digest`` of logits and figures.

    A model of the demo is trained, and three quarters of ``rows`` are held out.
    """
    checkpoint = _made(_config(folder, rows, 1), "train")["train"].summary["final"]
    found = {}
    for world in ranks:
        config = _config(folder, rows, world)
        _made(config, "partition")
        found[world] = _evaluated(Path(folder), config, checkpoint, equal_share(max(ranks)))
    return found


def _made(config: Config, last: str) -> dict[str, Artifact]:
    """The artifacts by stage, up to stage ``last``."""
    store, made = Store(config.store), {}
    for step in steps(config, store, last=last):
        if store.find(step.path) is None:
            run_stage(step, config, store, StageIO())
        made[step.name] = store.get(step.path, step.name)
    return made


def _config(folder: str, rows: int, world: int) -> Config:
    return compose(
        [
            "experiment=demo",
            "run=e",
            f"store={folder}/evaluated",
            f"data.synthetic.rows={rows}",
            "data.split.test_share=0.75",
            "train.max_steps=20",
            "train.threads_per_rank=1",
            "train.guard.collapse=false",
            f"hardware.ranks_per_host={world}",
        ]
    )


def _evaluated(folder: Path, config: Config, checkpoint: str, share: float) -> dict[str, Any]:
    """On as many ranks as ``config`` has, each with a ``share`` of a CPU."""
    world = config.world_size
    place = folder / f"ranks{world}"
    place.mkdir()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, world, place, config, checkpoint, share)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(world)]
    spent = [each["seconds"] for each in found]
    wall = max(each["wall"] for each in found)
    return {"busiest": max(spent), "all": sum(spent), "wall": wall, "digest": found[0]["digest"]}


def _rank(rank: int, world: int, place: Path, config: Config, checkpoint: str, share: float) -> None:
    import torch.distributed as dist

    from pipeline.evaluation import evaluate, reliability
    from pipeline.stages.stage_inputs import read_towers
    from pipeline.training.config_settings import select_prediction_settings
    from pipeline.training.predict import predict

    silent()
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=world)
    store = Store(config.store)
    inputs = _made(config, "partition")
    plan, towers = read_towers(config, store, inputs, [])
    dist.barrier()
    with shares([os.getpid()], share):
        began, spent, digest = time.perf_counter(), time.process_time(), ""
        found = predict(select_prediction_settings(config), store, inputs["ingest"], plan, checkpoint, towers)
        if found is not None:
            figures = evaluate(found.labels, found.logits, found.true_probability)
            curve = reliability(found.labels, found.logits)
            said = json.dumps([figures, curve.to_json()], sort_keys=True).encode()
            digest = hashlib.sha256(found.logits.tobytes() + said).hexdigest()
        took = {"seconds": time.process_time() - spent, "wall": time.perf_counter() - began}
    (place / f"{rank}.json").write_text(json.dumps({**took, "digest": digest}))
