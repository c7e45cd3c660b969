"""The touched marks are exactly the rows that training changes, on every sharding and number of ranks."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.embeddings.touched import TouchedRows, shard_key
from tests.embeddings.cases import ROWS, batch, make, train
from tests.embeddings.ranks import plan_for, spawn

TYPES = ["data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard"]


def run(folder, kinds):
    """Train two steps of each sharding and leave marks and changed rows of every shard in ``folder``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for kind in kinds:
        dmp, access = make(plan_for(kind, world))
        touched = TouchedRows(dmp)
        before = {shard_key(s): s.weight.clone() for s in access.local_shards()}
        dmp.eval()
        train_only_forward(dmp)
        dmp.train()
        train(dmp, 0, 2)
        touched.unite()
        found = {}
        for shard in access.local_shards():
            key = shard_key(shard)
            name = "|".join(str(part) for part in key)
            found[f"{name}|mark"] = touched.mask(key).clone()
            found[f"{name}|changed"] = (shard.weight != before[key]).any(1).to(torch.uint8)
        save_file(found, folder / f"{kind}-{rank}.safetensors")
        touched.clear()
        assert not any(touched.mask(key).any() for key in touched.shards())
        touched.detach()
        train(dmp, 2, 3)
        assert not any(touched.mask(key).any() for key in touched.shards())


def train_only_forward(dmp):
    """An evaluation lookup of every row: nothing may be marked by it."""
    from tests.embeddings.cases import kjt_of

    with torch.no_grad():
        dmp(kjt_of([torch.arange(8).remainder(rows).view(4, 2) for rows in ROWS.values()]))


@pytest.mark.parametrize("world", [1, 2])
def test_marks_are_the_rows_that_change(tmp_path, world):
    spawn(run, world, tmp_path, TYPES)
    expected = {name: torch.zeros(rows, dtype=torch.uint8) for name, rows in ROWS.items()}
    for step in range(2):
        for name, ids in zip(ROWS, batch(step)[0], strict=True):
            expected[name][ids.flatten()] = 1
    for kind in TYPES:
        seen = {name: torch.zeros(rows, dtype=torch.uint8) for name, rows in ROWS.items()}
        for rank in range(world):
            parts = load_file(tmp_path / f"{kind}-{rank}.safetensors")
            for name in {key.rsplit("|", 1)[0] for key in parts}:
                table, row, _ = name.split("|")
                mark, changed = parts[f"{name}|mark"], parts[f"{name}|changed"]
                assert torch.equal(mark, changed), f"{kind} {name}"
                part = seen[table][int(row) : int(row) + len(mark)]
                torch.maximum(part, mark, out=part)
        for name in ROWS:
            assert torch.equal(seen[name], expected[name]), f"{kind} {name}"
