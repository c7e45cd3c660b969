"""A disk that takes no more of a table's log in the middle of training: one message, on every rank."""

import json
import re
import resource

import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.core.errors import NightjarError
from pipeline.records import SparseColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_training_settings
from pipeline.training.trainer import train
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import config

ROWS = {"a": 3000, "b": 2300}
COLUMNS = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
HALF = 128 << 10  # bytes of two segments
DIM = 64  # so that a step's rows fill a good part of a segment of the log


def run(root):
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_dataset(root, train=4000, test=100, sparse=COLUMNS)
    dist.barrier()
    store, plan = Store(str(root)), on_tier(plan_for("row_wise", world, rows=ROWS, dim=DIM), "ssd")
    current = config(world)
    current.model.embedding_dim, current.hardware.ssd_paths = DIM, [str(root)]
    passed = []

    def look(phase):
        passed.append(phase)
        if passed.count(FaultPoint.BATCH) == 3 and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, resource.RLIM_INFINITY))  # EFBIG for what comes behind it

    try:
        train(
            select_training_settings(current),
            store,
            store.get(f"datasets/t/{KEY}", "ingest"),
            plan,
            "runs/r/checkpoints/k",
            "key",
            lambda record: None,
            on_point=look,
        )
        said = None
    except NightjarError as error:
        said = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (root / f"said-{rank}.json").write_text(json.dumps(said))


def test_a_log_that_cannot_be_written_stops_all_ranks_with_path_bytes_and_override(tmp_path):
    spawn(run, 2, tmp_path)
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["error"] == "GuardError"
    wanted = rf"the scratch file of the rows of table '[ab]' in {tmp_path} cannot be written: 65,536 bytes at byte .*"
    assert re.match(wanted + r"\(File too large, .* GiB are free\); no checkpoint was taken before", first["message"])
    assert "hardware.ssd_paths=[/another/disk]" in first["hint"]
