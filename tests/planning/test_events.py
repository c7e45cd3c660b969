"""Plans follow the lengths that ingestion measured, and ``train.max_events``: memory, time, and a real process."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.models.sequence_costs import SAMPLES, events_of_batch, lengths_like
from pipeline.planning.cost import fixed_ms, timed_costs
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.problem import RUNTIME_EVENTS, dense_bytes, event_bytes, row_bytes
from pipeline.records import SequenceColumn, SequenceGroup, SequenceProfile
from tests.commands import nightjar_in_turn
from tests.planning.plan_cases import configure, cpu, dataset

HISTORY = SequenceGroup(
    name="history", columns=(SequenceColumn(name="history__a", rows=100, table="a"),), max_length=200
)


def lengths(mean, p99, longest=200):
    return SequenceProfile(mean=mean, p99=p99, longest=longest, empty_share=0.0)


def inputs(measured, block="hstu", layers=2, most=None, batch=256):
    config = configure(cpu(1, 2), batch=batch)
    config.model.sequences = {
        "history": SequenceModel(block=block, options=SequenceOptions(layers=layers if block != "din" else None))
    }
    config.train.max_events = most
    schema, profile = dataset({"a": 100})
    events = replace(profile.sparse["a"], pooling=measured.mean)
    profile = replace(profile, sparse={**profile.sparse, "history__a": events}, sequences={"history": measured})
    return PlanInputs.of(config, replace(schema, sequences=(HISTORY,)), profile)


@pytest.mark.parametrize(("mean", "p99"), [(20, 92), (20, 20), (5.5, 40), (1, 1), (150, 200), (1.2, 3)])
def test_lengths_have_the_mean_and_the_spread_that_were_measured(mean, p99):
    found = lengths_like(HISTORY, lengths(mean, p99))
    assert len(found) == SAMPLES and min(found) >= 1 and max(found) <= HISTORY.max_length
    assert np.mean(found) == pytest.approx(mean, abs=1 / SAMPLES + 1e-9)
    assert np.std(found) <= (p99 - mean) / 2.3 + 1
    assert p99 - mean < 10 or np.std(found) > 0.4 * (p99 - mean) / 2.3


def test_a_sequence_that_was_not_measured_has_the_longest():
    assert lengths_like(HISTORY, None) == [200] * SAMPLES


def test_few_batches_have_more_events_than_a_plan_counts_on():
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.geometric(1 / 20, (4000, 256)), 1, 200)
    measured = lengths(drawn.mean(), int(np.quantile(drawn, 0.99)))
    assert 0 < (drawn.sum(1) > events_of_batch(measured, 256)).mean() + 1e-9 < 0.02
    assert events_of_batch(measured, 256) < 1.25 * drawn.sum(1).mean()


def test_an_empty_history_counts_as_the_event_that_stands_for_it():
    """Nine rows of ten have none: a batch has nearly twice the events of the log."""
    rng = np.random.default_rng(0)
    drawn = np.where(rng.random((4000, 256)) < 0.9, 0, 10)
    measured = SequenceProfile(mean=drawn.mean(), p99=10, longest=10, empty_share=(drawn == 0).mean())
    looked_up = np.maximum(drawn, 1).sum(1)
    assert (looked_up > events_of_batch(measured, 256)).mean() < 0.02
    assert np.mean(lengths_like(HISTORY, measured)) == pytest.approx(looked_up.mean() / 256, abs=0.1)


def test_memory_and_time_follow_the_measured_lengths():
    short, long = inputs(lengths(10, 10)), inputs(lengths(40, 40))
    assert event_bytes(long, 128) == pytest.approx(4 * event_bytes(short, 128))
    few, many = dense_bytes(short), dense_bytes(long)
    assert many["communication"] > 3 * few["communication"]
    assert many["activations"] > 3 * few["activations"]
    flop = [timed_costs(each.model, each.schema, each.events, 128).flop for each in (short, long)]
    assert flop[1] > 3.5 * flop[0]


def test_attention_among_events_costs_more_where_lengths_spread():
    """As many events in all: what grows with the squares of lengths grows, what does not stays."""
    even, spread = (inputs(lengths(40, p99)) for p99 in (40, 130))
    costs = [timed_costs(each.model, each.schema, each.events, 128).flop for each in (even, spread)]
    assert costs[1] > 1.1 * costs[0]
    even, spread = (inputs(lengths(40, p99), block="din") for p99 in (40, 130))
    costs = [timed_costs(each.model, each.schema, each.events, 128).flop for each in (even, spread)]
    assert costs[1] == pytest.approx(costs[0], rel=0.01)


def test_a_longer_sequence_has_more_parameters_however_short_its_histories_are():
    """Vectors of places, and biases by distance."""
    given = inputs(lengths(10, 10))
    longer = replace(given.schema, sequences=(replace(HISTORY, max_length=400),))
    short, long = (timed_costs(given.model, each, given.events, 128) for each in (given.schema, longer))
    assert long.flop == short.flop and long.parameters > short.parameters + 200 * given.model.embedding_dim


def test_few_events_at_once_take_less_memory_and_more_time():
    given = lengths(40, 100)
    whole, parts, ample = inputs(given), inputs(given, most=500), inputs(given, most=100_000)
    kept = [dense_bytes(each)["activations"] for each in (whole, parts, ample)]
    assert kept[1] < 0.2 * kept[0] and kept[2] == kept[0]
    times = [
        fixed_ms(each.model, each.schema, each.hardware, each.batch, each.events)["dense"]
        for each in (whole, parts, ample)
    ]
    assert 1.1 * times[0] < times[1] < 1.5 * times[0] and times[2] == times[0]


def test_every_part_of_a_batch_calls_all_operations_and_events_move_in_proportion():
    both = (inputs(lengths(40, 40)), inputs(lengths(40, 40), most=1_900))
    whole, parts = (timed_costs(each.model, each.schema, each.events, 100) for each in both)
    assert parts.operations > 3 * whole.operations  # 4,000 events in three parts, and the forward pass twice
    few, many = (inputs(lengths(mean, mean), block="din") for mean in (40, 80))
    costs = [timed_costs(each.model, each.schema, each.events, 100) for each in (few, many)]
    assert costs[0].operations == costs[1].operations
    assert costs[1].moved == pytest.approx(2 * costs[0].moved, rel=0.1)


def test_a_row_holds_its_events_and_one_offset_for_all_columns_of_a_sequence():
    """Ids of 4 bytes, and an offset of 8."""
    given = inputs(lengths(10, 10))
    two = replace(HISTORY, columns=(*HISTORY.columns, replace(HISTORY.columns[0], name="history__b")))
    profile = replace(given.profile, sparse={**given.profile.sparse, "history__b": given.profile.sparse["history__a"]})
    none, one, both = (
        row_bytes(replace(given.schema, sequences=sequences), profile) for sequences in ((), (HISTORY,), (two,))
    )
    assert (one - none, both - one) == (10 * 4 + 8, 10 * 4)


def test_kernels_for_numbers_of_events_are_reserved_where_there_are_sequences():
    with_history = inputs(lengths(10, 10))
    without = replace(with_history, schema=replace(with_history.schema, sequences=()))
    on_gpus = replace(with_history, hardware=replace(with_history.hardware, device="cuda"))
    reserved = [dense_bytes(each)["runtime"] for each in (with_history, without, on_gpus)]
    assert reserved[0] - reserved[1] == RUNTIME_EVENTS and reserved[1] == reserved[2]


def test_one_history_may_be_longer_than_the_events_at_once():
    """Then its activations are what a part keeps."""
    given = lengths(40, 100, longest=180)
    kept = [dense_bytes(inputs(given, most=most))["activations"] for most in (1, 180, 360)]
    assert kept[0] == kept[1] < kept[2]


SCHEMA = """
defaults: [parquet]
name: clicks
path: log.parquet
label: {column: clicked}
timestamp: time
dense: {price: {}}
sparse:
  item: {rows: 500}
sequences:
  history:
    max_length: 200
    target: item
    features:
      item: {column: items, table: item}
"""
BASE = [
    "-cd",
    "my",
    "data=clicks",
    "model=dlrm_small",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=32",
    "train.global_batch=1024",
    "train.threads_per_rank=1",
    "train.precision=fp32",
    "+model.sequences.history={block: hstu, options: {layers: 2}}",
    "train.guard.collapse=false",
    "store=store",
    "train.max_steps=6",
    "stages=[ingest,plan,partition,train]",
    "hardware=laptop",
]


@pytest.mark.slow
def test_the_estimate_holds_for_a_process(tmp_path):
    """Lengths of 1 to 200, 20 on average: at once, and 4,000 events at a time."""
    rng, rows = np.random.default_rng(0), 8000
    counts = np.clip(rng.geometric(1 / 20, rows), 1, 200)
    log = pl.DataFrame(
        {
            "time": np.arange(rows) + 1_767_225_600,
            "item": [f"i{i}" for i in rng.integers(0, 400, rows)],
            "items": [[f"i{i}" for i in rng.integers(0, 400, count)] for count in counts],
            "price": rng.random(rows),
            "clicked": rng.integers(0, 2, rows),
        }
    )
    log.write_parquet(tmp_path / "log.parquet")
    (tmp_path / "my" / "data").mkdir(parents=True)
    (tmp_path / "my" / "data" / "clicks.yaml").write_text(SCHEMA)
    bounds = {"whole": "null", "parts": "4000"}
    commands = [["run", *BASE, f"run={name}", f"train.max_events={most}"] for name, most in bounds.items()]
    for done in nightjar_in_turn(commands, cwd=tmp_path):
        assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in bounds:
        result = json.loads((tmp_path / "store" / "runs" / name / "result.json").read_text())
        memory = result["train"]["memory"]
        found[name] = memory["measured_bytes"], memory["predicted_bytes"]
    for measured, predicted in found.values():
        assert 0.6 * predicted < measured < 1.5 * predicted, found
    assert found["parts"][0] < 0.7 * found["whole"][0], found
