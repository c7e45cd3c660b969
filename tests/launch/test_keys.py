"""Every setting belongs to the keys whose output it can change: the list is whole, and the keys follow it."""

import dataclasses
import functools
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, ModelConfig
from pipeline.config.compose import compose, config_hash
from pipeline.ingest.stage import ingest
from pipeline.planning import PlanInputs, make_plan
from pipeline.records import DatasetSchema, FeatureProfile, Profile, SparseColumn
from pipeline.specs import MODELS, REGISTRIES
from pipeline.specs.stage import always
from pipeline.stages.train import CHECKPOINTS
from pipeline.store import Store
from tests.keys import INPUTS, KEYS, LISTS, key_config, uses
from tests.setting_paths import LEAVES

# Configurations between which every condition of the list holds and does not hold.
BASES = {
    "synthetic": [],
    "csv": ["data=csv", "data.name=d", "data.path=x.csv", "+data.sparse.a={mapping: learned}", "+data.dense.b={}"],
    "tables": ["data=tables", "data.name=t", "+data.tables.a={rows: 10}", "stages=[ingest,plan]"],
    "strided": ["partition=dmt", "partition.strategy=strided"],
    "coherent": [
        "partition=dmt",
        "partition.strategy=coherent",
        "train.schedule=constant",
        "data.split.validation_share=0.1",
    ],
    "chosen": ["partition=dmt", "partition.auto=true", "partition.strategy=strided"],
    "probe": ["partition=dmt", "partition.probe=other", "checkpoint.init_from=other"],
    "auto": ["checkpoint.final_quantise=auto"],
    "options": [
        "partition=dmt",
        "partition.strategy=coherent",
        "train.sparse_options.eps=0.1",
        "train.dense_optimizer=shampoo",
        "train.dense_options.block_size=8",
        "+train.dense_groups.a={lr: 0.1}",
        "train.average.kind=ema",
        "train.rank_loss.kind=pairwise",
    ],
    "ensemble": ["train.snapshots.count=3", "data.split.validation_share=0.1"],
    "few": ["checkpoint.final_quantise='4'", "train.threads_per_rank=2"],
    "entries": [
        "+plan.tables.C1={tier: ddr}",
        "+launch.pods.volumes.v={claim: c, path: /x}",
        "+launch.pods.resources.train={}",
    ],
}


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    """What ``BASES`` compose to."""
    return {name: compose(["run=r", *overrides]) for name, overrides in BASES.items()}


def test_every_condition_holds_for_some_of_these_configurations_and_not_for_others(configs: dict[str, Config]) -> None:
    for use in (use for lines in LISTS.values() for use in lines):
        held = {use.when(config) for config in configs.values()}
        assert held == {True, False} or held == {use.when is always}, use


CHOICES = [registry.names() for registry in REGISTRIES]


def other(value: Any) -> Any:
    """Another value than ``value``, of its kind as far as that can be told."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "more"]
    if isinstance(value, dict):
        return {**value, "more": "more"}
    choices = next((names for names in CHOICES if value in names), ())
    return next((name for name in choices if name != value), f"{value}-other")


def changed(node: Any, parts: list[str]) -> Any:
    """``node`` with another value at ``parts``; None where nothing is there to change."""
    head, *rest = parts
    if head == "*":
        if not node:
            return None
        name = next(iter(node))
        return {**node, name: changed(node[name], rest)}
    if isinstance(node, ModelConfig) and not hasattr(node, head):
        return None  # another model's
    value = getattr(node, head)
    now = changed(value, rest) if rest else other(value)
    return None if rest and now is None else dataclasses.replace(node, **{head: now})


# Whose change of value moves conditions as well: what then belongs to the keys is another list.
DECIDING = (
    "data.format",
    "data.sparse.*.mapping",
    "data.sparse_defaults.mapping",
    "partition.name",
    "partition.auto",
    "partition.strategy",
    "partition.probe",
    "train.schedule",
    "train.dense_optimizer",
    "train.average.kind",
    "train.rank_loss.kind",
    "train.snapshots.count",
    "checkpoint.init_from",
    "checkpoint.final_quantise",
    "data.split.validation_share",
    "data.split.validation_hours",
)
# The first one that is given brings all of its group into the keys.
OPTIONS = ("train.sparse_options.", "train.dense_options.")


# Bases whose settings others have, too: synthetic, csv, probe, options, ensemble and entries are in make test.
FURTHER = ("tables", "strided", "coherent", "chosen", "auto", "few")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in FURTHER else name for name in BASES]
)
def test_a_setting_changes_the_keys_that_the_list_gives_it_and_no_others(configs: dict[str, Config], name: str) -> None:
    config, seen = configs[name], 0
    before = {key: key_config(key, config) for key in KEYS}
    lines = [(key, use) for key in KEYS for use in uses(key, config)]
    for path in LEAVES:
        if path in DECIDING or path.startswith(OPTIONS) or (now := changed(config, path.split("."))) is None:
            continue
        covering = [(key, use.named) for key, use in lines if use.covers(path)]
        expected = {key for key, named in covering if not named}
        derived = {key for key, named in covering if named}
        moved = {key for key in KEYS if key_config(key, now) != before[key]}
        assert expected <= moved <= expected | derived | OTHERS.get(path, set()), path
        seen += 1
    assert seen > 200


# Settings from which a value in another key is worked out: the model's name, and one tower a host.
# The last ones belong to a key only where they are set.
OTHERS = {
    "data.name": {"publish"},
    "hardware.hosts": {"partition", CHECKPOINTS, "train"},
    "data.dedupe.key": {"ingest"},
    **{f"data.sampling.{name}": {"ingest"} for name in ("column", "negatives", "rate")},
}


def test_what_a_setting_names_is_read_by_its_value_too(configs: dict[str, Config]) -> None:
    """``named`` settings whose meaning lies in the configuration itself; files and checkpoints have tests of theirs."""
    assert key_config("publish", configs["synthetic"]) != key_config(
        "publish", dataclasses.replace(configs["csv"], publish=dataclasses.replace(configs["csv"].publish, model="m"))
    )
    two = dataclasses.replace(configs["strided"], hardware=dataclasses.replace(configs["strided"].hardware, hosts=2))
    for key in ("partition", CHECKPOINTS, "train"):
        assert key_config(key, two) != key_config(key, configs["strided"])


def test_a_verdict_is_found_again_with_the_same_permissions_alone() -> None:
    """Those about the data count, which the gate asks for; also without a checkpoint to start from."""
    plain = compose(["run=r"])
    renamed = compose(["run=r", "checkpoint.allow=[data.sparse.C1.column]"])
    faster = compose(["run=r", "checkpoint.init_from=other", "checkpoint.allow=[train.lr,dataset]"])
    assert key_config("publish", renamed) != key_config("publish", plain) == key_config("publish", faster)
    assert key_config("train", renamed) == key_config("train", plain)


def test_a_finished_training_is_named_by_all_that_its_checkpoints_are_named_by(configs: dict[str, Config]) -> None:
    for config in configs.values():
        whole, part = key_config("train", config), key_config(CHECKPOINTS, config)
        assert within(part, whole)


def within(part: Any, whole: Any) -> bool:
    """Whether ``whole`` has all that ``part`` has, group by group."""
    if not isinstance(part, dict):
        return bool(part == whole)
    return all(name in whole and within(value, whole[name]) for name, value in part.items())


GUARD_HINTS = ["train.guard.collapse=false", "train.guard.max_window_ne=2", "train.guard.min_logit_std=0"]


@pytest.mark.parametrize("override", GUARD_HINTS)
def test_what_a_guards_hint_says_leaves_the_name_of_a_run_without_one(override: str) -> None:
    assert compose([override]).run == compose([]).run
    assert config_hash(compose([override])) == config_hash(compose([]))


# What a stage reads of the configuration though no byte of its output depends on it.
READ_ONLY = {
    "ingest": {"ingest.engine", "ingest.block_mib", "data.path"},
    "plan": {
        # all of hardware is gone through for its figures, and these say where files lie
        *(f"hardware.{name}" for name in ("ssd_paths", "cache_path", "cache_gib")),
        "train.dense_optimizer",
        "train.average.kind",  # whether their state is more than a plan has room for in any case
        # of the optimizer that these belong to a plan only needs the state a row
        *(f"train.sparse_options.{name}" for name in ("eps", "beta1", "beta2", "l1", "l2", "beta")),
    },
}


@contextmanager
def recorded() -> Iterator[set[tuple[type, str]]]:
    """Within: (class, field) of every field of the configuration's classes that is read, through copies as well."""
    read: set[tuple[type, str]] = set()
    kinds = {kind for path in LEAVES for kind, _ in owners(path)}
    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            names = frozenset(field.name for field in dataclasses.fields(kind))

            def look(self: Any, name: str, names: frozenset[str] = names, kind: type = kind) -> Any:
                if name in names:
                    read.add((kind, name))
                return object.__getattribute__(self, name)

            patch.setattr(kind, "__getattribute__", look)
        yield read


hints = functools.cache(typing.get_type_hints)  # of a few classes, for every setting


def owners(path: str) -> Iterator[tuple[type, str]]:
    """The (dataclass, field) on the way to the setting at ``path``, the setting's own at the end."""
    kind: Any = Config
    for part in path.split("."):
        if part == "*":
            kind = typing.get_args(kind)[1]
            continue
        if kind is ModelConfig:
            kind = next(spec.config for spec in MODELS if part in hints(spec.config))
        yield kind, part
        kind = hints(kind)[part]


def unexplained(stage: str, config: Config, read: set[tuple[type, str]]) -> list[str]:
    """Settings that ``read`` names, that no key of ``stage`` and of its inputs covers and that are not read only."""
    keys = {stage, *INPUTS[stage]}
    lines = [use for key in keys for use in uses(key, config)]
    known = {path for path in LEAVES if any(use.covers(path) for use in lines)} | READ_ONLY[stage]
    known |= {path for path, others in OTHERS.items() if stage in others}  # not set here
    by_field: dict[tuple[type, str], list[str]] = {}
    for path in LEAVES:
        by_field.setdefault(list(owners(path))[-1], []).append(path)
    return [paths[0] for field, paths in by_field.items() if field in read and not known & set(paths)]


def test_what_ingestion_reads_its_key_covers(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("label,a,b\n" + "".join(f"{n % 2},x{n % 7},{n}\n" for n in range(200)))
    config = compose(["run=r", *BASES["csv"], f"data.path={tmp_path}/log.csv", "data.split.test_share=0.5"])
    store = Store(str(tmp_path / "store"))
    with recorded() as read, store.draft("datasets/d", kind="ingest", key="k", config={}, inputs={}) as draft:
        ingest(config.data, config.ingest, config.seed, draft)
    assert len(read) > 40
    assert unexplained("ingest", config, read) == []


@pytest.mark.parametrize("overrides", [[], ["hardware=laptop2", "hardware.ssd_gib=9"], ["hardware=h100x8"]])
def test_what_planning_reads_its_key_covers(overrides: list[str]) -> None:
    config = compose(["run=r", "train.global_batch=4096", *overrides])
    schema = DatasetSchema(
        dense=("I1",),
        sparse=(SparseColumn(name="C1", rows=9), SparseColumn(name="C2", rows=99)),
        rows={"train": 100},
        files={},
        groups={},
    )
    feature = FeatureProfile(rows=9, distinct=9, missing_share=0.0, pooling=1.0, hot_rows=[9], hot_share=[1.0])
    sparse = {"C1": feature, "C2": dataclasses.replace(feature, rows=99, hot_rows=[99])}
    profile = Profile(rows={"train": 100}, label_rate={"train": 0.2}, dense={}, sparse=sparse)
    with recorded() as read:
        make_plan(PlanInputs.of(config, schema, profile), "key")
    assert len(read) > 30
    assert unexplained("plan", config, read) == []
