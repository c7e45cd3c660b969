"""What stops a checkpoint: dense parameters and optimizer moments that are not finite, the same on every rank."""

import json

import pytest
import torch
import torch.distributed as dist

from pipeline.config import TrainConfig
from pipeline.errors import GuardError
from pipeline.training.guards import check_layers
from tests.embeddings.ranks import spawn
from tests.tiers import with_slow

SPOILT = {
    "weight": "layer parameter 'bottom.weight' is not finite",
    "exp_avg": "exp_avg of layer parameter 'bottom.weight' is not finite",
    "exp_avg_sq": "exp_avg_sq of layer parameter 'bottom.weight' is not finite",
}


def run(folder):
    """Spoil one part on the last rank after each of three steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for part in SPOILT:
        layer = torch.nn.Linear(3, 2)
        dense = {f"bottom.{name}": value for name, value in layer.named_parameters()}
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)
        check_layers(dense, optimizer, 0, TrainConfig())  # no state yet
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        check_layers(dense, optimizer, 1, TrainConfig())
        if rank == world - 1:
            spoilt = layer.weight.detach() if part == "weight" else optimizer.state[layer.weight][part]
            spoilt[1, 1] = float("inf")
        with pytest.raises(GuardError) as caught:
            check_layers(dense, optimizer, 2, TrainConfig())
        found[part] = str(caught.value)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("world", with_slow((1, 2), (2,)))
def test_layers_and_moments_that_are_not_finite_stop_every_rank(tmp_path, world):
    spawn(run, world, tmp_path)
    for rank in range(world):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        for part, message in SPOILT.items():
            assert f"{message} after step 2; no checkpoint was written" in found[part]
            assert "train.clip.dense_norm=" in found[part]
