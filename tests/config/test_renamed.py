"""Settings with new names: what people type is refused with the new one, what stores hold is read with either."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from pipeline.checkpoint import config_compatibility
from pipeline.config.compose import compose, config_hash, from_yaml, to_yaml
from pipeline.config.paths import field_type
from pipeline.config.renamed import RENAMED, config_changes, parse_recorded, with_first_names, with_new_names
from pipeline.config.secrets import recorded
from pipeline.core.errors import ConfigError
from pipeline.stages.execution import load
from pipeline.store import Artifact, Store
from tests.keys import key_config


def check_changes(artifact, config, dataset):
    return config_compatibility.check_changes(artifact, asdict(config), config.checkpoint, config.data, dataset)


OVERRIDES = ["train.decay_ratio=0.3", "train.min_lr_factor=0.1", "launch.limit_memory=never", "run=r"]
DATASET = "d" * 32


def old_names(text: str) -> str:
    """A ``config.yaml`` as it was written before the settings had their new names."""
    record = yaml.safe_load(text)
    for first, now in RENAMED.items():
        (group, name), former = now.split("."), first.rpartition(".")[2]
        record[group][former] = record[group].pop(name)
    return yaml.safe_dump(record)


def test_the_quick_reader_reads_what_the_checked_one_does() -> None:
    awkward = ["data.name='2026-11-30'", "train.lr=1e-9", "data.missing=['','null','yes','1e5','0x10','12:30:45','~']"]
    config = compose([*awkward, "run=r"])
    assert parse_recorded(to_yaml(config)) == recorded(config)
    assert asdict(from_yaml(to_yaml(config)))["data"]["missing"] == parse_recorded(to_yaml(config))["data"]["missing"]


@pytest.mark.parametrize(("first", "now"), RENAMED.items(), ids=list(RENAMED))
def test_the_new_name_is_a_setting_and_the_former_one_is_none(first: str, now: str) -> None:
    assert field_type(now) is not None
    assert field_type(first) is None
    assert first.rpartition(".")[0] == now.rpartition(".")[0], "a setting is renamed within its group"


@pytest.mark.parametrize(
    ("typed", "first", "hint"),
    [
        ("train.decay_share=0.5", "train.decay_share", "train.decay_ratio=0.5"),
        ("+train.decay_share=0.5", "train.decay_share", "train.decay_ratio=0.5"),
        ("train.min_lr_share=0.1", "train.min_lr_share", "train.min_lr_factor=0.1"),
        ("launch.hold_memory=never", "launch.hold_memory", "launch.limit_memory=never"),
        ("nightly.timezone=Europe/Berlin", "nightly.timezone", "nightly.time_zone=Europe/Berlin"),
        ("train={decay_share: 0.3}", "train.decay_share", "train.decay_ratio=<value>"),
    ],
)
def test_a_typed_former_name_is_refused_with_the_new_one(typed: str, first: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    assert caught.value.message == f"{first} is now {RENAMED[first]}"
    assert caught.value.hint == hint


def test_a_former_name_in_a_users_yaml_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("defaults: [default]\ndecay_share: 0.3\n")
    with pytest.raises(ConfigError, match="train.decay_share is now train.decay_ratio"):
        compose(["train=mine"], str(tmp_path))


def test_a_former_name_that_is_allowed_to_differ_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["checkpoint.init_from=a", "checkpoint.allow=[train.lr,train.decay_share]"])
    assert caught.value.message == "checkpoint.allow names train.decay_share, which is now train.decay_ratio"
    assert caught.value.hint == "checkpoint.allow=[train.lr,train.decay_ratio]"


def test_recorded_settings_that_were_allowed_to_differ_are_read_with_either_name() -> None:
    config = compose(["checkpoint.init_from=a", "checkpoint.allow=[train.lr,train.decay_ratio]", "run=r"])
    before = to_yaml(config).replace("train.decay_ratio", "train.decay_share")
    assert from_yaml(before) == config
    first = with_first_names(asdict(config))
    assert first["checkpoint"]["allow"] == ["train.lr", "train.decay_share"], "a run's name keeps its bytes"
    assert with_new_names(first) == asdict(config)


def test_a_recorded_configuration_is_read_with_either_name(tmp_path: Path) -> None:
    config = compose(OVERRIDES)
    before = old_names(to_yaml(config))
    assert "decay_share: 0.3" in before and "decay_ratio" not in before and "hold_memory: never" in before
    assert from_yaml(before) == from_yaml(to_yaml(config)) == config
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.yaml").write_text(before)
    assert load(Store(str(tmp_path)), "r") == config


@pytest.mark.parametrize("text", ["- a\n- b\n", "[]", "0", "a", "''"])
def test_a_record_that_is_no_configuration_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="not a mapping of settings"):
        from_yaml(text)


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "seed: {", "seed: !!set {1}", "? [a]\n: 1", "null: 1"])
def test_a_record_with_what_no_setting_may_be_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        from_yaml(text)


def test_keys_and_run_names_are_made_of_the_first_names(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(OVERRIDES)
    train = key_config("train", config)["train"]
    assert (train["decay_share"], train["min_lr_share"]) == (0.3, 0.1)
    assert not {"decay_ratio", "min_lr_factor"} & set(train)
    name = config_hash(config)
    monkeypatch.setattr("pipeline.config.renamed._FIRST", {})
    assert config_hash(config) != name


def test_names_change_within_their_group_alone() -> None:
    record = {"train": {"decay_ratio": 1, "lr": 2}, "data": {"sparse": {"decay_ratio": {"rows": 3}}}, "decay_ratio": 4}
    first = with_first_names(record)
    assert first == {**record, "train": {"decay_share": 1, "lr": 2}}
    assert with_new_names(first) == with_new_names(record) == record


def test_an_old_checkpoint_is_compared_under_the_new_names() -> None:
    config = compose([*OVERRIDES, "checkpoint.init_from=other"])
    record = with_first_names(asdict(config))
    then = Artifact(
        path="c/step-1",
        kind="checkpoint",
        key="k",
        schema_version=1,
        config=record,
        inputs={"dataset": DATASET},
        files={},
        summary={"step": 1},
        created=0.0,
    )
    assert check_changes(then, config, DATASET) == []
    assert config_changes(record, asdict(config)) == {}
    now = replace(config, train=replace(config.train, decay_ratio=0.5))
    with pytest.raises(ConfigError) as caught:
        check_changes(then, now, DATASET)
    assert "train.decay_ratio was 0.3, is 0.5" in caught.value.message
    assert caught.value.hint == "checkpoint.allow=[train.decay_ratio]"
