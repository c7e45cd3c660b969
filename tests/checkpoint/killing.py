"""Training runs in real processes that are killed at a named point, and the ledger of the rows they trained on.

A run is a row of attempts over one store: each starts ranks (the last one perhaps in another number), goes on from
the newest checkpoint, and is killed or ends. Ranks write what they train on to a file of their own, one line a step,
as the step begins; lines survive the kill.

The ledger: a row's effect is in the final model exactly where its step was not undone. An attempt that resumes at
step p undoes what attempts before it trained from p on. So of every attempt count the steps from where it resumed to
where the next one did; of the last all. Counted this way, each global step must occur once on each rank, with the
rows an undisturbed run trains on in that step.
"""

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.config import CheckpointConfig, Config, DataConfig, HardwareConfig, TrainConfig
from pipeline.models.settings import DlrmConfig
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_training_settings
from pipeline.training.trainer import train
from tests.embeddings.ranks import join_ranks, on_tier, plan_for
from tests.logged import listen
from tests.training.dataset import KEY, write_dataset
from tests.waits import PATIENCE, until

TABLES = {"a": 40, "b": 23, "c": 11}
ROWS, BATCH, EPOCHS = 320, 48, 2  # batches of 48 divide by 1, 2 and 3 ranks; the last of an epoch is a short one
STEPS = EPOCHS * -(-ROWS // BATCH)
DIRECTORY = "runs/r/checkpoints/k"
SHARDING = ["row_wise", "data_parallel", "table_wise"]
KILLED = "killed"  # in the folder of an attempt: a rank came to its kill


@dataclass(frozen=True)
class Kill:
    """Kill ``rank`` at its ``count``-th pass of ``point``; with ``after``, once the file of that name is there."""

    point: FaultPoint
    rank: int
    count: int
    after: str = ""


@dataclass
class Attempt:
    """What an attempt left: exit codes by rank, the newest step committed at its end, (step, rows) lines by rank.

    ``killed``: the rank that was to die came to its kill; one that died of something else did not.
    """

    codes: list[int]
    committed: int
    killed: bool
    lines: list[list[tuple[int, list[int]]]] = field(default_factory=list)

    @property
    def resumed(self) -> int | None:
        """The step it began with; None where it died before its first."""
        first = [lines[0][0] for lines in self.lines if lines]
        return min(first) if first else None


def make_dataset(root, validation=0, group=16):
    columns = tuple(SparseColumn(name=name, rows=rows) for name, rows in TABLES.items())
    write_dataset(root, train=ROWS, test=20, validation=validation, group=group, sparse=columns)


def settings(world, checkpoint, changes=None):
    options = {"every_steps": 2, "quantise": "fp32", "keep_last": 1, "chunk_mib": 0.0005, **checkpoint}
    return Config(
        run="r",
        data=DataConfig(name="t", format="synthetic"),
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[8], top_mlp=[8]),
        hardware=HardwareConfig(name="t", ranks_per_host=world),
        train=TrainConfig(
            **{
                "global_batch": BATCH,
                "epochs": EPOCHS,
                "lr": 0.01,
                "sparse_lr": 0.1,
                "warmup_steps": 3,
                "precision": "fp32",
                "threads_per_rank": 1,
                "log_every_steps": 5,
                "schedule": "cosine",
                "decay_ratio": 1.0,
                **(changes or {}),
            }
        ),
        checkpoint=CheckpointConfig(**options),
    )


class Hook:
    """The ``on_point`` of a rank that may have to die."""

    def __init__(self, folder, kill):
        self.folder, self.kill, self.seen = folder, kill, Counter()

    def __call__(self, point):
        self.seen[point] += 1
        if point == FaultPoint.WRITTEN:
            (self.folder / f"written-{self.seen[point]}-rank{dist.get_rank()}").touch()
        kill = self.kill
        if kill is None or (kill.point, kill.rank, kill.count) != (point, dist.get_rank(), self.seen[point]):
            return
        if kill.after:
            until(lambda: (self.folder / kill.after).exists())
        (self.folder / KILLED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def log_rows(folder):
    """Write a line for each batch that any model of this process trains on; column d0 of the data is the row number."""
    from pipeline.training import trainer

    class Logged(trainer.StepExecutor):
        def __init__(self, *args):
            super().__init__(*args)
            log = os.open(folder / f"rows-rank{dist.get_rank()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

            def write(module, args):
                batch = args[0]
                rows = (batch.dense[batch.weights > 0, 0] * ROWS).round().int().tolist()
                os.write(log, (json.dumps([self.steps, rows]) + "\n").encode())

            self.model.register_forward_pre_hook(write)

    trainer.EXECUTORS["sync"] = Logged


def rank_main(rank, world, root, folder, checkpoint, kill, tier="ddr", changes=None):
    """One rank of an attempt; exit code 0 only where training ended. ``changes``: to the settings of training."""
    join_ranks(rank, world, world, folder)
    log_rows(folder)
    store = Store(str(root))
    plan = on_tier(plan_for(SHARDING, world, rows=TABLES, dim=8), tier)
    said, records = listen(), []
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    summary = train(
        select_training_settings(settings(world, checkpoint, changes)),
        store,
        dataset,
        plan,
        DIRECTORY,
        "key",
        records.append,
        on_point=Hook(folder, kill),
    )
    (folder / f"losses-rank{rank}.json").write_text(json.dumps([record["loss"] for record in records]))
    (folder / f"summary-rank{rank}.json").write_text(json.dumps(summary))
    (folder / f"said-rank{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()


def attempt(
    root: Path,
    folder: Path,
    world: int,
    checkpoint: dict,
    kill: Kill | None = None,
    tier: str = "ddr",
    changes: dict | None = None,
) -> Attempt:
    """Run ``world`` ranks to their end. As soon as one dies the others are killed too, as a launcher does."""
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=rank_main, args=(rank, world, root, folder, checkpoint, kill, tier, changes))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    alive = {process.sentinel: process for process in ranks}
    while alive:
        ready = wait(list(alive), timeout=PATIENCE)
        ended = [alive.pop(sentinel) for sentinel in ready]
        if not ready or any(process.exitcode for process in ended):
            for process in alive.values():
                process.kill()
        assert ready, f"no rank of {folder} ended within {PATIENCE:g} s"
    for process in ranks:
        process.join()
    killed, lines = (folder / KILLED).exists(), [read_lines(folder, rank) for rank in range(world)]
    return Attempt([process.exitcode for process in ranks], newest(root), killed, lines)


def complete(root, dataset, world, checkpoint, changes=None):
    """A copy of ``dataset`` on which a training runs to its end, undisturbed; what it said is in ``a``."""
    shutil.copytree(dataset, root, dirs_exist_ok=True)
    assert attempt(root, root / "a", world, checkpoint, changes=changes).codes == [0] * world
    return root


def newest(root):
    """Step of the newest committed checkpoint by its manifest alone, 0 where there is none."""
    found = (root / DIRECTORY).glob("step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def read_lines(folder, rank):
    file = folder / f"rows-rank{rank}"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def ledger(attempts: list[Attempt]) -> Counter:
    """How often each (step, row) is in the final model."""
    counts: Counter = Counter()
    end = STEPS
    for each in reversed(attempts):
        if each.resumed is None:
            continue
        for lines in each.lines:
            counts.update((step, row) for step, rows in lines for row in rows if step < end)
        end = each.resumed
    return counts
