"""Every table optimizer, also one added by a spec, trains, checkpoints and resumes on every sharding and tier."""

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
from pipeline.checkpoint.reader import ChainReader
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig, TablePin
from pipeline.core.errors import ConfigError, PlanError
from pipeline.embeddings import table_optimizers
from pipeline.embeddings.sharding import _check_optimizer
from pipeline.embeddings.table_optimizers import Ftrl, RowwiseAdagrad, TableRules
from pipeline.embeddings.table_training import new_state, set_table_steps
from pipeline.planning import PlanInputs, make_plan
from pipeline.planning.choices import tables_of
from pipeline.specs import TABLE_OPTIMIZERS
from pipeline.specs.optimizers import StateColumn, TableOptimizer
from pipeline.store import Store
from pipeline.training.config_settings import select_training_settings
from pipeline.training.trainer import train as run_training
from tests.checkpoint.chain_runs import checkpointer
from tests.embeddings.cases import STEPS, Toy, batch, make, rate, train
from tests.embeddings.ranks import DIM, ROWS, on_tier, plan_for, spawn
from tests.planning.plan_cases import configure, cpu, dataset, preset
from tests.training import test_ssd, test_train
from tests.training.dataset import KEY

KINDS = ["table_wise", "row_wise", "data_parallel"]
MOVED = {"adagrad": "squares", "lazy_adam": "adam_square", "ftrl": "ftrl_n"}
STOPPED = ("adagrad", "lazy_adam", "partial_rowwise_adam", "ftrl", "momentum")


class Momentum(TableOptimizer):
    """A velocity for each weight, corrected for its first steps, and how often each row moved."""

    name = "momentum"
    columns = (StateColumn("velocity", per_value=True), StateColumn("moved", exact=True))
    lazy = True
    replica_passes = 7

    def update(self, weights, gradient, state, lr, step):
        state["moved"].add_((gradient != 0).any(dim=1))
        weights.add_(state["velocity"].mul_(0.9).add_(gradient), alpha=-lr / (1 - 0.9**step))


class Gentle(RowwiseAdagrad):
    """Row-wise Adagrad with another epsilon."""

    name = "gentle"


MINE = (Momentum(), Gentle(eps=0.1))


def register():
    """What the one line in the registry's home does."""
    table_optimizers.SPECS = (*table_optimizers.SPECS, *MINE)
    TABLE_OPTIMIZERS._specs = None


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(table_optimizers, "SPECS", (*table_optimizers.SPECS, *MINE))
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
    ("optimizer", "row", "value"),
    [
        ("rowwise_adagrad", 4, 0),
        ("sgd", 0, 0),
        ("adagrad", 0, 4),
        ("lazy_adam", 0, 8),
        ("partial_rowwise_adam", 4, 4),
        ("ftrl", 0, 8),
        ("momentum", 4, 4),
    ],
)
def test_plans_count_the_state_of_rows_and_of_values(registered, optimizer, row, value):
    config = configure(replace(cpu(1, 2), ssd_gib=10.0))
    config.train.sparse_optimizer = optimizer
    schema, profile = dataset({"a": 1000, "b": 100_000})
    table = tables_of(PlanInputs.of(config, schema, profile))[1]
    assert table.row_bytes(8) == 8 * 4 + row + 8 * value and table.bytes == 100_000 * table.row_bytes(16)
    planned = make_plan(PlanInputs.of(config, schema, profile)).tables["b"]
    assert (planned.state_bytes, planned.value_state_bytes) == (row, value)
    assert planned.bytes == table.bytes


def test_tier_ssd_takes_any_state(registered):
    config = configure(replace(cpu(1, 2, ddr=1.0), ssd_gib=50.0))
    schema, profile = dataset({"a": 1000, "b": 30_000_000})
    planned = {}
    for config.train.sparse_optimizer in ("sgd", "lazy_adam"):
        plan = make_plan(PlanInputs.of(config, schema, profile))
        assert plan.tables["b"].tier == "ssd"
        planned[config.train.sparse_optimizer] = sum(used["ssd"] for used in plan.memory)
    assert planned["lazy_adam"] > 2.5 * planned["sgd"]


def test_without_a_kernel_only_rows_that_are_not_paged_in_can_be_trained(registered):
    config = configure(preset("h100x8"), dim=64)
    config.train.sparse_optimizer = "ftrl"
    schema, profile = dataset({"a": 1000, "b": 100_000})
    assert {table.tier for table in make_plan(PlanInputs.of(config, schema, profile)).tables.values()} == {"hbm"}
    config.plan.tables = {"b": TablePin(tier="ddr")}
    message = "table optimizer ftrl has no kernel for device cuda, and only a kernel trains rows of that tier"
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(PlanInputs.of(config, schema, profile))
    assert caught.value.hint == "plan.tables.b.tier=hbm, or train.sparse_optimizer=rowwise_adagrad"
    config.train.sparse_optimizer = "lazy_adam"  # FBGEMM has it for GPUs
    plan = make_plan(PlanInputs.of(config, schema, profile))
    assert plan.tables["b"].tier == "ddr"
    with pytest.raises(PlanError, match="table 'b' is on tier ddr, but table optimizer ftrl has no kernel for device"):
        _check_optimizer(plan, TableRules(TABLE_OPTIMIZERS.get("ftrl")))


def test_a_plan_for_less_state_on_ssd_than_the_optimizer_has_is_refused():
    plan = on_tier(plan_for("row_wise", 1), "ssd")
    _check_optimizer(plan, TableRules(TABLE_OPTIMIZERS.get("rowwise_adagrad")))
    with pytest.raises(PlanError, match="'b' is planned with 36 bytes a row on tier ssd, but .* lazy_adam take 96"):
        _check_optimizer(plan, TableRules(TABLE_OPTIMIZERS.get("lazy_adam")))


def weights_of(access):
    """Owned shards: {table: [(first row, first column, weight)]}."""
    return [(s.table, s.row, s.column, s.weight.clone()) for s in access.local_shards() if s.owner]


def train_all(folder):
    """Every optimizer on every sharding, beside the same in one process."""
    for optimizer in REFERENCES:
        for kind in ("table_wise", "row_wise", "data_parallel", "column_wise", KINDS):
            if kind == "column_wise" and "row" in optimizer:
                continue  # a cut of the columns keeps a state of its own
            dmp, access = make(plan_for(kind, dist.get_world_size()), optimizer=optimizer)
            start = whole_tables(access)
            train(dmp)
            end = whole_tables(access)
            for name, table in expected(start, REFERENCES[optimizer]).items():
                said = f"{optimizer} {kind} {name}"
                torch.testing.assert_close(end[name], table.float(), rtol=0, atol=1e-6, msg=said)
            assert not torch.equal(start["a"], end["a"])


def whole_tables(access):
    tables = {name: torch.zeros(rows, DIM) for name, rows in ROWS.items()}
    for table, row, column, weight in weights_of(access):
        tables[table][row : row + weight.shape[0], column : column + weight.shape[1]] = weight
    for whole in tables.values():
        dist.all_reduce(whole)
    return tables


class Plain(torch.optim.Optimizer):
    """``formula(weights, gradient, state, lr, step)`` in float64 on the rows that were looked up."""

    def __init__(self, tables, formula):
        super().__init__(tables, {"lr": 1.0})
        self.formula, self.steps = formula, 0

    def step(self):
        self.steps += 1
        group = self.param_groups[0]
        for table in group["params"]:
            rows, gradient = table.grad.coalesce().indices()[0], table.grad.coalesce().values().double()
            state = self.state.setdefault(table, {"one": torch.zeros(len(table), DIM).double()})
            state.setdefault("two", torch.zeros(len(table), DIM).double())
            own = {name: value[rows] for name, value in state.items()}
            table.data[rows] = self.formula(table.data[rows].double(), gradient, own, group["lr"], self.steps).to(table)
            for name, value in own.items():
                state[name][rows] = value


def partial_adam(w, g, state, lr, step):
    state["one"] = 0.9 * state["one"] + 0.1 * g
    state["two"] = 0.999 * state["two"] + 0.001 * g.square().mean(1, keepdim=True)
    return w - lr * state["one"] / (1 - 0.9**step) / ((state["two"] / (1 - 0.999**step)).sqrt() + 1e-8)


def rowwise(w, g, state, lr, step):
    state["one"] = state["one"] + g.square().mean(1, keepdim=True)
    return w - lr * g / (state["one"].sqrt() + 1e-8)


REFERENCES = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=1.0),
    "adagrad": lambda tables: Plain(tables, elementwise),
    "rowwise_adagrad": lambda tables: Plain(tables, rowwise),
    "lazy_adam": lambda tables: torch.optim.SparseAdam(tables, lr=1.0),
    "partial_rowwise_adam": lambda tables: Plain(tables, partial_adam),
    "ftrl": lambda tables: Plain(tables, elementwise),  # without l1 and l2 it is Adagrad
}


def elementwise(w, g, state, lr, step):
    state["one"] = state["one"] + g.square()
    return w - lr * g / (state["one"].sqrt() + 1e-8)


def expected(start, build):
    """The tables after the same steps of the optimizer that ``build`` makes, in one process."""
    tables = nn.ParameterDict({name: nn.Parameter(weight.clone()) for name, weight in start.items()})
    head = Toy().head
    tables_by, head_by = build(list(tables.values())), torch.optim.SGD(head.parameters(), 0.1)
    for step in range(STEPS):
        tables_by.param_groups[0]["lr"] = rate(step)
        ids, labels = batch(step)
        looked_up = [nn.functional.embedding(i, tables[n], sparse=True).sum(1) for n, i in zip(ROWS, ids, strict=True)]
        for each in (tables_by, head_by):
            each.zero_grad()
        logits = head(torch.stack(looked_up, dim=1).flatten(1)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        for each in (tables_by, head_by):
            each.step()
    return {name: table.detach() for name, table in tables.items()}


def test_each_trains_on_every_sharding_as_its_plain_form_in_one_process(tmp_path):
    spawn(train_all, 2, tmp_path)


@pytest.mark.parametrize(("l1", "l2", "beta"), [(0.0, 0.0, 1e-8), (0.02, 0.0, 1.0), (0.05, 0.3, 0.5)])
def test_ftrl_is_the_papers_algorithm_where_the_rate_is_constant_and_weights_start_at_0(l1, l2, beta):
    generator = torch.Generator().manual_seed(0)
    ours, rate = torch.zeros(7, DIM), 0.1
    state = new_state(ours, TABLE_OPTIMIZERS.get("ftrl").columns)
    z, n, w = (torch.zeros(7, DIM, dtype=torch.float64) for _ in range(3))
    for step in range(1, 40):
        g = 0.1 * torch.randn(7, DIM, generator=generator)
        Ftrl(l1=l1, l2=l2, beta=beta).update(ours, g, state, rate, step)
        g = g.double()
        z += g - ((n + g * g).sqrt() - n.sqrt()) / rate * w  # McMahan et al., algorithm 1
        n += g * g
        w = torch.where(z.abs() <= l1, 0.0, -(z - z.sign() * l1) / ((beta + n.sqrt()) / rate + l2))
        torch.testing.assert_close(ours.double(), w, rtol=1e-5, atol=1e-6)
    assert bool((ours == 0).any()) == (l1 > 0) and ours.any()


def test_ftrl_keeps_initial_values_and_follows_a_schedule():
    """A weight does not jump at its first step, nor when the rate falls; at rate 0 it stays."""
    weights = torch.full((1, DIM), 0.5)
    state = new_state(weights, TABLE_OPTIMIZERS.get("ftrl").columns)
    spec, g = Ftrl(l1=1e-3, beta=1.0), torch.full((1, DIM), 1e-3)
    for step, lr in enumerate((1e-4, 1.0, 1e-6, 0.0), 1):
        before = weights.clone()
        spec.update(weights, g, state, lr, step)
        assert (before - weights).abs().max() <= lr * 1e-3 + 3e-7


def save_and_resume(folder):
    """Train, save, train on; restored, the same steps give the same bits. Then into other shardings."""
    register()
    world = dist.get_world_size()
    for optimizer in ("adagrad", "lazy_adam", "partial_rowwise_adam", "ftrl", "momentum"):
        place = folder / optimizer
        place.mkdir(exist_ok=True)
        dist.barrier()
        first, rows = make(plan_for(KINDS, world), optimizer=optimizer)
        saver, _ = checkpointer(place, first, rows, state="fp32")
        train(first, 0, 3)
        saver.save(TrainState(step=3), wait=True)
        train(first, 3, STEPS)
        again, restored = make(plan_for(KINDS, world), seed=77, optimizer=optimizer)
        saver, said = checkpointer(place, again, restored)
        assert saver.resume().step == 3, said
        set_table_steps(again, 3)
        train(again, 3, STEPS)
        for one, two in zip(rows.local_shards(), restored.local_shards(), strict=True):
            assert torch.equal(one.weight, two.weight) and one.state.keys() == two.state.keys()
            assert all(torch.equal(one.state[name], two.state[name]) for name in one.state), one.table
            assert all(state.any() for state in two.state.values())
        saver.save(TrainState(step=STEPS), wait=True)
        for kind in ("column_wise", "row_wise") if optimizer in MOVED else ():
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
    for optimizer, column in MOVED.items():
        store = Store(str(tmp_path / optimizer / "store"))
        saved = whole(store, "ck")
        for table, (weight, state) in saved.items():
            assert weight.shape == state[column].shape and (state[column] > 0).any(1).sum() > 3
            for kind in ("column_wise", "row_wise"):
                other = whole(store, f"ck-{kind}")[table]
                assert torch.equal(weight, other[0]) and torch.equal(state[column], other[1][column]), kind
    moved = whole(Store(str(tmp_path / "momentum/store")), "ck")["a"][1]["moved"]
    assert moved.dim() == 1 and moved.max() <= STEPS and torch.equal(moved, moved.round())
    store = Store(str(tmp_path / "adagrad/store"))
    exported(store, whole(store, "ck"), tmp_path / "out")


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
    "few bits": {**SMALL, "checkpoint": CheckpointConfig(quantise="4", final_quantise="4")},
}
for name in STOPPED:
    CASES[name] = {**SMALL, "sparse_optimizer": name}
    CASES[f"{name}, stopped"] = {**CASES[name], "then": {"epochs": 2}, "max_steps": 7}
SSD_CASES = {
    f"{name} {tier}": {"sparse_optimizer": name, "tier": tier}
    for name in ("gentle", "rowwise_adagrad", "adagrad", "lazy_adam", "partial_rowwise_adam", "ftrl")
    for tier in ("ddr", "ssd")
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
    same = select_training_settings(test_train.config(world, **settings))
    again = run_training(same, store, dataset, plan, "runs/r/checkpoints/k", "key", print)
    assert again["final"] == last
    return [first["digests"], test_train.digests(store, store.get(last, "train"))]


def run_the_last_step_again(folder):
    found = resume_before_the_last_step(folder / "last step", dist.get_world_size(), dist.get_rank())
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def test_a_training_whose_rates_end_at_0_is_resumed_before_its_last_step(tmp_path):
    spawn(run_the_last_step_again, 2, tmp_path)
    before, after = json.loads((tmp_path / "0.json").read_text())
    assert before == after


def run_cases(folder):
    register()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {name: test_train.run_case(folder / name, world, rank, **case) for name, case in CASES.items()}
    found |= {name: test_ssd.run_case(folder / name, **case) for name, case in SSD_CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_whole_trainings_of_each_stop_and_go_on_and_lie_on_ssd(tmp_path):
    spawn(run_cases, 2, tmp_path)
    found = json.loads((tmp_path / "0.json").read_text())
    for name in STOPPED:
        assert found[name]["digests"] == found[f"{name}, stopped"]["digests"], name
        assert found[name]["ne"] < 1, name
    assert any(name.endswith(":state.squares") for name in found["whole"]["digests"])
    assert found["few bits"]["ne"] == pytest.approx(found["whole"]["ne"], abs=0.05)
    trained = {name: test_train.trained(found[name]["digests"]) for name in SSD_CASES}
    for name in {case.split()[0] for case in SSD_CASES}:
        assert trained[f"{name} ddr"] == trained[f"{name} ssd"], name
    assert trained["gentle ddr"] != trained["rowwise_adagrad ddr"]
