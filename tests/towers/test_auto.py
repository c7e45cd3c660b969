"""``partition.auto=true``: flat or towers by predicted step and held-out NE, what is on record, and what is trained."""

import dataclasses
import html
import json

import numpy as np
import pytest

from pipeline.cli import main
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.records import Towers
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.towers.assignment import tower_counts, towers_of
from pipeline.training.config_settings import select_training_settings
from pipeline.training.tower_trial import HeldOutLosses, TrialLength, ne_change, run_trial, trial_length
from tests.commands import nightjar
from tests.logged import listen

SMALL = (
    "data=synthetic",
    "data.synthetic.rows=4000",
    "data.synthetic.days=1",
    "data.synthetic.ids_per_feature=20",
    "hardware=laptop",
    "train.global_batch=256",
    "train.threads_per_rank=1",
    "train.precision=fp32",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "plan.sharding_types=[table_wise]",
    "partition.probe_steps=6",
    "partition.strategy=strided",
    "run=r",
)
AUTO = ("partition=dmt", "partition.auto=true")
HOSTS = ("hardware.hosts=2", "hardware.ranks_per_host=1", "launch.inline=[ingest,plan,partition]")
SLOW = (*HOSTS, "hardware.inter_host_gb_per_s=0.001")
FAST = (*HOSTS, "hardware.inter_host_gb_per_s=1000", "hardware.inter_host_latency_us=0")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(str(tmp_path_factory.mktemp("store")))


def config(store: Store, *overrides: str):
    return compose([*SMALL, *overrides, f"store={store.url}"])


def chosen(store: Store, *overrides: str, last: str = "partition"):
    """(towers, artifact of the stage, lines of the log) after the stages up to ``last``."""
    settings, lines = config(store, *AUTO, *overrides), listen()
    artifacts = {}
    for step in steps(settings, store):
        artifacts[step.name] = store.find(step.path) or run_stage(step, settings, store, StageIO())
        if step.name == last:
            break
    partition = artifacts["partition"]
    return Towers.from_json(store.read_json(f"{partition.path}/towers.json")), partition, "\n".join(lines)


def key_of(store: Store, *overrides: str) -> dict[str, str]:
    return {step.name: step.key for step in steps(config(store, *overrides), store)}


def page_of(store: Store, artifact) -> str:
    with store.open(f"{artifact.path}/towers.html") as source:
        return html.unescape(source.read().decode())


def test_a_slow_link_chooses_the_fastest_towers_that_keep_the_ne(store):
    towers, artifact, said = chosen(store, *SLOW, "partition.max_ne_loss=100")
    choice = towers.choice
    assert not towers.is_flat and artifact.summary["shape"]["module"] == towers.module.name
    flat, *others = choice.candidates
    assert (flat.towers, flat.ratio, flat.ne_change) == (0, 1.0, None)
    assert {(each.module.name, each.module.dim) for each in others} == {
        (name, dim) for name in ("dcn_low_rank", "low_rank") for dim in (1, 2, 4)
    }
    ratios = [each.ratio for each in others]
    assert ratios == sorted(ratios) and ratios[0] < 0.95, "by predicted step"
    best = choice.candidates[choice.chosen]
    assert best is others[0] and best.module == towers.module, "all keep the NE, so the first one is taken"
    assert best.ne_change is not None and best.ne_error > 0 and others[1].ne_change is None
    # Half of a sample's 26 ids with their lengths cross, and half of the vectors of width 8 or 1 with their gradients.
    assert flat.bytes_per_sample == 26 * (4 + 4) / 2 + 26 * 8 * 8 / 2
    assert best.bytes_per_sample == 26 * (4 + 4) / 2 + 26 * 1 * 8 / 2
    assert store.find(artifact.path).files.keys() >= {"plan.json", "towers.json", "towers.html"}
    assert "partition.auto: trying the flat model, 6 steps of 256 rows" in said and "tried the flat model in" in said
    assert choice.why in said and choice.why in page_of(store, artifact)


def test_nothing_acceptable_chooses_flat_and_says_why(store):
    towers, artifact, said = chosen(store, *SLOW, "partition.max_ne_loss=-100")
    assert towers.is_flat and towers.choice.chosen == 0
    assert towers.choice.why == "6 of 6 faster candidates were tried, and none keeps NE within -100 %"
    assert all(each.verdict.startswith("NE may rise by ") for each in towers.choice.candidates[1:])
    assert towers.choice.why in said and towers.choice.why in page_of(store, artifact)
    assert "plan.json" not in store.find(artifact.path).files and "shape" not in artifact.summary


def test_a_fast_link_chooses_flat_without_a_trial(store):
    towers, _, said = chosen(store, *FAST)
    assert towers.is_flat and "no towers are predicted to save 5%" in towers.choice.why
    assert len(towers.choice.candidates) == 7 and all(each.ne_change is None for each in towers.choice.candidates)
    assert "trying" not in said


def test_towers_that_fit_their_hosts_only_without_their_module_are_not_tried(store):
    module = ["partition.module=dcn_low_rank", "partition.rank=4096"]
    towers, _, said = chosen(store, *SLOW, "partition.max_ne_loss=100", *module, "hardware.ddr_gib=0.5")
    assert towers.is_flat and towers.choice.why.startswith("of 3 faster candidates, none fits its hosts")
    verdicts = {each.verdict for each in towers.choice.candidates[1:]}
    assert verdicts == {"does not fit its hosts with its module"} and towers.choice.source == ""
    assert "the tables do not fit" in said and "trying" not in said


def test_towers_whose_hosts_cannot_be_planned_are_on_record_with_the_reason(store):
    """A table that may only spread over all hosts has no place in a tower."""
    types = ["plan.sharding_types=[table_wise,table_row_wise]", "+plan.tables.C1.avoid=[table_wise]"]
    towers, _, said = chosen(store, *SLOW, "hardware.ranks_per_host=2", *types)
    (verdict,) = {each.verdict for each in towers.choice.candidates[1:]}
    assert towers.is_flat and len(towers.choice.candidates) == 7 and "C1" in verdict and "trying" not in said


def test_one_host_chooses_flat_at_once_and_trains_it(store, tmp_path, capsys):
    stages = "[ingest,plan,partition,train,evaluate,publish]"
    more = [f"stages={stages}", f"launch.inline={stages}", "gate.force='a test of towers'", "publish.model=auto"]
    settings = [*SMALL, *AUTO, *more, "partition.strategy=coherent", f"store={store.url}"]
    assert main(["run", *settings]) == 0, capsys.readouterr().err
    result = store.read_json("runs/r/result.json")
    assert "towers" not in result and result["gate"]["verdict"] == "PASS"
    towers = Towers.from_json(store.read_json(f"{result['stages']['partition']['artifact']}/towers.json"))
    assert towers.is_flat and len(towers.choice.candidates) == 1 and "on one host" in towers.choice.why
    with store.open("runs/r/report.html") as source:
        page = source.read().decode()
    assert "Flat or towers" in page and towers.choice.why in page


def test_settings_of_the_group_limit_the_choice(store):
    given = ["partition.module=low_rank", "partition.dim=3", "partition.rank=5", "partition.towers=4"]
    towers, _, _ = chosen(store, *SLOW, "partition.max_ne_loss=100", *given)
    assert [each.label for each in towers.choice.candidates] == ["flat", "4 towers, low_rank layers=1 rank=5, width 3"]
    assert len(towers.towers) == 4 and towers.module.rank == 5


def test_numbers_of_towers_fit_the_hosts():
    partition = compose([*SMALL, *AUTO]).partition
    assert [tower_counts(partition, hosts) for hosts in (2, 3, 4, 8)] == [[2], [3], [4, 2], [8, 4]]
    assert tower_counts(dataclasses.replace(partition, pins={"C1": 3}), 4) == [4], "a pin names a tower of four"


def test_auto_is_refused_for_a_flat_model():
    with pytest.raises(ConfigError, match=r"partition\.auto is true, but partition\.name is flat") as caught:
        compose([*SMALL, "partition.auto=true"])
    assert caught.value.hint == "partition=dmt, or partition.auto=false"


def test_a_plan_that_one_machine_cannot_train_flat_is_refused_before_anything_runs(tmp_path, capsys):
    types = "plan.sharding_types=[table_wise,table_row_wise]"
    assert main(["run", *SMALL, *SLOW, "partition=dmt", types, f"store={tmp_path}", *AUTO]) == 2
    assert "plan asks for table_row_wise" in capsys.readouterr().err and not (tmp_path / "datasets").exists()


def test_the_choice_is_in_the_keys_and_without_one_nothing_new_is(store):
    # What limits the choice is in no key where nothing is chosen.
    plain = key_of(store, "partition=dmt", "partition.towers=2")
    assert key_of(store, "partition=dmt", "partition.towers=2", "partition.max_ne_loss=7") == plain
    auto = key_of(store, *AUTO, "partition.towers=2")
    for override in (
        "partition.max_ne_loss=7",
        "seed=3",
        "partition.probe_steps=7",
        "partition.rank=5",
        "train.lr=0.3",
    ):
        other = key_of(store, *AUTO, "partition.towers=2", override)
        assert plain["partition"] != auto["partition"] != other["partition"], override
        assert auto["train"] != other["train"]
    link = key_of(store, *AUTO, "partition.towers=2", "hardware.inter_host_gb_per_s=0.5")
    assert link["partition"] != auto["partition"], "the choice rests on the predicted step"


def test_pass_through_towers_lose_nothing_on_the_rows_that_nothing_trained_on(store):
    """The flat model in another layout: equal losses show that both train and score the same batches."""
    settings, losses = config(store, "partition=dmt", "partition.towers=2"), []
    made = {
        step.name: store.find(step.path) or run_stage(step, settings, store, StageIO())
        for step in steps(settings, store)[:1]
    }
    training = select_training_settings(settings)
    length = trial_length(training, 3200)
    assert length == TrialLength(6, 3, 256)
    features = [f"C{number}" for number in range(1, 27)]
    for assigned in (None, [features[::2], features[1::2]]):
        towers = None if assigned is None else towers_of(settings.partition, 8, 2, assigned, features)
        losses.append(run_trial(training, store, made["ingest"], towers, length))
    change, error = ne_change(*losses)
    assert len(losses[0].losses) == 3 * 256
    assert abs(change) < 1e-3 and error < 1e-3


def test_the_change_of_ne_is_paired_by_row_and_weighted():
    random = np.random.default_rng(1)
    flat = random.uniform(0.2, 0.8, 20_000)
    weights = np.ones(20_000)
    change, error = ne_change(HeldOutLosses(flat, weights), HeldOutLosses(1.01 * flat, weights))
    assert change == pytest.approx(1.0) and error == pytest.approx(0.0, abs=1e-9), "each row is 1 % worse"
    other = flat + random.normal(0.0, 0.1, 20_000)
    change, error = ne_change(HeldOutLosses(flat, weights), HeldOutLosses(other, weights))
    assert error == pytest.approx(100 * 0.1 / 0.5 / 20_000**0.5, rel=0.05)
    # Rows of weight 0 are not there.
    weights[10_000:] = 0.0
    half = ne_change(HeldOutLosses(flat[:10_000], weights[:10_000]), HeldOutLosses(other[:10_000], weights[:10_000]))
    assert ne_change(HeldOutLosses(flat, weights), HeldOutLosses(other, weights)) == pytest.approx(half)


def test_trials_end_within_an_epoch(store):
    settings = select_training_settings(config(store, *AUTO, "partition.probe_steps=300"))
    assert trial_length(settings, 3200) == TrialLength(9, 3, 256)
    assert trial_length(settings, 256 * 1000) == TrialLength(300, 64, 256)
    assert trial_length(settings, 700).held == 0, "too few rows to hold some out"


def run_on_two_hosts(store, *overrides):
    more = ["launch.inline=[ingest,plan,partition]", "train.log_every_steps=2", f"store={store}"]
    done = nightjar("run", *SMALL, *AUTO, "hardware.hosts=2", "hardware.ranks_per_host=1", *more, *overrides)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((store / "runs/r/result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("first", ["towers", "flat"])
def test_two_hosts_train_what_was_chosen_and_keep_it_when_other_hardware_would_choose_otherwise(tmp_path, first):
    links = {
        "towers": ["hardware.inter_host_gb_per_s=0.001"],
        "flat": ["hardware.inter_host_gb_per_s=1000", "hardware.inter_host_latency_us=0"],
    }
    limit = "partition.max_ne_loss=100"
    _, result = run_on_two_hosts(tmp_path, *links.pop(first), limit, "train.max_steps=4")
    assert ("towers" in result) == (first == "towers")
    sent = result["train"]["bytes_per_sample"]["inter_host"]
    assert (sent < 300) == (first == "towers"), "26 ids with lengths, and vectors of width 1 or 8"

    (other,) = links.values()
    publish = ["stages=[ingest,plan,partition,train,evaluate,publish]", "gate.force='a test'", "publish.model=m"]
    said, result = run_on_two_hosts(tmp_path, *other, limit, "train.max_steps=8", *publish)
    assert "resumed" in said or "step-00000004" in said
    sent = result["train"]["bytes_per_sample"]["inter_host"]
    assert (sent < 300) == (first == "towers"), "a training keeps its model"
    assert 0.3 < result["eval"]["auc"] < 1 and result["gate"]["verdict"] == "PASS"
