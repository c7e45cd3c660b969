"""Keys: what a stage's artifact depends on changes them, nothing else does; and the paths they lead to."""

from pathlib import Path

import pytest

from pipeline.config.compose import compose, from_yaml
from pipeline.core.errors import ArtifactError, DataError
from pipeline.launch.run_records import read_steps
from pipeline.publishing import promotion, versions
from pipeline.records.runs import Step
from pipeline.specs import STAGES, default_stages
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import prepare, steps
from pipeline.store import Store
from tests.keys import INPUTS


def keys(*overrides: str) -> dict[str, str]:
    return {step.name: step.key for step in steps(compose(["run=x", *overrides]), Store("memory://keys"))}


BASE = keys()
DEFAULT_STAGES = tuple(default_stages())
# override -> the stages whose keys it changes
CHANGES = {
    "data.synthetic.rows=77": DEFAULT_STAGES,
    "ingest.compression=zstd": DEFAULT_STAGES,
    "data.checks.leak=warn": DEFAULT_STAGES,
    "data.checks.hold.psi=1": DEFAULT_STAGES,
    "data.max_quarantine_share=0.5": DEFAULT_STAGES,
    "data.watermark.min_rows=7": DEFAULT_STAGES,
    "seed=1": DEFAULT_STAGES,
    "plan.ddr_reserve=0.2": ("plan", "partition", "train", "evaluate"),
    "hardware.ranks_per_host=2": ("plan", "partition", "train", "evaluate"),
    "model.embedding_dim=32": ("plan", "partition", "train", "evaluate"),
    "train.global_batch=512": ("plan", "partition", "train", "evaluate"),
    "model.top_mlp=[8]": ("plan", "partition", "train", "evaluate"),
    "model.bottom_mlp=[8]": ("plan", "partition", "train", "evaluate"),
    "train.prefetch_batches=7": ("plan", "partition", "train", "evaluate"),
    "train.shuffle_window_groups=3": ("plan", "partition", "train", "evaluate"),
    "train.lr=0.5": ("train", "evaluate"),
    "train.epochs=2": ("train", "evaluate"),
    "train.max_steps=2": ("train", "evaluate"),
    "checkpoint.final_quantise='8'": ("train", "evaluate"),
    "checkpoint.state=bf16": ("train", "evaluate"),
    "evaluate.global_batch=77": ("evaluate",),
    "partition=dmt": ("partition", "train", "evaluate"),
    "partition.exchange=bf16": ("train", "evaluate"),
    "run=y": (),
    "stages=[plan]": (),
}
# Which change no key, alone or together.
WITHOUT_EFFECT = [
    "train.guard.collapse=false",
    "train.guard.window_steps=7",
    "train.threads_per_rank=1",
    "train.pipeline=base",
    "train.compile=true",
    "hardware.ssd_paths=[/tmp]",
    "hardware.cache_path=/tmp",
    "ingest.block_mib=64",
    "train.log_every_steps=3",
    "launch.attempts=3",
    "launch.inline=[]",
    "checkpoint.every_steps=5",
    "debug.anomaly=true",
    "store=elsewhere",
    "force=true",
]


@pytest.mark.parametrize(("override", "changed"), CHANGES.items(), ids=list(CHANGES))
def test_a_setting_changes_the_keys_of_what_depends_on_it_and_no_others(override: str, changed: tuple) -> None:
    now = keys(override)
    assert {name for name in DEFAULT_STAGES if now[name] != BASE[name]} == set(changed)


def test_settings_of_how_and_where_a_run_works_change_no_key() -> None:
    assert keys(*WITHOUT_EFFECT) == BASE


@pytest.mark.slow
@pytest.mark.parametrize("override", WITHOUT_EFFECT)
def test_each_of_them_changes_no_key_alone(override: str) -> None:
    assert keys(override) == BASE


def test_publishing_is_among_the_steps_only_where_it_is_to_run() -> None:
    assert set(BASE) == set(DEFAULT_STAGES) and "publish" not in DEFAULT_STAGES


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("train.lr=0.5", True),
        ("gate.max_psi=0.3", True),
        ("gate.force='we know why'", True),
        ("publish.model=other", True),
        ("publish.quantise='4'", True),
        ("publish.cache_mib=1", False),
        ("force=true", False),
    ],
)
def test_what_the_key_of_publishing_covers(override: str, changes: bool) -> None:
    every = f"stages=[{','.join(STAGES.names())}]"
    assert (keys(every, override)["publish"] != keys(every)["publish"]) is changes


def test_the_key_of_publishing_covers_the_incumbent_but_not_the_version_this_training_became(tmp_path: Path) -> None:
    store, every = Store(str(tmp_path)), ["run=x", f"stages=[{','.join(STAGES.names())}]"]

    def made() -> dict[str, Step]:
        return {step.name: step for step in steps(compose(every), store)}

    def serve(name: str, train: str, incumbent: str | None) -> None:
        path = versions.version_path("synthetic", name)
        with store.draft(path, kind="model", key=name, config={}, inputs={"train": train}) as draft:
            draft.commit({"incumbent": incumbent, "verdict": "PASS"})
        promotion.promote(store, "synthetic", name, by="publish")

    first = made()
    serve("v00001-aaaaaaaa", "another training", None)
    second = made()
    assert second["publish"].config["incumbent"] == "v00001-aaaaaaaa"
    assert second["publish"].key != first["publish"].key
    serve("v00002-bbbbbbbb", second["train"].key, "v00001-aaaaaaaa")
    assert made()["publish"].key == second["publish"].key


def test_the_same_file_elsewhere_is_the_same_data_and_a_changed_one_is_not(tmp_path: Path) -> None:
    def ingest_key(path: Path, *overrides: str) -> str:
        data = ["data=csv", "data.name=d", "+data.sparse.a={}", f"data.path={path}"]
        return keys(*data, *overrides)["ingest"]

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "log.csv").write_text("label,a\n1,x\n")
    first = ingest_key(tmp_path / "one" / "log.csv")
    (tmp_path / "one").rename(tmp_path / "two")
    assert ingest_key(tmp_path / "two" / "log.csv") == first
    assert ingest_key(tmp_path / "two" / "log.csv", "seed=5") == first
    assert ingest_key(tmp_path / "two" / "log.csv", "data.synthetic.rows=5") == first
    (tmp_path / "two" / "log.csv").write_text("label,a\n1,xx\n")
    assert ingest_key(tmp_path / "two" / "log.csv") != first


def test_missing_raw_data_is_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing exists at"):
        keys("data=csv", "data.name=d", "+data.sparse.a={}", f"data.path={tmp_path}/none.csv")


def test_paths_are_those_of_the_architecture() -> None:
    config = compose(["run=x", f"stages=[{','.join(STAGES.names())}]"])
    found = {step.name: step for step in steps(config, Store("memory://paths"))}
    assert found["ingest"].path == f"datasets/synthetic/{BASE['ingest']}"
    assert found["plan"].path == f"plans/{BASE['plan']}"
    assert found["partition"].path == f"towers/{BASE['partition']}"
    assert found["train"].path == f"runs/x/train/{BASE['train']}"
    assert found["evaluate"].path == f"runs/x/evaluate/{BASE['evaluate']}"
    assert found["publish"].path == f"runs/x/publish/{found['publish'].key}"
    assert [path.rsplit("/", 1)[0] for path in found["train"].scratch] == ["runs/x/checkpoints"]
    assert {name: tuple(step.inputs) for name, step in found.items()} == INPUTS


# Which leave the directory of a training's checkpoints, alone or together.
SAME_TRAINING = [
    "hardware=laptop2",
    "plan.sharding_types=[row_wise]",
    "train.log_every_steps=3",
    "train.guard.collapse=false",
    "train.guard.window_steps=7",
    "train.threads_per_rank=1",
    "train.pipeline=base",
    "train.compile=true",
    "train.prefetch_batches=7",
    "train.epochs=2",
    "train.max_steps=2",
    "checkpoint.final_quantise='8'",
    "checkpoint.state=bf16",
    "checkpoint.every_steps=5",
]


def directory(*overrides: str) -> tuple[str, ...]:
    made = steps(compose(["run=x", *overrides]), Store("memory://keys"))
    return next(step.scratch for step in made if step.name == "train")


@pytest.mark.slow
@pytest.mark.parametrize("override", SAME_TRAINING)
def test_each_of_them_leaves_the_checkpoints_where_they_are_alone(override: str) -> None:
    assert directory(override) == directory()


def test_checkpoints_belong_to_the_training_not_to_its_hardware() -> None:
    base = directory()
    assert directory(*SAME_TRAINING) == base
    for other in (
        "train.lr=0.5",
        "seed=1",
        "model.embedding_dim=8",
        "model.top_mlp=[8]",
        "train.global_batch=512",
        "data.synthetic.rows=7",
        "partition=dmt",
        "partition.exchange=bf16",
        "train.shuffle_window_groups=3",
        "train.schedule=cosine",
    ):
        assert directory(other) != base, other


@pytest.mark.parametrize("mapping", ["data.sparse_defaults.mapping=learned", "data.sparse.a.mapping=learned"])
def test_what_the_mapping_learned_puts_together_depends_on_the_seed(tmp_path: Path, mapping: str) -> None:
    (tmp_path / "log.csv").write_text("label,a\n1,x\n")
    data = ["data=csv", "data.name=d", "+data.sparse.a={}", f"data.path={tmp_path}/log.csv"]
    assert keys(*data, mapping, "seed=5")["ingest"] != keys(*data, mapping)["ingest"]
    assert keys(*data, "seed=5")["ingest"] == keys(*data)["ingest"]


def test_prepare_writes_what_ranks_read(tmp_path: Path) -> None:
    config, store = compose(["run=x", "train.lr=0.5"]), Store(str(tmp_path))
    made = prepare(config, store)
    assert read_steps(store, "x") == made
    assert from_yaml((tmp_path / "runs/x/config.yaml").read_text()) == config


def test_steps_that_do_not_parse_are_an_artifact_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(ArtifactError):
        read_steps(store, "x")
    store.write_json("runs/x/steps.json", {"steps": [{"nonsense": 1}]})
    with pytest.raises(ArtifactError, match="does not hold a run's steps"):
        read_steps(store, "x")


def test_a_flat_partition_is_one_tower_with_every_feature(tmp_path: Path) -> None:
    config, store = compose(["run=x", "data.synthetic.rows=500"]), Store(str(tmp_path))
    closed: list[bool] = []
    io = StageIO(close=lambda: closed.append(True))
    made: dict[str, Step] = {step.name: step for step in prepare(config, store)}
    for name in ("ingest", "plan", "partition"):
        artifact = run_stage(made[name], config, store, io)
        assert artifact is not None
        assert artifact.key == made[name].key
        store.verify(artifact)
    towers = store.read_json(f"{made['partition'].path}/towers.json")
    assert towers["version"] == 2 and towers["partition"] == "flat"
    assert towers["towers"] == [{"features": list(config.data.sparse), "hosts": [0]}]
    assert len(closed) == 3
