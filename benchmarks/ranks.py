"""``make bench-ranks``: ``nightjar predict``, evaluate and publish on 1, 2 and 4 ranks: busiest rank, equal bytes.

A small model is trained and published, then a log of ``--rows`` rows is scored; one is evaluated on three quarters of
``--evaluated`` rows; and one is published that half of ``--published`` rows are held out for. A rank has one thread.
On a machine with fewer than 4 CPUs, each process of predict and evaluate gets the same ``share`` of one, however many
there are, by a cgroup's quota: so 4 ranks are to one as on a machine of 4 CPUs that are as much slower; these are kept
``awake``. They are timed from when all are ready. ``predict``, ``evaluate``: seconds of one rank over those of 4;
``ratio``: the smaller one; ``predict_2``, ``evaluate_2``: of 2. ``predict_cpu``, ``evaluate_cpu``: by CPU seconds of
the busiest process, as ``publish`` and ``publish_2``, which count what its ranks share; ``publish_alone_s``: what rank
0 does then (bootstrap, verdict, pages). ``same``: the scores, figures and versions of all are the same to the last
digit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cgroup import awake, equal_share, shares
from benchmarks.harness import NIGHTJAR, finish, options, processes, python, run_config, silent, words
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.ingest.engines import in_order
from pipeline.ingest.synthetic import write_tsv
from pipeline.publishing import promotion, versions
from pipeline.serving.prediction import blocks_of, score_lines
from pipeline.serving.scorer import Scorer, one_thread
from pipeline.serving.scoring_processes import Ranks
from pipeline.stages.steps import steps
from pipeline.store import Store

MODEL, CACHE, RANKS = "ranks", 1 << 30, (1, 2, 4)
STAGES = "stages=[ingest,plan,partition,train,evaluate,publish]"
SHORT = "train.max_steps=20 train.threads_per_rank=1 train.guard.collapse=false"


def main() -> None:
    given = options(
        __doc__,
        rows=(600_000, "rows that are scored"),
        evaluated=(2_400_000, "rows, of which three quarters are evaluated"),
        published=(600_000, "rows, of which half are scored for the gate"),
        ids=(50_000, "of a feature of the published model"),
    )
    share = equal_share(max(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        with awake(share < 1):
            found = {"predict": predicted(folder, given.rows, share)}
            found["evaluate"] = evaluated(folder, given.evaluated, share)
        found["publish"] = published(folder, given.published, given.ids)
    figures: dict[str, Any] = {}
    for what, by_ranks in found.items():
        for ranks, each in by_ranks.items():
            name, one = what if ranks == max(RANKS) else f"{what}_{ranks}", by_ranks[1]
            figures[f"{what}_busiest_of_{ranks}_s"] = each["busiest"]
            if "wall" in each:
                figures |= {f"{what}_on_{ranks}_s": each["wall"], name: one["wall"] / each["wall"]}
                name = f"{name}_cpu"
            figures[name] = one["busiest"] / each["busiest"]
    figures["same"] = all(len({each["digest"] for each in by_ranks.values()}) == 1 for by_ranks in found.values())
    figures |= {"share": found["predict"][4]["share"], "publish_alone_s": found["publish"][4]["alone"]}
    finish("ranks", min(figures["predict"], figures["evaluate"]), rows=given.rows, **figures)


def predicted(folder: str, rows: int, share: float) -> dict[int, dict[str, Any]]:
    """``nightjar predict`` by number of ranks, of a log that the published model did not learn from."""
    store, log = Store(f"{folder}/store"), f"{folder}/log.tsv"
    model = ["data.synthetic.rows=100000", "ingest.block_mib=4", f"publish.model={MODEL}"]
    model += ["gate.max_calibration_error=1", STAGES]
    python(*NIGHTJAR, "run", "experiment=demo", "run=r", f"store={store.url}", *model)
    world = compose(["experiment=demo", f"data.synthetic.rows={rows}"])
    write_tsv(world.data.synthetic, world.seed, log)
    return {ranks: scored(store, log, ranks, share) for ranks in RANKS}


def scored(store: Store, log: str, ranks: int, share: float) -> dict[str, Any]:
    """Score ``log`` on so many ranks: seconds, CPU seconds and a digest of the scores."""
    place = versions.version_path(MODEL, str(promotion.read_current(store, MODEL).version))
    folder, how = Path(store.full(place)), {"path": log, "memory": CACHE, "labelled": True, "ranks": ranks}
    with one_thread():
        scorer, digest = Scorer(store, place, folder, **how), hashlib.sha256()
        _, blocks = blocks_of(scorer.data, scorer.spec, scorer.block_mib)
        with Ranks(scorer, {"folder": str(folder), **how}) as side:
            side.start(ranks - 1)
            while side.up < ranks:
                time.sleep(0.05)
            before = _cpu()
            with shares(before, share) as share:
                began = time.perf_counter()
                for block in in_order(lambda each: side.score(each[0]), blocks, ranks):
                    digest.update(score_lines(block, scorer.description).write_csv().encode())
                wall = time.perf_counter() - began
            after = _cpu()
    busiest = max(after[process] - before[process] for process in after)
    print(f"predict on {ranks} ranks: {wall:.2f} s, busiest {busiest:.2f} CPU s", flush=True)
    return {"busiest": busiest, "wall": wall, "share": share, "digest": digest.hexdigest()}


def _cpu() -> dict[int, float]:
    """CPU seconds of this process and of those that it started, by process, without those that keep CPUs awake."""
    me = psutil.Process()
    every = [me, *me.children(recursive=True)]
    times = {each.pid: each.cpu_times() for each in every if os.sched_getscheduler(each.pid) != os.SCHED_IDLE}
    return {pid: each.user + each.system for pid, each in times.items()}


def _on_ranks(work: Callable[..., dict[str, Any]], folder: str, world: int, *more: Any) -> dict[str, Any]:
    """What rank 0 of ``world`` processes finds, with the longest ``wall`` and the ``busiest`` of all."""
    meet = [f"{folder}/{work.__name__}-{world}"] * world
    with processes(world) as pool:
        found = list(pool.map(work, range(world), [world] * world, meet, *([each] * world for each in more)))
    print(f"{work.__name__} on {world} ranks: busiest {max(each['cpu'] for each in found):.2f} CPU s", flush=True)
    longest = {"wall": max(each["wall"] for each in found)} if "wall" in found[0] else {}
    return {**found[0], **longest, "busiest": max(each["cpu"] for each in found)}


def evaluated(folder: str, rows: int, share: float) -> dict[int, dict[str, Any]]:
    """Stage evaluate by number of ranks, up to the figures, as in the stage; ``digest``: of logits and figures."""
    world = words(f"""experiment=demo run=e store={folder}/evaluated data.synthetic.rows={rows}
        data.split.test_share=0.75 {SHORT}""")
    configs = {ranks: compose([*world, f"hardware.ranks_per_host={ranks}"]) for ranks in RANKS}
    checkpoint = run_config(configs[1], last="train")["train"].summary["final"]
    found = {}
    for ranks, config in configs.items():
        run_config(config, last="partition")
        found[ranks] = _on_ranks(evaluate_rank, folder, ranks, config, checkpoint, share)
    return found


def evaluate_rank(rank: int, world: int, meet: str, config: Config, checkpoint: str, share: float) -> dict[str, Any]:
    import torch.distributed as dist

    from pipeline.evaluation import evaluate, reliability
    from pipeline.stages.stage_inputs import read_towers
    from pipeline.training.config_settings import select_prediction_settings
    from pipeline.training.predict import predict

    silent()
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    store = Store(config.store)
    inputs = run_config(config, last="partition")
    plan, towers = read_towers(config, store, inputs, [])
    dist.barrier()
    with shares([os.getpid()], share):
        began, spent, digest = time.perf_counter(), time.process_time(), ""
        found = predict(select_prediction_settings(config), store, inputs["ingest"], plan, checkpoint, towers)
        if found is not None:
            figures = evaluate(found.labels, found.logits, found.true_probability)
            curve = reliability(found.labels, found.logits)
            text = json.dumps([figures, curve.to_json()], sort_keys=True).encode()
            digest = hashlib.sha256(found.logits.tobytes() + text).hexdigest()
        return {"cpu": time.process_time() - spent, "wall": time.perf_counter() - began, "digest": digest}


def published(folder: str, rows: int, ids: int) -> dict[int, dict[str, Any]]:
    """Stage publish by number of ranks; ``digest``: of files and record.

    What all ranks share is counted: tables, and the held-out rows and features scored for the gate.
    """
    world = words(f"""experiment=demo run=p store={folder}/published data.synthetic.rows={rows} gate.max_rows={rows}
        data.synthetic.ids_per_feature={ids} data.split.test_share=0.5 {SHORT}""")
    config = compose([*world, "gate.force=to be measured", STAGES])
    run_config(dataclasses.replace(config, stages=config.stages[:-1]))
    return {ranks: _on_ranks(publish_rank, folder, ranks, config) for ranks in RANKS}


def publish_rank(rank: int, world: int, meet: str, config: Config) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.export._trace  # noqa: F401 (what reading a program imports)

    from pipeline.stages import release, release_gate
    from pipeline.stages.release_ranks import join_ranks

    silent()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # as torchrun says it
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
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
    version, digest = release.find_or_judge_version(config, store, last, inputs), ""
    if version is not None:
        gate = store.read_json(f"{version.path}/gate.json") | {"model": ""}
        files = {name: entry.checksum for name, entry in version.files.items() if name.startswith("tables/")}
        digest = hashlib.sha256(json.dumps([files, gate], sort_keys=True).encode()).hexdigest()
    return {"cpu": shared[0] - began, "alone": time.process_time() - shared[0], "digest": digest}


if __name__ == "__main__":
    main()
