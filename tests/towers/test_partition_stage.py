"""``nightjar partition``: the stage in one process, what it leaves in the store, what it says, when it runs again."""

import re

import pytest

from pipeline.cli import main
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.planning.problem import RUNTIME_LINKED
from pipeline.records import Plan, Towers
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.towers.assignment import check_partition, modules_costs
from tests.logged import listen

SMALL = (
    "data=synthetic",
    "data.synthetic.rows=4000",
    "data.synthetic.days=1",
    "data.synthetic.ids_per_feature=20",
    "train.global_batch=256",
    "train.threads_per_rank=1",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
)
DMT = ("partition=dmt", "partition.towers=2", "partition.probe_steps=4", "run=r")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(str(tmp_path_factory.mktemp("store")))


def config(store: Store, *overrides: str):
    return compose([*SMALL, *DMT, *overrides, f"store={store.url}"])


def run(store: Store, *overrides: str, last: str = "partition"):
    """(artifact, towers, lines) of the stage after what it needs."""
    settings, lines = config(store, *overrides), listen()
    io = StageIO()
    for step in steps(settings, store):
        artifact = store.find(step.path)
        artifact = artifact or run_stage(step, settings, store, io)
        if step.name == last:
            break
    return artifact, Towers.from_json(store.read_json(f"{artifact.path}/towers.json")), "\n".join(lines)


def test_a_probe_gives_towers_with_matrix_places_loads_and_a_page(tmp_path):
    store = Store(str(tmp_path))
    artifact, towers, said = run(store)
    evidence = towers.evidence
    features = [f"C{i + 1}" for i in range(26)]
    assert sorted(name for tower in towers.towers for name in tower.features) == sorted(features)
    assert list(evidence.features) == features
    assert [len(row) for row in evidence.similarity] == [26] * 26
    assert [len(point) for point in evidence.placement] == [2] * 26
    assert set(evidence.loads) == {"ms", "bytes"} and min(evidence.loads["bytes"]) > 0
    assert evidence.source == "a probe of 4 steps of 256 rows"
    assert "comparing features by a probe of 4 steps of 256 rows" in said
    assert re.search(r"coherent: features that interact share a tower; similarity 0\.\d\d within towers", said)
    assert "tower 1 on host 0: " in said and "% of the bytes" in said
    with store.open(f"{artifact.path}/towers.html") as source:
        page = source.read().decode()
    assert page.count('<svg class="plot"') == 2 and "http" not in page.replace("http-equiv", "")
    assert "similarity 0." in page


def test_the_same_settings_give_the_same_bytes(store, tmp_path):
    first, _, _ = run(store)
    other = Store(str(tmp_path))
    again, _, _ = run(other)
    assert again.key == first.key
    assert other.read_json(f"{again.path}/towers.json") == store.read_json(f"{first.path}/towers.json")


def test_strided_compares_nothing_and_its_key_knows_no_probe(store):
    artifact, towers, said = run(store, "partition.strategy=strided")
    assert towers.towers[0].features[:2] == ("C1", "C3")
    assert towers.evidence.similarity == [] and "comparing" not in said
    assert run(store, "partition.strategy=strided", "partition.probe_steps=9")[0].key == artifact.key
    with store.open(f"{artifact.path}/towers.html") as source:
        assert b"Similarity of features" not in source.read()


def test_what_the_probe_learns_from_is_in_the_key(store):
    key = {step.name: step.key for step in steps(config(store), store)}["partition"]
    learning = ("train.sparse_lr=0.2", "train.embedding_l2=0.1", "train.label_smoothing=0.1")
    for override in ("seed=3", *learning, "partition.probe_steps=5", "partition.strategy=diverse"):
        assert {step.name: step.key for step in steps(config(store, override), store)}["partition"] != key
    other = steps(config(store, "train.epochs=3", "partition.exchange=fp16"), store)
    assert {step.name: step.key for step in other}["partition"] == key


def test_a_flat_checkpoint_is_a_probe_and_its_tables_may_be_cut(store):
    flat = ["partition=flat", "run=flat"]
    settings = compose([*SMALL, *flat, f"store={store.url}"])
    io = StageIO()
    for step in steps(settings, store)[:4]:
        if store.find(step.path) is None:
            run_stage(step, settings, store, io)
    _, towers, _ = run(store, "partition.probe=flat")
    assert re.fullmatch(r"the tables of runs/flat/checkpoints/.*/step-\d{8}", towers.evidence.source)
    _, cut, _ = run(store, "partition.probe=flat", "partition.probe_rows=8")
    assert cut.evidence.similarity != towers.evidence.similarity
    with pytest.raises(ConfigError, match=r"dataset was .*checkpoint\.allow=\[dataset\]|must be allowed: dataset"):
        run(store, "partition.probe=flat", "seed=77")


def test_a_probe_that_is_not_there_is_named(store):
    with pytest.raises(ArtifactError, match="no checkpoint 'nowhere'"):
        steps(config(store, "partition.probe=nowhere"), store)


def test_the_refined_plan_counts_what_crosses_between_hosts_and_the_whole_dense_part(store):
    two = [
        "partition.strategy=strided",
        "hardware.hosts=2",
        "hardware.ranks_per_host=1",
        "model.embedding_dim=16",
        "launch.inline=[ingest,plan,partition]",
    ]
    slow = "hardware.inter_host_gb_per_s=0.001"
    plans = {}
    for name, overrides in {
        "fast": [*two, "hardware.inter_host_gb_per_s=1000"],
        "slow": [*two, slow],
        "small": [*two, slow, "partition.module=dlrm", "partition.c=0", "partition.p=1"],
    }.items():
        artifact, _, _ = run(store, *overrides, "hardware.inter_host_latency_us=0", "plan.sharding_types=[table_wise]")
        plans[name] = Plan.from_json(store.read_json(f"{artifact.path}/plan.json")).phases[0]
    samples = 128  # of a rank; at 1,000 bytes a ms
    assert plans["fast"]["output_exchange"] == pytest.approx(0, abs=0.01)
    assert plans["slow"]["output_exchange"] == pytest.approx(samples * 13 * 16 * 4 / 1000, rel=1e-3)
    assert plans["slow"]["gradient_exchange"] == pytest.approx(samples * 13 * 16 * 4 / 1000, rel=1e-3)
    assert plans["slow"]["input_exchange"] == pytest.approx(samples * 13 * 2 * 4 / 1000, rel=0.01)
    assert plans["small"]["output_exchange"] == pytest.approx(samples * 16 * 4 / 1000, rel=1e-3)
    assert plans["small"]["dense"] < plans["slow"]["dense"], "27 vectors against 3"


def test_the_refined_plan_charges_what_a_module_multiplies(store):
    """26 features of width 8 in two towers on one host of one rank: all of the batch goes through both modules."""
    dense = {}
    for name in ("pass_through", "dcn", "low_rank"):
        module = [f"partition.module={name}", "partition.rank=4", "partition.dim=8"]
        fixed = ["partition.strategy=strided", "hardware.dense_gflop_per_s=1", "hardware.dense_gb_per_s=1000000"]
        artifact, _, _ = run(store, *fixed, *module)
        dense[name] = Plan.from_json(store.read_json(f"{artifact.path}/plan.json")).phases[0]["dense"]
    whole, low = 2 * (13 * 8) ** 2, 13 * 8 * 11 + 13 * 11 * 4 + 4**2 + 4 * 13 * 8  # a cross layer and a projection
    for name, products in (("dcn", whole), ("low_rank", low)):
        charged = 256 * 2 * 6 * products / 1e6  # at a million products a ms
        assert dense[name] - dense["pass_through"] == pytest.approx(charged, rel=1e-2), name


def test_the_refined_plan_reserves_what_a_module_keeps(store):
    """Each of two hosts runs its tower's module on the samples of both, and holds the other's weights."""
    found = {}
    for name in ("pass_through", "dcn_low_rank"):
        two = ["hardware.hosts=2", "launch.inline=[ingest,plan,partition]", "partition.strategy=strided"]
        artifact, towers, _ = run(store, *two, "partition.dim=8", f"partition.module={name}", "partition.rank=4")
        found[name] = Plan.from_json(store.read_json(f"{artifact.path}/plan.json")).reserved[0]
    costs = modules_costs(towers.module, [13], 8)
    assert costs.parameters == 3 * 104 * 4 + 104 + 8 * 9 + 4 + 104 * 5
    added = {purpose: found["dcn_low_rank"][purpose] - size for purpose, size in found["pass_through"].items()}
    # A rank trains its own module, with 5.5 values for each parameter in Adam, and keeps the values of the other.
    assert added["dense"] == 4 * 5.5 * costs.parameters + 4 * costs.parameters
    assert added["activations"] == 2 * 4 * 256 * costs.activations
    assert {purpose for purpose, size in added.items() if size} == {"dense", "activations"}


def test_the_refined_plan_reserves_what_hosts_exchange(store):
    fixed = ["partition.strategy=strided", "launch.inline=[ingest,plan,partition]"]
    reserved = {}
    for hosts in (1, 2):
        artifact, _, _ = run(store, *fixed, f"hardware.hosts={hosts}")
        reserved[hosts] = Plan.from_json(store.read_json(f"{artifact.path}/plan.json")).reserved[0]
    assert reserved[2]["runtime"] - reserved[1]["runtime"] == RUNTIME_LINKED
    # Half of the features for all 256 samples, and their vectors on the way; then all vectors of a rank's own samples.
    pooled, vectors = 4 * 256 * 13 * 8, 4 * 128 * 26 * 8
    assert reserved[1]["communication"] == 2 * 2 * pooled
    assert reserved[2]["communication"] == 2 * pooled + 2 * (pooled + vectors)


def test_a_setting_that_the_module_does_not_read_is_logged_by_each_run_with_modules_that_do(store, capsys):
    module = ["partition.strategy=strided", "partition.module=dcn_low_rank", "partition.p=4"]
    line = "partition.p is 4, but partition.module is dcn_low_rank, which does not read it; expected 0, or one of the "
    for outcome in ("done in", "skipped"):
        assert main(["run", *SMALL, *DMT, *module, "stages=[ingest,plan,partition]", f"store={store.url}"]) == 0
        said = capsys.readouterr().out
        assert re.search(rf"partition +{outcome}", said)
        assert line + "modules that do: dlrm" in said and said.count("does not read it") == 1


def test_a_rank_is_in_the_key_where_there_is_one(store):
    def key(*overrides):
        return {step.name: step.key for step in steps(config(store, *overrides), store)}

    assert key("partition.module=dcn", "partition.rank=8") == key("partition.module=dcn")
    low = "partition.module=low_rank"
    for stage in ("partition", "train"):
        assert key(low, "partition.rank=8")[stage] != key(low)[stage] == key(low, "partition.rank=64")[stage]


def test_a_module_of_low_rank_sends_a_quarter_of_the_width_unless_told(store):
    for dim, expected in (("0", 2), ("5", 5)):
        _, towers, _ = run(store, "partition.strategy=strided", "partition.module=low_rank", f"partition.dim={dim}")
        assert (towers.module.dim, towers.module.rank) == (expected, 64)


def test_pins_and_groups_are_kept_by_the_stage(store):
    _, towers, said = run(store, "+partition.pins.C5=1", "partition.groups=[[C1,C2,C3]]")
    assert "C5" in towers.towers[1].features
    assert any({"C1", "C2", "C3"} <= set(tower.features) for tower in towers.towers)
    assert "C5 pinned to tower 1" in said and "C2 stays with C1, C3" in said


def test_all_six_stages_go_from_rows_to_a_version_with_towers(store, capsys):
    stages = "[ingest,plan,partition,train,evaluate,publish]"
    more = [f"stages={stages}", f"launch.inline={stages}", "gate.force='a test of towers'", "publish.model=towers"]
    settings = [*SMALL, *DMT, *more, "partition.strategy=strided", "partition.module=dlrm", f"store={store.url}"]
    assert main(["run", *settings]) == 0, capsys.readouterr().err
    result = store.read_json("runs/r/result.json")
    assert result["towers"] == {
        "towers": 2,
        "hosts": 1,
        "features": [13, 13],
        "module": "dlrm",
        "strategy": "strided",
    }
    assert result["gate"]["verdict"] == "PASS" and 0.5 < result["eval"]["auc"] < 1
    assert {"dense.pt2", "serving.json"} <= set(store.get(result["model"]["uri"], "publish").files)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+partition.pins.C55=0"], "partition.pins names 'C55', which is not a feature; the nearest is 'C5'"),
        (["partition.towers=27"], "27 towers for 26 features"),
        (
            ["partition.groups=[[C1,C2]]", "+partition.pins.C1=0", "+partition.pins.C2=1"],
            "keeps C1, C2 together, but partition.pins sends C1 to 0, C2 to 1",
        ),
        (["partition.strategy=sorted"], "partition.strategy is 'sorted', expected one of: strided, coherent, diverse"),
        (["partition.imbalance=-1"], "partition.imbalance is -1"),
    ],
)
def test_bad_settings_are_exit_2_before_anything_starts(store, tmp_path, capsys, overrides, message):
    assert main(["partition", *SMALL, *DMT, *overrides, f"store={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "datasets").exists()


def test_groups_and_pins_that_leave_a_tower_empty_name_what_is_free():
    settings = compose([*SMALL, *DMT, "partition.towers=3", "partition.groups=[[a,b,c]]"])
    with pytest.raises(ConfigError, match=r"towers 0, 1, 2 of 3 would get no feature: only a, b, c; d can go there"):
        check_partition(settings.partition, settings.plan, settings.hardware.hosts, ["a", "b", "c", "d"])
    pinned = compose([*SMALL, *DMT, "+partition.pins.a=0", "+partition.pins.b=0"])
    with pytest.raises(ConfigError, match="towers 1 of 2 would get no feature: every feature is pinned elsewhere"):
        check_partition(pinned.partition, pinned.plan, pinned.hardware.hosts, ["a", "b"])
