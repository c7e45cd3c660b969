"""Whole training runs on real gloo ranks: one spawn per world size does all cases, the tests look at what it left."""

import hashlib
import json
import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load

from pipeline.config import (
    CheckpointConfig,
    ClipConfig,
    Config,
    DataConfig,
    DebugConfig,
    EvaluateConfig,
    GuardConfig,
    HardwareConfig,
    TrainConfig,
)
from pipeline.config.train import RankLossConfig
from pipeline.core.errors import NightjarError
from pipeline.core.kernels import load_kernels
from pipeline.models.settings import DlrmConfig
from pipeline.records import PHASES, SparseColumn
from pipeline.store import Store
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for, spawn
from tests.tiers import Together, with_slow
from tests.training.dataset import write_dataset

ROWS = {"a": 40, "b": 23, "c": 11}
RAGGED = (SparseColumn(name="a", rows=40), SparseColumn(name="b", rows=23, multi=True, weighted=True))
RAGGED += (SparseColumn(name="c", rows=11, multi=True),)
MIXED = ["table_wise", "row_wise", "data_parallel"]


def config(world, **changes):
    groups = {"checkpoint": CheckpointConfig(), "debug": DebugConfig()}
    groups |= {name: changes.pop(name) for name in list(changes) if name in groups}
    guard = GuardConfig(**changes.pop("guard", {}))
    options = {
        "global_batch": 250,
        "epochs": 2,
        "lr": 0.01,
        "sparse_lr": 0.1,
        "warmup_steps": 5,
        "guard": guard,
        "schedule": "constant",
    }
    return Config(
        run="r",
        data=DataConfig(name="t", format="synthetic"),
        model=DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[16]),
        hardware=HardwareConfig(name="t", ranks_per_host=world),
        train=TrainConfig(**{**options, "precision": "fp32", "threads_per_rank": 1, "log_every_steps": 4, **changes}),
        evaluate=EvaluateConfig(global_batch=130),
        **groups,
    )


def spoil_dense(split, columns):
    if split == "train":
        columns["d1"][1234] = np.nan


def spoil_row(split, columns):
    if split == "train":
        columns["b"][1234] = 23


CASES = {
    "plain": {},
    "again": {},
    "stopped": {"then": {"epochs": 2}, "max_steps": 7},
    "base": {"pipeline": "base"},
    "data_parallel": {"sharding": "data_parallel"},
    "mixed": {"sharding": MIXED},
    "bf16": {"precision": "bf16"},
    "adagrad": {"dense_optimizer": "adagrad", "checkpoint": CheckpointConfig(every_steps=3, keep_last=3)},
    "ragged": {"data": {"sparse": RAGGED}, "sharding": "row_wise"},
    "debug": {"max_steps": 6, "debug": DebugConfig(anomaly=True, profile_steps=2)},
    "profile": {"max_steps": 16, "profile": True, "log_every_steps": 4},
    "nan_input": {"data": {"spoil": spoil_dense}},
    "explodes": {"lr": 1e38, "epochs": 20},
    "collapsed": {"guard": {"collapse_after_steps": 8, "window_steps": 4, "min_logit_std": 50.0}},
    "no_learning": {"lr": 0.0, "sparse_lr": 0.0, "guard": {"collapse_after_steps": 8, "window_steps": 4}},
    "no_test_rows": {"data": {"test": 0}},
    "predicted": {"predicted": True, "max_steps": 6},
    "clipped": {"sharding": MIXED, "clip": ClipConfig(dense_norm=0.05, table_value=0.0002)},
    "pairs": {"rank_loss": RankLossConfig(kind="pairwise", weight=3.0, group_by="a")},
    "lists": {"rank_loss": RankLossConfig(kind="listwise", weight=3.0)},
    "bad_row": {"data": {"spoil": spoil_row}},  # the last: the rank that meets the row leaves the others behind
}


# In a spawn of one rank of make test, beside all cases on two; whatever else one rank shows is slow.
ONE_RANK = ("plain", "mixed", "clipped", "pairs", "lists")
WORLDS = with_slow((1, 2), (2,))


def run_cases(folder, names):
    logging.disable(logging.WARNING)
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        outcome = run_case(folder / name, world, rank, **CASES[name])
        (folder / f"{name}-rank{rank}.json").write_text(json.dumps(outcome))


def run_case(root, world, rank, *, sharding="table_wise", data=None, then=None, predicted=False, **changes):
    columns = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
    options = {"train": 2110, "test": 700, "sparse": columns, **(data or {})}
    store, dataset = Store(str(root)), None
    if rank == 0:
        store, dataset = write_dataset(root, **options)
    dist.barrier()
    dataset = dataset or store.get(f"datasets/t/{'0123456789abcdef' * 2}", "ingest")
    plan = plan_for(sharding, world, rows=ROWS, dim=8)
    if predicted:
        plan = replace(
            plan,
            predicted_step_ms=7.5,
            phases=[{"lookup": 1.0 + rank} for rank in range(world)],
            memory=[{"hbm": 0, "ddr": 100 * (rank + 1), "ssd": 9} for rank in range(world)],
            reserved=[{"dense": 20, "inputs": 3, "margin": 1000}] * world,
        )
    records, outcome = [], {}
    try:
        for settings in [changes, *([{**changes, "max_steps": None, **then}] if then else [])]:
            current = config(world, **settings)
            asked = select_training_settings(current)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                summary = train(asked, store, dataset, plan, "runs/r/checkpoints/k", "key", records.append)
        predictions = predict(select_prediction_settings(current), store, dataset, plan, summary["final"])
    except NightjarError as error:
        return {"error": type(error).__name__, "message": str(error), "records": records}
    final = store.get(summary["final"], "train")
    outcome = {"summary": summary, "records": records, "names": store.names("runs/r/checkpoints/k")}
    outcome["warned"] = [str(each.message) for each in warned]
    outcome["digests"] = digests(store, final)
    outcome["traces"] = [name for name in store.names("runs/r") if name.startswith("trace")]
    profiles = [name for name in store.names("runs/r") if name.startswith("profile")]
    outcome["profiles"] = {name: (root / "runs" / "r" / name).read_text() for name in profiles}
    if predictions is not None:
        logits, labels = predictions.logits.astype(np.float64), predictions.labels
        loss = np.mean(np.logaddexp(0, logits) - labels * logits)
        rate = labels.mean()
        outcome["ne"] = loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        outcome["rows"] = len(logits)
        outcome["logits"] = predictions.logits.tolist()
    return outcome


def digests(store, artifact):
    """SHA-256 of every tensor of a checkpoint by "file:tensor", for each file names its tensors alike."""
    hashes = {}
    for name in artifact.files:
        if name.endswith(".safetensors"):
            with store.open(f"{artifact.path}/{name}") as source:
                for key, value in load(source.read()).items():
                    hashes[f"{name}:{key}"] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return hashes


def trained(hashes):
    """Of ``digests`` those of what training changes: all but the state of torch's generator."""
    return {name: value for name, value in hashes.items() if not name.endswith(":rng")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(world size, case name) -> the outcome on each rank."""

    def train_together(cases):
        world = cases[0][0]
        folder, found = tmp_path_factory.mktemp(f"world{world}"), {}
        spawn(run_cases, world, folder, [name for _, name in cases])
        for _, name in cases:
            ranks = [json.loads((folder / f"{name}-rank{rank}.json").read_text()) for rank in range(world)]
            found[world, name] = ranks
        return found

    further = [(1, name) for name in CASES if name not in ONE_RANK]
    return Together(train_together, [(2, name) for name in CASES], [(1, name) for name in ONE_RANK], further)


def good(outcomes, world, name):
    first = outcomes[world, name][0]
    ended = "summary" in first  # a name: the figures of what ended are times
    assert ended, first
    return first


@pytest.mark.parametrize("world", WORLDS)
def test_it_learns_and_reports(outcomes, world):
    outcome = good(outcomes, world, "plain")
    assert outcome["ne"] < 0.93
    assert outcome["rows"] == 700
    figures = outcome["summary"]["train"]
    assert set(figures) == {
        "samples",
        "steps",
        "global_batch",
        "seconds",
        "samples_per_s",
        "data_wait_share",
        "peak_rss_bytes",
        "world_size",
        "phases",
        "step",
        "memory",
        "bytes_per_sample",
    }
    sent = figures["bytes_per_sample"]
    assert (sent["intra_host"] > 0) == (world > 1) and sent["inter_host"] == 0
    assert (figures["samples"], figures["steps"], figures["world_size"]) == (4220, 18, world)
    assert set(outcome["summary"]["checkpoint"]) == {
        "count",
        "bytes_written",
        "bytes_full_equivalent",
        "stall_share",
        "skipped",
        "failed",
    }
    assert [record["step"] for record in outcome["records"]] == [4, 8, 12, 16, 18]
    names = {*outcome["records"][0]}
    assert {
        "step",
        "steps_total",
        "samples",
        "samples_per_s",
        "data_wait_share",
        "loss",
        "ne_window",
        "eta_seconds",
        "lr",
        "seconds",
    } <= names
    assert outcome["records"][-1]["samples"] == 4220
    assert outcome["records"][-1]["eta_seconds"] == 0
    assert outcome["records"][0]["lr"] == pytest.approx(0.01 * 4 / 5)
    assert outcome["records"][1]["lr"] == pytest.approx(0.01)


@pytest.mark.measures
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["plain", "stopped"])
def test_rates_are_those_of_the_session(outcomes, world, name):
    figures = good(outcomes, world, name)["summary"]["train"]
    before = figures["resumed"]["samples"] if name == "stopped" else 0
    assert figures["samples_per_s"] == pytest.approx((4220 - before) / figures["seconds"])
    assert 0 <= figures["data_wait_share"] <= 1


@pytest.mark.measures
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["plain", "base", "mixed", "ragged"])
def test_phases_are_measured_and_add_up_to_the_step(outcomes, world, name):
    figures = good(outcomes, world, name)["summary"]["train"]
    measured = {phase: part["measured_ms"] for phase, part in figures["phases"].items()}
    assert tuple(measured) == PHASES
    assert min(measured.values()) > 0, measured
    whole, step = sum(measured.values()), figures["step"]["measured_ms"]
    if world == 1:
        assert whole == pytest.approx(step)
    # The mean over ranks beside the slowest of them.
    assert step / world <= whole <= step * (1 + 1e-9)


@pytest.mark.parametrize("world", WORLDS)
def test_predicted_stands_beside_measured_where_the_plan_knows(outcomes, world):
    plain = good(outcomes, world, "plain")["summary"]["train"]
    assert not any("predicted_ms" in part for part in [*plain["phases"].values(), plain["step"]])
    assert "predicted_bytes" not in plain["memory"]
    known = good(outcomes, world, "predicted")["summary"]["train"]
    assert known["phases"]["lookup"]["predicted_ms"] == pytest.approx(1.5 if world == 2 else 1.0)
    assert known["phases"]["dense"]["predicted_ms"] == 0.0
    assert known["step"]["predicted_ms"] == 7.5
    # Every table whole on rank 0, or all but one: its rows with their state, and what is kept for the rest.
    plan = plan_for("table_wise", world, rows=ROWS, dim=8)
    held = [sum(ROWS[n] for n, t in plan.tables.items() if t.shards[0].rank == rank) for rank in range(world)]
    assert known["memory"]["predicted_bytes"] == max(held) * 9 * 4 + 23


def gradients_in_float32():
    compiled = load_kernels("linear")
    return compiled is not None and compiled.able[True]


def test_no_gradient_is_laid_out_otherwise_than_ddp_expects(outcomes):
    """torch warns once a process: in the first case. Such gradients are copied in every step."""
    for outcome in outcomes[2, "plain"]:
        assert not [text for text in outcome["warned"] if "stride" in text]


AGREEING = ["plain", "data_parallel", "mixed", "ragged", "bf16", "clipped", "pairs", "lists"]


@pytest.mark.parametrize("name", with_slow(AGREEING, ONE_RANK))
def test_one_and_two_ranks_agree(outcomes, name):
    one, two = good(outcomes, 1, name), good(outcomes, 2, name)
    assert one["ne"] == pytest.approx(two["ne"], rel=1e-3 if name == "bf16" else 1e-6)
    # oneDNN rounds each rank's gradients of weights to bf16, and later steps build on the difference.
    if name != "bf16" or gradients_in_float32():
        assert np.allclose(one["logits"], two["logits"], atol=1e-3 if name == "bf16" else 1e-5)
    names = [*outcomes[2, name][1]]
    assert "ne" not in names


def test_clipping_changes_what_is_trained(outcomes):
    assert not np.allclose(good(outcomes, 1, "clipped")["logits"], good(outcomes, 1, "mixed")["logits"], atol=1e-2)


@pytest.mark.parametrize("name", ["pairs", "lists"])
def test_a_ranking_loss_changes_what_is_trained_and_not_the_loss_that_is_shown(outcomes, name):
    ranked, plain = good(outcomes, 1, name), good(outcomes, 1, "plain")
    assert not np.allclose(ranked["logits"], plain["logits"], atol=1e-2)
    assert ranked["records"][0]["loss"] == pytest.approx(plain["records"][0]["loss"], rel=0.05)
    shown = [[record["rank_loss"] for record in good(outcomes, world, name)["records"]] for world in (1, 2)]
    assert shown[0] == pytest.approx(shown[1], rel=1e-4)
    assert shown[0][0] > shown[0][-1]
    assert "rank_loss" not in plain["records"][0]


@pytest.mark.parametrize("world", WORLDS)
def test_identical_runs_give_the_same_bytes(outcomes, world):
    assert good(outcomes, world, "plain")["digests"] == good(outcomes, world, "again")["digests"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_ends_where_the_whole_one_does(outcomes, world):
    stopped = good(outcomes, world, "stopped")
    assert stopped["digests"] == good(outcomes, world, "plain")["digests"]
    figures = stopped["summary"]["train"]
    assert (figures["steps"], figures["resumed"]["step"]) == (18, 7)
    assert stopped["names"] == ["step-00000007", "step-00000018"]


@pytest.mark.parametrize("world", WORLDS)
def test_both_pipelines_and_shardings_train_the_same(outcomes, world):
    plain = good(outcomes, world, "plain")
    assert good(outcomes, world, "base")["digests"] == plain["digests"]
    assert good(outcomes, world, "data_parallel")["ne"] == pytest.approx(plain["ne"], rel=1e-6)
    assert good(outcomes, world, "mixed")["ne"] == pytest.approx(plain["ne"], rel=1e-6)
    assert good(outcomes, world, "bf16")["ne"] == pytest.approx(plain["ne"], rel=2e-2)


@pytest.mark.parametrize("world", WORLDS)
def test_checkpoints_every_n_steps_are_pruned(outcomes, world):
    outcome = good(outcomes, world, "adagrad")
    # The newest three, and the baseline that the differences among them rest on.
    assert outcome["names"] == ["step-00000009", "step-00000012", "step-00000015", "step-00000018"]
    assert outcome["summary"]["checkpoint"]["count"] == 6


@pytest.mark.parametrize("world", WORLDS)
def test_profile_writes_a_trace_per_rank(outcomes, world):
    assert good(outcomes, world, "debug")["traces"] == [f"trace-rank{rank}.json" for rank in range(world)]


@pytest.mark.measures
@pytest.mark.parametrize("world", WORLDS)
def test_a_profile_has_a_table_by_kind_of_work_and_the_share_of_the_ceiling(outcomes, world):
    outcome = good(outcomes, world, "profile")
    assert outcome["traces"] == [f"trace-rank{rank}.json" for rank in range(world)]
    assert list(outcome["profiles"]) == [f"profile-rank{rank}.txt" for rank in range(world)]
    for table in outcome["profiles"].values():
        head, *lines = table.splitlines()
        assert head.startswith("a step of ") and "mean of 10" in head
        kinds = {line.split("%  ")[1]: float(line.split()[0]) for line in lines}
        assert {"matrix products", "the matrix products alone: the ceiling"} <= set(kinds)
        assert ("exchange" in kinds) == (world > 1)
        assert min(kinds.values()) > 0
    for record in outcome["records"]:
        assert record["ceiling_share"] > 0 and record["gflop_per_s"] > 0
    assert "gflop_per_s" not in good(outcomes, world, "plain")["records"][0]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "error", "parts"),
    [
        ("nan_input", "GuardError", ["the loss is not finite", "dense feature 'd1'", "train.lr="]),
        ("bad_row", "GuardError", ["table 'b' has rows 0 to 22", "train row 1234", "asks for row 23"]),
        ("explodes", "GuardError", ["not finite", "train.lr="]),
        ("collapsed", "GuardError", ["predictions have collapsed", "min_logit_std=50", "train.guard.collapse=false"]),
        (
            "no_learning",
            "GuardError",
            ["is not learning: NE is", "on 2,110 train rows after", "train.guard.collapse=false"],
        ),
        ("no_test_rows", "DataError", ["has no test rows", "data.split.test_share"]),
    ],
)
def test_guards_stop_every_rank_with_the_same_error(outcomes, world, name, error, parts):
    ranks = outcomes[world, name]
    assert {outcome.get("error") for outcome in ranks} == {error}
    assert len({outcome["message"] for outcome in ranks}) == 1
    for part in parts:
        assert part in ranks[0]["message"]
