"""The one rank of a CPU: nothing to search, so that neither TorchRec nor a solver is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import configure, cpu, dataset

from pipeline.planning import PlanInputs
from pipeline.planning.planner import build_space
from pipeline.planning.problem import build_problem
from pipeline.planning.torchrec_planner import TorchRecPlanner


@pytest.mark.parametrize("pooling", [0.3, 1.0, 7.7])
@pytest.mark.parametrize("ssd", [0.0, 5.0])
def test_a_table_whole_on_one_cpu_rank_is_as_torchrec_has_it(pooling, ssd):
    """Planned without loading TorchRec; shards and buffers must be those of its enumerator and estimators."""
    config = configure(replace(cpu(1, 1), ssd_gib=ssd), dim=12, batch=1001)
    setting = build_problem(PlanInputs.of(config, *dataset({"a": 10_007, "b": 31}, {"a": pooling})))
    space = build_space(setting, setting.offered)
    theirs = TorchRecPlanner(
        config.hardware, config.train.batch, setting.tables, setting.offered, setting.room
    ).layouts()
    for table in setting.tables:
        (layout,) = theirs[table.name]
        ours = space.offers[table.name][0].layout
        assert (ours.sharding, ours.shards, ours.buffers) == (layout.sharding, layout.shards, layout.buffers)


def test_one_cpu_rank_is_planned_without_torch():
    """Only what counts the model's FLOP loads torch, without TorchRec; here the figures are given."""
    code = (
        "import sys; from plan_cases import configure, cpu, dataset; "
        "from pipeline.planning import PlanInputs, cost, make_plan; "
        "from pipeline.specs import ModelCosts; "
        "cost.model_costs = lambda config, inputs: ModelCosts(flop=1e6, parameters=100, activations=10); "
        "plan = make_plan(PlanInputs.of(configure(cpu(1, 1)), *dataset({'a': 10_000}))); "
        "assert plan.tables['a'].sharding == 'table_wise' and plan.gap < 1e-4; "
        "print([name for name in ('torch', 'scipy.optimize') if name in sys.modules])"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
