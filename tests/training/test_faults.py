"""Which part is named where values are not finite: the cause, on whichever rank it is, and not what it spoilt after."""

import json

import pytest
import torch
import torch.distributed as dist

from pipeline.config import TrainConfig
from pipeline.core.errors import GuardError
from pipeline.training.faults import EMBEDDING, FaultFinder
from pipeline.training.guards import check_finite
from pipeline.training.model import DensePart
from pipeline.training.train_metrics import Sums
from tests.embeddings.ranks import schema, spawn
from tests.fake_cuda import fake_cuda

BATCH, DIM = 4, 8
# What is spoilt on (rank 0, rank 1) in the passes of an interval; what must be named.
CASES = {
    "dense on 1, layers after": ([None, None], [None, "dense"], "dense feature 'd1'"),
    "dense on 0, layers after": ([None, "dense"], [None, None], "dense feature 'd1'"),
    "table on 0, dense on 1": ([None, "table"], [None, "dense"], "dense feature 'd1'"),
    "layer on 0, table on 1": ([None, "layer"], [None, "table"], "table 'a'"),
    "table on 1 before dense on 0": ([None, "dense"], ["table", None], "table 'a'"),
    "layer on 1": ([None, None], [None, "layer"], "layer 'first' (its weight is not finite)"),
}


class Ranking(torch.nn.Module):
    """One layer, a weight for each value."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2 + 3 * DIM, 1)

    def forward(self, dense, embeddings):
        return self.first(torch.cat([dense, embeddings.flatten(1)], dim=1)).squeeze(1)


def one_pass(head, spoilt):
    dense, embeddings = torch.ones(BATCH, 2), torch.ones(BATCH, 3, DIM)
    if spoilt == "dense":
        dense[2, 1] = float("nan")
    if spoilt == "table":
        embeddings[1, 1, 3] = float("inf")
    if spoilt == "layer":
        with torch.no_grad():
            head.ranking.first.weight[0, 5] = float("nan")
    head(embeddings, dense, torch.ones(BATCH), torch.ones(BATCH))


def run(folder):
    """Each case ends its interval right after the fault, whose averaged gradient has spoilt the layers of both."""
    import dataclasses

    rank, found = dist.get_rank(), {}
    for name, (*passes, _) in CASES.items():
        head = DensePart(Ranking(), dataclasses.replace(schema(), dense=("d0", "d1")), None)
        for spoilt in passes[rank]:
            one_pass(head, spoilt)
        with torch.no_grad():
            head.ranking.first.weight.fill_(float("nan"))
        with pytest.raises(GuardError) as caught:
            check_finite(Sums(rows=8, bad=4), 2, TrainConfig(), head.first_fault)
        found[name] = str(caught.value)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def test_the_earliest_cause_of_all_ranks_is_named(tmp_path):
    spawn(run, 2, tmp_path)
    one, two = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    for name, (*_, expected) in CASES.items():
        assert f"the first part that is not finite is {expected}" in one[name], name


def named_parts():
    return FaultFinder(["d0", "d1"], ["table 'a'", "table 'b'"], torch.nn.Identity(), lambda dense, _: dense)


def test_marks_on_a_device_name_the_first_bad_pass_and_its_part():
    finder, nan = named_parts(), float("nan")
    good, bad_table, bad_dense = torch.ones(3, 2, 4), torch.ones(3, 2, 4), torch.tensor([[1, nan]])
    bad_table[1, 1, 2] = nan
    finder._mark(1, torch.ones(1, 2), good, torch.tensor(1.0))
    assert finder.first() is None
    finder._mark(2, torch.ones(1, 2), bad_table, torch.tensor(nan))
    finder._mark(3, bad_dense, bad_table, torch.tensor(nan))
    assert finder.first() == (2, EMBEDDING, "table 'b'")


def test_a_pass_on_a_device_is_looked_at_without_waiting():
    with fake_cuda():
        finder = named_parts()
        for _ in range(3):
            loss = torch.zeros((), device="cuda")
            finder.check_forward(torch.ones(5, 2, device="cuda"), torch.ones(5, 2, 4, device="cuda"), loss)
        with pytest.raises(RuntimeError):  # only here
            finder.first()
