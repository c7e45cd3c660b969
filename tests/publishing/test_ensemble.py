"""Versions that average the members of an ensemble: tables, program, a whole run, and the next one's warm start."""

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.checkpoint.index import name_of
from pipeline.checkpoint.reader import ChainReader
from pipeline.publishing.dense import Ensemble, join_members, member_columns
from pipeline.publishing.program import write_program
from pipeline.publishing.served import SERVING, Description, ServedModel, local_version
from pipeline.publishing.table_writer import write_table
from pipeline.publishing.versions import version_path
from pipeline.records import GATE, GateRecord, Result, TrainPart, ensemble_of, members_of, read
from pipeline.store import Store
from tests.checkpoint import built
from tests.publishing import made


class Sum(nn.Module):
    """A member that adds up its inputs, with weights by column so that none can be mistaken for another."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, dense, embeddings, *events):
        flat = embeddings.flatten(1)
        logits = dense.sum(1) + self.factor * (flat * torch.arange(1.0, 1 + flat.shape[1])).sum(1)
        for values, rows in zip(events[::2], events[1::2], strict=True):
            logits = logits.index_add(0, rows, self.factor * (values * torch.arange(1.0, 1 + values.shape[1])).sum(1))
        return logits


def test_places_are_those_of_a_member_in_rows_side_by_side():
    assert member_columns([2, 1], 3).tolist() == [[0, 1, 6], [2, 3, 7], [4, 5, 8]]


@pytest.mark.parametrize("widths", [None, [4, 2, 4]], ids=["even", "uneven"])
def test_an_ensemble_adds_up_what_its_members_say(widths):
    torch.manual_seed(0)
    members, weights = [Sum(1.0), Sum(-2.0)], np.array([0.75, 0.5])
    dense, events, rows = torch.randn(5, 2), [torch.randn(7, 3), torch.randn(7, 3)], torch.tensor([0, 0, 1, 2, 2, 4, 4])
    own = [torch.randn(5, 3, 4) if widths is None else torch.randn(5, sum(widths)) for _ in members]
    if widths is None:
        together = torch.cat(own, dim=2)
    else:
        parts = zip(*(each.split(widths, dim=1) for each in own), strict=True)
        together = torch.cat([part for pair in parts for part in pair], dim=1)
    columns = torch.cat([part for pair in zip(*(e.split([1, 2], 1) for e in events), strict=True) for part in pair], 1)
    model = Ensemble(members, weights, 4, widths, [[1, 2]])
    expected = sum(
        weight * member(dense, embeddings, each, rows)
        for weight, member, embeddings, each in zip(weights, members, own, events, strict=True)
    )
    assert torch.allclose(model(dense, together, columns, rows), expected.float(), rtol=0, atol=1e-6)


def test_a_version_of_two_checkpoints_scores_as_both_of_them(tmp_path):
    store, weights, modules = Store(str(tmp_path)), [0.6, 0.5], [made.dense_part(3), made.dense_part(4)]
    readers = [ChainReader(store, built.put(store, step)) for step in (1, 2)]
    dense, ids = made.rows(300)

    def scores(name, readers, module):
        path, dim = version_path("clicks", name), built.DIM * len(readers)
        with store.draft(path, kind="model", key="0" * 32, config={}, inputs={}) as draft:
            layouts = {table: write_table(draft, readers, table, "fp32", 256).layout for table in built.ROWS}
            write_program(draft, module, 2, (3, dim))
            draft.write_json(SERVING, Description.of(made.SCHEMA, dim, layouts).to_json())
            draft.commit({})
        with local_version(store, path) as folder:
            return ServedModel(folder, 1 << 20).score(dense, ids)

    alone = [scores(f"v0000{n}-00000000", [readers[n]], modules[n]) for n in (0, 1)]
    both = scores("v00002-00000000", readers, join_members(made.SCHEMA, made.MODEL, modules, weights))
    assert not np.allclose(alone[0], alone[1])
    assert both == pytest.approx(weights[0] * alone[0] + weights[1] * alone[1], abs=1e-5)


def overrides(store, *more):
    return [
        "experiment=demo",
        "data.synthetic.rows=9000",
        "data.split.validation_share=0.2",
        f"store={store}",
        "model.bottom_mlp=[16]",
        "model.top_mlp=[16]",
        "model.embedding_dim=8",
        "train.global_batch=256",
        "train.threads_per_rank=1",
        "gate.max_ne_increase=0.5",
        "gate.importance_rows=500",
        "gate.min_baseline_gain=null",
        "stages=[ingest,plan,partition,train,evaluate,publish]",
        *more,
    ]


def run(*settings):
    from benchmarks.harness import run_config
    from pipeline.config.compose import compose

    return run_config(compose(overrides(*settings)))


SNAPSHOTS = ["train.epochs=3", "train.snapshots.count=3", "train.snapshots.keep=2"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A store with a run that published its ensemble, and the run's artifacts."""
    place = tmp_path_factory.mktemp("store")
    artifacts = run(place, "run=first", *SNAPSHOTS)
    return Store(str(place)), artifacts


@pytest.mark.measures
def test_the_cost_of_an_ensemble_is_measured(first):
    store, artifacts = first
    record = read(GateRecord, store, f"{artifacts['publish'].path}/{GATE}")
    assert record.cost.members == 2 and record.cost.bytes > 1.5 * record.cost.bytes_of_one > 0
    assert record.cost.row_us > 0 and record.importance


def test_a_run_publishes_its_ensemble(first):
    store, artifacts = first
    trained = artifacts["train"]
    members = members_of(trained.summary)
    part = ensemble_of(trained.summary)
    assert part.made == 3 and len(members) == 2 and part.ne < part.last_ne
    record = read(GateRecord, store, f"{artifacts['publish'].path}/{GATE}")
    assert abs(record.serving.gap) < 0.002  # the version scores as the evaluation did
    version = store.get(artifacts["publish"].summary["model"]["uri"], "publish")
    assert version.summary["members"] == [each.checkpoint for each in members]
    assert version.summary["checkpoint"] == trained.summary["final"]
    lines = trained_lines(trained)
    assert f"ensemble of 2 of 3 snapshots, after steps {', '.join(step(each) for each in members)}" in lines
    text = store.fs.cat(store.full(f"{artifacts['publish'].path}/gate.md")).decode()
    assert "An ensemble of 2 members: " in text


@pytest.mark.slow
def test_members_are_chosen_anew_and_the_next_run_starts_from_the_last_one(first):
    store, artifacts = first
    trained = artifacts["train"]
    newest = ["train.snapshots.choose=last", "train.snapshots.weights=equal"]
    again = run(store.url, "run=first", *SNAPSHOTS, *newest)
    chosen = members_of(again["train"].summary)
    assert [each.weight for each in chosen] == [0.5, 0.5]
    assert chosen[-1].checkpoint == trained.summary["final"]
    assert again["train"].summary["checkpoint"]["count"] == 0  # the same training, chosen anew

    warm = run(store.url, "run=second", "checkpoint.init_from=first")
    assert name_of(warm["train"].config["init"]["step"]) == trained.summary["final"].rpartition("/")[2]
    assert "ensemble" not in warm["train"].summary["train"]


def trained_lines(artifact):
    from pipeline.specs import STAGES

    result = Result(run="r", status="done", train=TrainPart.from_json(artifact.summary["train"]))
    return "\n".join(STAGES.get("train").lines(result)["train"])


def step(member):
    return member.checkpoint.rpartition("-")[2].lstrip("0")
