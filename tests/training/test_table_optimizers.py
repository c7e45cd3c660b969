"""A table optimizer added by one spec trains, checkpoints and resumes on every sharding; SSD takes what fits."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from pipeline.checkpoint.export import export
from pipeline.checkpoint.rows import ChainReader
from pipeline.checkpoint.state import TrainState
from pipeline.compose import compose
from pipeline.config import CheckpointConfig, TablePin
from pipeline.embeddings import optimizers
from pipeline.embeddings.learning import set_table_steps
from pipeline.embeddings.optimizers.rowwise_adagrad import RowwiseAdagrad
from pipeline.embeddings.sharding import _check_optimizer
from pipeline.errors import ConfigError, PlanError
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.choices import tables_of
from pipeline.specs import TABLE_OPTIMIZERS
from pipeline.specs.table_optimizer import StateColumn, TableOptimizer
from pipeline.store import Store
from pipeline.training.loop import train as train_loop
from pipeline.training.settings import TrainingSettings
from tests.checkpoint.chain_runs import checkpointer
from tests.embeddings.cases import STEPS, Toy, batch, make, rate, train
from tests.embeddings.ranks import DIM, ROWS, plan_for, spawn
from tests.planning.plan_cases import configure, cpu, dataset
from tests.training import test_ssd, test_train
from tests.training.dataset import KEY

EPS = 1e-8
KINDS = ["table_wise", "row_wise", "data_parallel"]


class Adagrad(TableOptimizer):
    """A sum of squared gradients for each weight."""

    name = "adagrad"
    columns = (StateColumn("squares", per_value=True),)
    heat = "squares"
    replica_passes = 7

    def fused(self):
        return torch.optim.Adagrad, {"eps": EPS}

    def update(self, weights, gradient, state, lr, step):
        sums = state["squares"].addcmul_(gradient, gradient)
        weights.addcdiv_(gradient, sums.sqrt().add_(EPS), value=-lr)


class Momentum(TableOptimizer):
    """A velocity for each weight, corrected for its first steps, and how often each row moved. Replicas only."""

    name = "momentum"
    columns = (StateColumn("velocity", per_value=True), StateColumn("moved", exact=True))
    replica_passes = 7

    def fused(self):
        return torch.optim.SGD, {}

    def update(self, weights, gradient, state, lr, step):
        state["moved"].add_((gradient != 0).any(dim=1))
        weights.add_(state["velocity"].mul_(0.9).add_(gradient), alpha=-lr / (1 - 0.9**step))


class Gentle(RowwiseAdagrad):
    """Row-wise Adagrad with another epsilon."""

    name = "gentle"

    def fused(self):
        kind, settings = super().fused()
        return kind, {**settings, "eps": 0.1}


class Adam(TableOptimizer):
    """As FBGEMM's, of which the CPU has no kernel."""

    name = "adam"
    devices = ("cuda",)
    columns = (StateColumn("m", per_value=True), StateColumn("v", per_value=True))
    replica_passes = 9

    def fused(self):
        return torch.optim.Adam, {}

    def update(self, weights, gradient, state, lr, step):
        raise NotImplementedError


MINE = (Adagrad(), Momentum(), Gentle(), Adam())


def register():
    """What the one line in the registry's home does."""
    optimizers.SPECS = (*optimizers.SPECS, *MINE)
    TABLE_OPTIMIZERS._specs = None


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(optimizers, "SPECS", (*optimizers.SPECS, *MINE))
    monkeypatch.setattr(TABLE_OPTIMIZERS, "_specs", None)


def test_the_registries_load_no_heavy_package():
    code = (
        "import sys; from pipeline.specs import DENSE_OPTIMIZERS as d, TABLE_OPTIMIZERS as t; "
        "print(len(t.names()) > 1, len(d.names()) > 1, "
        "[m for m in ('torch', 'torchrec', 'polars', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True []"


@pytest.mark.parametrize(
    ("optimizer", "row", "value", "fits"),
    [("rowwise_adagrad", 4, 0, True), ("sgd", 0, 0, True), ("adagrad", 0, 4, False), ("momentum", 4, 4, False)],
)
def test_plans_count_the_state_of_rows_and_of_values(registered, optimizer, row, value, fits):
    config = configure(replace(cpu(1, 2), ssd_gib=10.0))
    config.train.sparse_optimizer = optimizer
    schema, profile = dataset({"a": 1000, "b": 100_000})
    table = tables_of(PlanInputs.of(config, schema, profile))[1]
    assert table.row_bytes(8) == 8 * 4 + row + 8 * value and table.bytes == 100_000 * table.row_bytes(16)
    planned = make_plan(PlanInputs.of(config, schema, profile)).tables["b"]
    assert (planned.state_bytes, planned.value_state_bytes) == (row, value)
    assert planned.bytes == table.bytes and table.optimizer.fits_ssd == fits


def test_tier_ssd_refuses_more_state_than_its_rows_have_room_for(registered):
    config = configure(replace(cpu(1, 2, ddr=1.0), ssd_gib=50.0))
    schema, profile = dataset({"a": 1000, "b": 30_000_000})
    assert make_plan(PlanInputs.of(config, schema, profile)).tables["b"].tier == "ssd"
    config.train.sparse_optimizer = "adagrad"
    with pytest.raises(PlanError):
        make_plan(PlanInputs.of(config, schema, profile))
    config.plan.tables = {"b": TablePin(tier="ssd")}
    with pytest.raises(ConfigError, match="have no room for the state of train.sparse_optimizer=adagrad") as caught:
        make_plan(PlanInputs.of(config, schema, profile))
    assert caught.value.hint == "plan.tables.b.tier=ddr, or train.sparse_optimizer=rowwise_adagrad"


def test_an_optimizer_without_a_kernel_for_the_device_is_refused(registered):
    config = compose(["experiment=demo", "run=r", "train.sparse_optimizer=adam", "hardware=h100x8"])
    assert config.hardware.device == "cuda"
    message = "train.sparse_optimizer=adam has no kernel for device cpu, only for cuda"
    with pytest.raises(ConfigError, match=message) as caught:
        compose(["experiment=demo", "run=r", "train.sparse_optimizer=adam"])
    assert caught.value.hint == "hardware.device=cuda, or another train.sparse_optimizer"
    with pytest.raises(ConfigError, match=message):
        _check_optimizer(plan_for("table_wise", 1), TABLE_OPTIMIZERS.get("adam"))


def weights_of(access):
    """Owned shards: {table: [(first row, first column, weight)]}."""
    return [(s.table, s.row, s.column, s.weight.clone()) for s in access.local_shards() if s.owner]


def train_all(folder):
    register()
    for number, kind in enumerate(["table_wise", "row_wise", "data_parallel", "column_wise", KINDS]):
        dmp, access = make(plan_for(kind, dist.get_world_size()), optimizer="adagrad")
        start = {name: torch.zeros(rows, DIM) for name, rows in ROWS.items()}
        end = {name: torch.zeros(rows, DIM) for name, rows in ROWS.items()}
        for into in (start, end):
            for table, row, column, weight in weights_of(access):
                into[table][row : row + weight.shape[0], column : column + weight.shape[1]] = weight
            for whole in into.values():
                dist.all_reduce(whole)
            if into is start:
                train(dmp)
        for name, table in expected(start).items():
            torch.testing.assert_close(end[name], table, rtol=0, atol=1e-6, msg=f"{kind} {name}")
        assert number or not torch.equal(start["a"], end["a"])


def expected(start):
    """The tables after the same steps of ``torch.optim.Adagrad`` in one process."""
    tables = nn.ParameterDict({name: nn.Parameter(weight.clone()) for name, weight in start.items()})
    head = Toy().head
    tables_by, head_by = torch.optim.Adagrad(tables.values(), lr=1.0, eps=EPS), torch.optim.SGD(head.parameters(), 0.1)
    for step in range(STEPS):
        tables_by.param_groups[0]["lr"] = rate(step)
        ids, labels = batch(step)
        stack = torch.stack([tables[name][i].sum(1) for name, i in zip(ROWS, ids, strict=True)], dim=1)
        for each in (tables_by, head_by):
            each.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(head(stack.flatten(1)).squeeze(1), labels).backward()
        for each in (tables_by, head_by):
            each.step()
    return {name: table.detach() for name, table in tables.items()}


def test_it_trains_on_every_sharding_as_in_one_process(tmp_path):
    spawn(train_all, 2, tmp_path)


def save_and_resume(folder):
    """Train, save, train on; restored, the same steps give the same bits. Then into other shardings."""
    register()
    world = dist.get_world_size()
    for optimizer, kinds in (("adagrad", KINDS), ("momentum", "data_parallel")):
        place = folder / optimizer
        place.mkdir(exist_ok=True)
        dist.barrier()
        first, rows = make(plan_for(kinds, world), optimizer=optimizer)
        saver, _ = checkpointer(place, first, rows, state="fp32")
        train(first, 0, 3)
        saver.save(TrainState(step=3), wait=True)
        train(first, 3, STEPS)
        again, restored = make(plan_for(kinds, world), seed=77, optimizer=optimizer)
        saver, said = checkpointer(place, again, restored)
        assert saver.resume().step == 3, said
        set_table_steps(again, 3)
        train(again, 3, STEPS)
        for one, two in zip(rows.local_shards(), restored.local_shards(), strict=True):
            assert torch.equal(one.weight, two.weight) and one.state.keys() == two.state.keys()
            assert all(torch.equal(one.state[name], two.state[name]) for name in one.state), one.table
            assert all(state.any() for state in two.state.values())
        saver.save(TrainState(step=STEPS), wait=True)
        for kind in ("column_wise", "row_wise") if optimizer == "adagrad" else ():
            moved, access = make(plan_for(kind, world), seed=78, optimizer=optimizer)
            saver, said = checkpointer(place, moved, access, policy="full")
            assert saver.resume().step == STEPS, said
            saver.directory = f"ck-{kind}"
            saver.save(TrainState(step=STEPS), wait=True)


def whole(store, directory):
    """{table: (weights, states by name)} of the newest checkpoint of ``directory``."""
    reader = ChainReader(store, store.get(f"{directory}/step-{STEPS:08d}", "train"))
    windows = {table: next(reader.windows(table)) for table in reader.tables}
    return {table: (w.weight.clone(), {n: s.clone() for n, s in w.state.items()}) for table, w in windows.items()}


def test_its_state_is_checkpointed_and_resumed_bit_for_bit(tmp_path):
    spawn(save_and_resume, 2, tmp_path)
    store = Store(str(tmp_path / "adagrad/store"))
    saved = whole(store, "ck")
    for table, (weight, state) in saved.items():
        assert weight.shape == state["squares"].shape and (state["squares"] > 0).any(1).sum() > 3
        for kind in ("column_wise", "row_wise"):
            other = whole(store, f"ck-{kind}")[table]
            assert torch.equal(weight, other[0]) and torch.equal(state["squares"], other[1]["squares"]), kind
    moved = whole(Store(str(tmp_path / "momentum/store")), "ck")["a"][1]["moved"]
    assert moved.dim() == 1 and moved.max() <= STEPS and torch.equal(moved, moved.round())
    exported(store, saved, tmp_path / "out")


def exported(store, saved, out):
    artifact = store.get(f"ck/step-{STEPS:08d}", "train")
    for layout, folder in ((None, "columns"), ("list", "lists")):
        export(store, artifact, Store(str(out / folder)), layout=layout, state=True)
    export(store, artifact, Store(str(out / "tensors")), file_format="safetensors", state=True)
    for table, (weight, state) in saved.items():
        columns, lists = (pq.read_table(out / folder / f"{table}.parquet") for folder in ("columns", "lists"))
        assert columns.column_names == ["row", *(f"{part}{i}" for part in ("e", "squares") for i in range(DIM))]
        assert lists.column_names == ["row", "e", "squares"]
        for i in range(DIM):
            np.testing.assert_array_equal(columns[f"squares{i}"].to_numpy(), state["squares"][:, i].numpy())
        assert torch.equal(torch.tensor(lists["squares"].to_pylist()), state["squares"])
        tensors = load_file(out / "tensors" / f"{table}.safetensors")
        assert torch.equal(tensors["weight"], weight) and torch.equal(tensors["squares"], state["squares"])


SMALL = {"sharding": test_train.MIXED, "sparse_optimizer": "adagrad"}
CASES = {
    "whole": SMALL,
    "stopped": {**SMALL, "then": {"epochs": 2}, "max_steps": 7},
    "two columns": (two := {**SMALL, "sharding": "data_parallel", "sparse_optimizer": "momentum"}),
    "two columns, stopped": {**two, "then": {"epochs": 2}, "max_steps": 7},
    "few bits": {**SMALL, "checkpoint": CheckpointConfig(quantise="4", final_quantise="4")},
}
SSD_CASES = {
    "gentle ddr": {"sparse_optimizer": "gentle", "tier": "ddr"},
    "gentle ssd": {"sparse_optimizer": "gentle"},
    "rowwise_adagrad ddr": {"tier": "ddr"},
    "refused": {"sparse_optimizer": "adagrad"},
}


def resume_before_the_last_step(root, world, rank):
    """Digests of a training whose rates end at 0, and of the same one resumed one step before its end."""
    settings = {"schedule": "linear", "checkpoint": CheckpointConfig(every_steps=1, policy="full", quantise="fp32")}
    first = test_train.run_case(root, world, rank, **settings)
    store, last = Store(str(root)), first["summary"]["final"]
    dist.barrier()
    if rank == 0:
        store.fs.rm(store.full(last), recursive=True)
    dist.barrier()
    dataset = store.get(f"datasets/t/{KEY}", "ingest")
    plan = plan_for("table_wise", world, rows=test_train.ROWS, dim=8)
    same = TrainingSettings.of(test_train.config(world, **settings))
    again = train_loop(same, store, dataset, plan, "runs/r/checkpoints/k", "key", print)
    assert again["final"] == last
    return [first["digests"], test_train.digests(store, store.get(last, "train"))]


def run_cases(folder):
    register()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {name: test_train.run_case(folder / name, world, rank, **case) for name, case in CASES.items()}
    found |= {name: test_ssd.run_case(folder / name, **case) for name, case in SSD_CASES.items()}
    found["last step"] = resume_before_the_last_step(folder / "last step", world, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_whole_trainings_with_it_and_what_ssd_says(tmp_path):
    spawn(run_cases, 2, tmp_path)
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["whole"]["digests"] == found["stopped"]["digests"]
    assert found["two columns"]["digests"] == found["two columns, stopped"]["digests"]
    assert any(name.endswith(":state.squares") for name in found["whole"]["digests"]) and found["whole"]["ne"] < 1
    assert found["few bits"]["ne"] == pytest.approx(found["whole"]["ne"], abs=0.05)
    before, after = found["last step"]
    assert before == after
    ddr, ssd, other = (test_train.trained(found[name]["digests"]) for name in list(SSD_CASES)[:3])
    assert ddr == ssd != other
    assert found["refused"]["error"] == "PlanError"
    assert (
        "on tier ssd, whose rows have no room for the state of table optimizer adagrad" in found["refused"]["message"]
    )
