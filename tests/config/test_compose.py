"""Composition: every committed YAML composes, and each mistake gets one clear complaint."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.compose import compose, conf_directory, config_hash, from_yaml, sweep, to_yaml
from pipeline.config.paths import field_type, find_place, places
from pipeline.core.errors import ConfigError

CONF = conf_directory()
ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, list[str]] = {}
for file in sorted(CONF.glob("*/*.yaml")):
    if file.parent.name != "experiment":
        OPTIONS.setdefault(file.parent.name, []).append(file.stem)
NEEDS_PATH = ["data.path=somewhere"]
NEEDS_MORE = {
    "kubernetes": [
        f"launch.pods.image=registry/nightjar@sha256:{'0' * 64}",
        "store=s3://bucket/nightjar",
        "data.path=s3://bucket/logs",
    ],
    "hosts": ["stages=[ingest]"],  # meet for one stage
    "iceberg": ["data.path=lake.ads.clicks"],
    "bigquery": ["data.path=shop.ads.clicks"],
    "kafka": ["data.options={bootstrap.servers: 'broker:9092'}"],
}


@pytest.mark.parametrize("place", range(max(map(len, OPTIONS.values()))))
def test_every_option_of_every_group_composes(place: int) -> None:
    """One composition has an option of each group: the one at ``place`` among those of its group."""
    chosen = {group: options[place] for group, options in OPTIONS.items() if place < len(options)}
    needed = NEEDS_PATH + [line for option in chosen.values() for line in NEEDS_MORE.get(option, [])]
    extra = ["train.global_batch=65536", "data.sparse_defaults.rows=100", "+data.sparse.extra={}"]
    config = compose([*(f"{group}={option}" for group, option in chosen.items()), *needed, *extra])
    assert all(dataclasses.is_dataclass(getattr(config, group)) for group in chosen)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), [(group, each) for group, options in OPTIONS.items() for each in options])
def test_every_option_composes_alone(group: str, option: str) -> None:
    extra = ["data.sparse_defaults.rows=100", "+data.sparse.extra={}", *NEEDS_MORE.get(option, [])]
    config = compose([f"{group}={option}", *NEEDS_PATH, "train.global_batch=65536", *extra])
    assert dataclasses.is_dataclass(getattr(config, group))


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONF / "experiment").glob("*.yaml"))])
def test_every_experiment_composes_and_says_the_command_that_runs_it(name: str) -> None:
    config = compose([f"experiment={name}", *NEEDS_PATH])
    assert config.run
    assert f"nightjar run experiment={name}" in (CONF / "experiment" / f"{name}.yaml").read_text()


def test_no_yaml_instantiates_or_reads_the_environment() -> None:
    files = sorted(CONF.rglob("*.yaml"))
    assert len(files) > 50
    assert [str(path) for path in files if re.search("_target_|oc\\.env", path.read_text())] == []


MISTAKES = [
    ("train.lrr=1", "train.lrr is unknown; did you mean train.lr?", "train.lr=1"),
    ("modell=dlrm", "modell is unknown; did you mean model?", "model=dlrm"),
    ("train.seed=7", "train.seed is unknown; did you mean seed?", "seed=7"),
    ("data.rows=7", "data.rows is unknown; did you mean data.synthetic.rows?", "data.synthetic.rows=7"),
    (
        "data.label=click",
        "data.label is 'click', expected one of its settings: data.label.c",
        "data.label.column=click",
    ),
    ("data.target=click", "data.target is unknown; did you mean data.label.column?", "data.label.column=click"),
    ("model.zzz=[64]", "model.zzz is unknown", "nightjar explain model lists its settings"),
    ("data.path=logs/{day}/*.csv", "cannot be read", "quote the value: 'data.path=\"logs/{day}/*.csv\"'"),
    ("train.lr = 1", "cannot be read", "leave out the blanks around =: train.lr=1"),
    ("lr=1", "lr is unknown; did you mean train.lr?", "train.lr=1"),
    ("+foo.bar=1", "foo.bar is unknown", ""),
    ("seed=-1", "seed is -1, expected between 0", "seed=0"),
    ("train.clip.dense_norm=0", "train.clip.dense_norm is 0", "train.clip.dense_norm=1e-12"),
    ("train.clip.table_value=-1", "train.clip.table_value is -1", "train.clip.table_value=1e-12"),
    ("train.lr=nan", "train.lr is nan, expected a finite number", "train.lr=0"),
    ("train.max_steps=0", "train.max_steps is 0, expected at least 1", "train.max_steps=1"),
    ("train.guard.window_steps=0", "train.guard.window_steps is 0, expected at least 1", "window_steps=1"),
    ("train.threads_per_rank=0", "train.threads_per_rank is 0, expected at least 1", "threads_per_rank=1"),
    ("data.synthetic.pairs=100000", "data.synthetic.pairs is 100000, expected between 0 and 325", "pairs=325"),
    ("data.sparse.C1.min_count=-1", "data.sparse.C1.min_count is -1, expected at least 1", "C1.min_count=1"),
    ("data.name=../x", "data.name is '../x', expected at most 100 letters", "data.name=x"),
    ("store=", "store is empty", "store=./store"),
    ("stages=[]", "stages is empty", "stages=[ingest"),
    ("data.split.test_share=0", "data.split.test_share is 0, but stages names evaluate", "data.split.test_share=0.2"),
    ("model=dlrn", "model=dlrn is unknown; did you mean model=dlrm?", "model=dlrm"),
    ("experiment=null", "experiment=null chooses nothing, expected one of: adult, ", "experiment=adult, or"),
    ("hardware=zzzzz", "hardware=zzzzz is unknown, expected one of: ", "hardware="),
    ("train.lr=abc", "train.lr is 'abc', expected a number", "train.lr=<a number>"),
    ("seed=1.5", "seed is '1.5', expected a whole number", "seed="),
    (
        "partition.groups=[C1,C2]",
        "partition.groups is '[C1,C2]', expected a list of lists [[a,b],[c]] of strings",
        "partition.groups=[[C1,C2]]",
    ),
    ("launch.inline=train", "launch.inline is 'train', expected a list [a,b] of strings", "launch.inline=[train]"),
    ("model.top_mlp=[a]", "model.top_mlp is '[a]', expected a list [a,b] of whole numbers", "model.top_mlp=<a list"),
    ("model.top_mlp=[[8],[4]]", "model.top_mlp has [8], expected a list [a,b] of plain", "model.top_mlp=[8,4]"),
    ("gate.slices=[{C1:2}]", "gate.slices has {'C1': 2}, expected a list [a,b] of plain", "gate.slices=[C1]"),
    ("gate.slices=${run}", "gate.slices is None, expected a list [a,b]", "gate.slices=[]"),
    ("data.options=${run}", "data.options is None, expected a group of keys", "data.options={}"),
    ("launch.pods.env={A:{b:1}}", "launch.pods.env.A is {'b': 1}, expected a plain value", "launch.pods.env.A="),
    ("hardware.hosts=0", "hardware.hosts is 0, expected at least 1", "hardware.hosts=1"),
    ("train.lr=-1", "train.lr is -1, expected at least 0", "train.lr=0"),
    ("train.schedule=cosin", "train.schedule is 'cosin', expected one of: constant, linear, cosine", "train.schedule="),
    (
        "train={schedule: constant, min_lr_factor: 0.1}",
        "train.min_lr_factor is 0.1, but train.schedule=constant never",
        "train.schedule=cosine",
    ),
    (
        "train={schedule: constant, decay_ratio: 0.3}",
        "train.decay_ratio is 0.3, but train.schedule=constant never",
        "train.schedule=linear",
    ),
    ("train.global_batch=automatic", "train.global_batch is 'automatic', expected auto or a whole number", "=auto"),
    ("train.global_batch=0", "train.global_batch is 0, expected at least 1", "train.global_batch=1"),
    ("train.warmup_steps=long", "train.warmup_steps is 'long', expected auto or a whole number", "=auto"),
    (
        "train={schedule: linear, max_steps: 50, warmup_steps: 100}",
        "training ends after train.max_steps=50 steps, within its train.warmup_steps=100",
        "train.warmup_steps=auto, or train.schedule=constant",
    ),
    ("train.lr=1,2", "train.lr=1,2 has several values, expected one", "-m train.lr=1,2"),
    ("stages=[ingest,planx]", "stages names 'planx', expected some of: ingest", "stages=[ingest,plan]"),
    ("gate.slices=[nope]", "gate.slices names 'nope', expected sparse features or day", "gate.slices=[C1]"),
    (
        "evaluate.group_by=c1",
        "evaluate.group_by is 'c1', expected a categorical feature",
        "evaluate.group_by=C1",
    ),
    ("gate.force=yes", "gate.force is 'yes', expected a reason, in words, for publishing", "gate.force='"),
    ("gate.max_psi=-1", "gate.max_psi is -1, expected at least 0", "gate.max_psi=0"),
    ("gate.max_rows=0", "gate.max_rows is 0, expected at least 1", "gate.max_rows=1"),
    ("publish.model=a/b", "publish.model is 'a/b', expected at most 100 letters", "publish.model=a-b"),
    ("publish.quantise=3", "publish.quantise is '3', expected one of: 8, 4, fp16, fp32", "publish.quantise=8"),
    ("data.name=???", "data.name is not set", "data.name=<value>"),
    ("run=a/b", "run is 'a/b', expected at most 100 letters", "run=a-b"),
    ("data.dense.none_such.transform=log1p", "data.dense.none_such does not exist here yet", "+data.dense.none_such"),
    ("+data.sparse.type={}", "'type', a name that PyTorch reserves", "+data.sparse.type_id={column: type}"),
    (f"+data.sparse.{'a' * 201}={{}}", "takes 201 bytes in names of files, expected at most 200", "column: aaa"),
    ("data.sparse.C1.rowz=5", "data.sparse.C1.rowz is unknown; did you mean data.sparse.C1.rows?", "rows=5"),
    ("foo", "'foo' is not an override, expected key=value", ""),
    ("model.top_mlp=[1", "the override 'model.top_mlp=[1' cannot be read", "quote"),
    ("train.lr=${nope}", "train.lr: Interpolation key 'nope' not found", "train.lr="),
    ("data=csv", "data.", ""),
    ("+model.tables={C1: {dims: 8}}", "model.tables.C1.dims is unknown; did you mean", "model.tables.C1.dim"),
    ("+model.task_options={expert: 8}", "model.task_options.expert is unknown; did you mean", "model.task_options.exp"),
    (
        "data.sparse.C_1.rows=5",
        "C_1 does not exist here yet; did you mean data.sparse.C1?",
        "data.sparse.C1.rows=5, or",
    ),
    ("train.tasks.buy.weight=2", "train.tasks.buy does not exist here yet", "+train.tasks.buy.weight=2 adds it"),
    ("checkpoint.rename.C1=C2", "checkpoint.rename.C1 does not exist here yet", "+checkpoint.rename.C1=C2 adds it"),
    (
        "checkpoint.init_tables_only=true",
        "init_tables_only is set, but checkpoint.init_from is null",
        "init_from=<run>",
    ),
    ("checkpoint.allow=[train]", "allow is set, but checkpoint.init_from is null", "checkpoint.init_from=<run>"),
    ("checkpoint.rename={C1: C2}", "rename is set, but checkpoint.init_from is null", "checkpoint.init_from=<run>"),
]


@pytest.mark.parametrize(("override", "message", "hint"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_each_mistake_is_named_with_what_mends_it(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


def test_what_groups_rows_has_one_id_a_row() -> None:
    grouped = ["train.rank_loss={kind: listwise, group_by: C1}", "evaluate.group_by=C1"]
    assert compose([*grouped, "data.sparse.C1.mapping=hash"]).evaluate.group_by == "C1"
    for override, message in (
        ("data.sparse.C1.mapping=double_hash", "mapping double_hash gives an id 2 rows"),
        ("data.sparse.C1.holds=list", "a row has several ids of it"),
        ("data.sparse_defaults.separator='|'", "a row has several ids of it"),
    ):
        for path, each in zip(("train.rank_loss", "evaluate"), grouped, strict=True):
            with pytest.raises(ConfigError) as caught:
                compose([each, override])
            assert f"{path}.group_by is 'C1', but {message}" in caught.value.message
            assert f"{path}.group_by=null" in caught.value.hint


def test_features_can_be_added_and_taken_away_on_the_command_line() -> None:
    config = compose(["+data.dense.extra={transform: log1p}", "+data.sparse.more.rows=77", "~data.sparse.C1"])
    assert config.data.dense["extra"].transform == "log1p"
    assert config.data.sparse["more"].rows == 77
    assert "C1" not in config.data.sparse


def test_entries_of_a_group_can_be_given_as_one_dictionary() -> None:
    config = compose(["checkpoint.init_from=a", "checkpoint.rename={C1: C2}", "checkpoint.tables={C1: auto, C2: fp16}"])
    assert config.checkpoint.rename == {"C1": "C2"}
    assert config.checkpoint.tables == {"C1": "auto", "C2": "fp16"}


def test_a_users_own_directory_adds_options(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("name: mine\nformat: csv\npath: x.csv\nsparse: {a: {}}\n")
    assert compose(["data=mine"], str(tmp_path)).data.name == "mine"


def test_an_unknown_key_in_a_users_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("lrr: 1.0\n")
    with pytest.raises(ConfigError, match="train/mine.yaml: train.lrr is unknown; did you mean train.lr"):
        compose(["train=mine"], str(tmp_path))
    (tmp_path / "train" / "mine.yaml").write_text("lr: abc\n")
    with pytest.raises(ConfigError, match="train/mine.yaml: train.lr: Value 'abc'.*expected a number"):
        compose(["train=mine"], str(tmp_path))


def test_broken_yaml_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("lr: [1\n")
    with pytest.raises(ConfigError, match="train/mine.yaml, line 2, is not valid YAML: ") as caught:
        compose(["train=mine"], str(tmp_path))
    assert caught.value.hint == f"correct {tmp_path}/train/mine.yaml"


@pytest.mark.parametrize(
    ("sparse", "message", "hint"),
    [
        ("[user, ad]", "data/mine.yaml has a list where a group of keys is expected", "'sparse: {user: {}, ad: {}}'"),
        ("{user: , ad: {}}", "data/mine.yaml: data.sparse.user: .*expected a group of keys", "'user: {}' takes the"),
        ("{ad: {}, ad: {}}", "data/mine.yaml, line 2, is not valid YAML: found duplicate key ad", "correct "),
    ],
)
def test_features_that_a_file_lists_otherwise_are_told_how(
    tmp_path: Path, sparse: str, message: str, hint: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(f"defaults: [csv]\nsparse: {sparse}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        compose(["data=mine", "data.path=x.csv"], str(tmp_path))
    assert hint in caught.value.hint


def test_the_run_name_depends_on_what_is_computed_only() -> None:
    first = compose(["store=a", "force=true", "stages=[ingest]", "launch.attempts=3"])
    assert first.run == compose([]).run
    assert first.run == f"synthetic-{config_hash(first)[:8]}"
    assert first.run != compose(["train.lr=0.5"]).run
    assert compose(["run=mine"]).run == "mine"


def test_texts_of_a_recorded_configuration_mean_themselves() -> None:
    config = compose([])
    texts = ["${oc.env:HOME}", "a${seed}b", r"\${seed}", r"\\${seed}", "$seed"]
    for feature, text in zip(config.data.sparse.values(), texts, strict=False):
        feature.column = text
    config.data.path = texts[0]
    found = from_yaml(to_yaml(config)).data
    assert [feature.column for feature in found.sparse.values()][: len(texts)] == texts
    assert found.path == texts[0]


def test_the_resolved_yaml_comes_back_equal_and_is_checked() -> None:
    config = compose(["train.lr=0.5", "+data.sparse.more={separator: '|'}"])
    first = from_yaml(to_yaml(config))
    assert first == config
    first.data.missing.append("changed by whoever read it")
    assert from_yaml(to_yaml(config)) == config
    with pytest.raises(ConfigError, match="train.lrr is unknown"):
        from_yaml("train: {lrr: 1}")
    with pytest.raises(ConfigError, match="data.name is not set"):
        from_yaml("seed: 1")


def test_a_sweep_is_the_product_of_its_values_and_names_runs() -> None:
    jobs = sweep(["train.lr=0.1,0.2", "seed=range(1,3)", "run=x"])
    assert jobs == [
        ["train.lr=0.1", "seed=1", "run=x-0"],
        ["train.lr=0.1", "seed=2", "run=x-1"],
        ["train.lr=0.2", "seed=1", "run=x-2"],
        ["train.lr=0.2", "seed=2", "run=x-3"],
    ]
    assert sweep(["model=dlrm"]) == [["model=dlrm"]]
    with pytest.raises(ConfigError, match="continuous sweep"):
        sweep(["train.lr=interval(0,1)"])


def test_composition_leaves_no_files_and_no_hydra_state(tmp_path: Path) -> None:
    code = "from pipeline.config.compose import compose; compose([]); compose(['seed=3'])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert list(tmp_path.iterdir()) == []


def test_every_field_of_the_schema_is_reached_by_a_dotted_path() -> None:
    paths = [place.path for place in places()]
    assert "train.guard.window_steps" in paths and "data.sparse.*.rows" in paths
    assert all(field_type(path) is not None for path in paths)
    assert all(find_place(path).path == path for path in paths)
    assert field_type("data.sparse.anything.rows") is not None
    assert field_type("train.nope") is None


@pytest.mark.parametrize(
    ("override", "hint"),
    [("train.validate.monitor=auc", "monitor=ne"), ("train.validate.patience=null", "patience=8")],
)
def test_settings_of_validation_are_refused_without_rows_to_look_at(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="but there are no validation rows") as raised:
        compose([override])
    assert raised.value.hint == f"data.split.validation_share=0.1, or train.validate.{hint}"
    assert compose([override, "data.split.validation_share=0.1"]).train.validate != compose([]).train.validate
    assert from_yaml(to_yaml(compose([])).replace("monitor: ne", "monitor: auc")).train.validate.monitor == "auc"


def test_a_text_with_an_interpolation_that_does_not_end_is_named() -> None:
    config = compose(["data.missing=['', '\\${x']"])
    with pytest.raises(ConfigError, match=r"data.missing\[1\] has a text with \$\{ that no \} ends"):
        to_yaml(config)
