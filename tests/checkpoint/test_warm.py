"""Starting from another checkpoint: which tables and rows are taken, which settings may differ, what is said."""

import dataclasses
import shlex

import pytest
import torch

from pipeline.checkpoint.changes import check_changes, classify
from pipeline.checkpoint.reader import Target
from pipeline.checkpoint.warm import warm_start
from pipeline.compose import compose
from pipeline.config import SparseFeature
from pipeline.errors import ArtifactError, ConfigError
from tests.checkpoint.built import CODINGS, DIM, ROWS, config, dense, model, new_store, put, restored


@pytest.fixture
def chain(tmp_path):
    store = new_store(tmp_path)
    put(store, 1, coding=CODINGS["q8"])
    return store, put(store, 2, [1], 0.3)


def start(chain, rows, **options):
    target = model(rows=rows, fill=7.0)
    parameters = dense()
    lines = warm_start(*chain, Target(target, parameters), **options)
    tables = {s.table: (s.weight, s.state["adagrad_sum"]) for s in target.local_shards()}
    return tables, parameters, lines


def whole(chain):
    return {name: (weight, sums) for name, _, weight, sums in restored(*chain)}


def test_equal_tables_are_taken_bit_for_bit_with_the_dense_part(chain):
    tables, parameters, lines = start(chain, ROWS)
    for name, (weight, sums) in whole(chain).items():
        assert torch.equal(tables[name][0], weight)
        assert torch.equal(tables[name][1], sums)
    assert float(parameters["head.bias"][0]) == 2.0
    assert "3 tables taken as they are, 987 rows" in lines
    assert any("all 2 parameters" in line for line in lines)


def test_new_rows_keep_their_values_and_surplus_rows_are_left_out(chain):
    tables, _, lines = start(chain, {"a": 60, "b/c": 20, "new": 5}, tables_only=True)
    there = whole(chain)
    assert torch.equal(tables["a"][0][:50], there["a"][0])
    assert (tables["a"][0][50:] == 7).all()
    assert (tables["a"][1][50:] == 7).all()
    assert torch.equal(tables["b/c"][0], there["b/c"][0][:20])
    assert (tables["new"][0] == 7).all()
    assert lines == [
        "table a: 50 rows taken, 10 new ones keep their initial values",
        "table b/c: 20 rows taken, 17 left out",
        "table new: not in the checkpoint, keeps its initial values",
        "table long of the checkpoint: left out",
        "dense parameters and their optimizer keep their initial values",
    ]


def test_tables_may_be_renamed_even_into_another_ones_name(chain):
    there = whole(chain)
    tables, parameters, lines = start(chain, {"a": 50, "b/c": 50}, tables_only=True, rename={"a": "b/c"})
    assert torch.equal(tables["b/c"][0], there["a"][0])
    assert (tables["a"][0] == 7).all()
    assert (parameters["head.weight"] == 0).all()
    assert "table b/c (was a): 50 rows taken" in lines


@pytest.mark.parametrize(
    ("rename", "message"),
    [({"x": "a"}, "names table 'x', which the checkpoint does not have"),
     ({"a": "x"}, "the name 'x', which the model does not have"),
     ({"a": "long", "b/c": "long"}, "'a' and 'b/c' the same name 'long'")],
)  # fmt: skip
def test_a_rename_that_cannot_be_is_refused(chain, rename, message):
    with pytest.raises(ConfigError, match=message):
        start(chain, ROWS, rename=rename)


def test_the_hint_of_a_rename_can_be_typed(chain):
    with pytest.raises(ConfigError) as caught:
        start(chain, ROWS, rename={"a": "b/c", "x": "a"})
    assert caught.value.hint == "'checkpoint.rename={a: b/c}'"
    (override,) = shlex.split(caught.value.hint)
    assert compose([override, "checkpoint.init_from=r"]).checkpoint.rename == {"a": "b/c"}


def test_another_dimension_or_dense_part_is_refused(chain):
    with pytest.raises(ConfigError, match=f"'a' has {DIM} columns in the checkpoint, 8 in the model"):
        warm_start(*chain, Target(model(dim=8), dense()))
    with pytest.raises(ConfigError, match="parameter 'head.bias'") as caught:
        warm_start(*chain, Target(model(), {"head.weight": torch.zeros(3, 4)}))
    assert "init_tables_only=true" in caught.value.hint


def test_a_damaged_checkpoint_is_refused(chain):
    store, artifact = chain
    store.fs.rm(store.full(f"{artifact.path}/dense.safetensors"))
    with pytest.raises(ArtifactError, match=r"dense.safetensors is missing"):
        start(chain, ROWS)


def changed(**settings):
    made = config(**settings.pop("checkpoint", {}))
    for path, value in settings.items():
        group, name = path.split("__")
        part = dataclasses.replace(getattr(made, group), **{name: value})
        made = dataclasses.replace(made, **{group: part})
    return made


D = "d" * 32


def test_speed_machines_and_limits_are_safe(chain):
    made = changed(train__max_steps=3, train__threads_per_rank=1, hardware__ranks_per_host=4, evaluate__global_batch=9)
    assert check_changes(chain[1], made, D) == []


def test_learning_settings_must_be_allowed_by_name_or_group(chain):
    made = changed(train__lr=0.5, train__global_batch=64)
    with pytest.raises(ConfigError) as caught:
        check_changes(chain[1], made, D)
    assert "must be allowed: train.global_batch was 4096, is 64; train.lr was 0.002, is 0.5" in caught.value.message
    assert caught.value.hint == "checkpoint.allow=[train.global_batch,train.lr]"
    with pytest.raises(ConfigError) as caught:
        check_changes(chain[1], changed(train__lr=0.5, train__global_batch=64, checkpoint={"allow": ["train.lr"]}), D)
    assert caught.value.hint == "checkpoint.allow=[train.lr,train.global_batch]"
    allowed = changed(train__lr=0.5, train__global_batch=64, checkpoint={"allow": ["train.lr", "train.global_batch"]})
    assert "allowed: train.lr was 0.002, is 0.5" in check_changes(chain[1], allowed, D)
    check_changes(chain[1], changed(train__lr=0.5, checkpoint={"allow": ["train"]}), D)
    check_changes(chain[1], changed(train__lr=0.5, checkpoint={"init_tables_only": True}), D)


def test_another_data_sets_row_numbers_must_be_allowed(chain):
    with pytest.raises(ConfigError, match="dataset was 'd") as caught:
        check_changes(chain[1], config(), "e" * 32)
    assert caught.value.hint == "checkpoint.allow=[dataset]"
    check_changes(chain[1], config(allow=["dataset"]), "e" * 32)


def test_what_changes_the_meaning_of_stored_numbers_is_refused(chain):
    sparse = {**{name: SparseFeature() for name in ROWS}, "a": SparseFeature(mapping="hash")}
    for made, what in (
        (changed(model__embedding_dim=32, checkpoint={"init_tables_only": True}), "model.embedding_dim was 16, is 32"),
        (changed(data__sparse=sparse, checkpoint={"allow": ["data"]}), "data.sparse.a.mapping was not set, is 'hash'"),
        (changed(model__top_mlp=[8]), "model.top_mlp was"),
    ):
        with pytest.raises(ConfigError, match="cannot be changed") as caught:
            check_changes(chain[1], made, D)
        assert what in caught.value.message
    assert caught.value.hint == "checkpoint.init_tables_only=true"
    check_changes(chain[1], changed(model__top_mlp=[8], checkpoint={"init_tables_only": True}), D)


def test_renamed_and_new_features_contradict_nothing(chain):
    sparse = {"z": SparseFeature(), "new": SparseFeature(mapping="hash", rows=9)}
    assert check_changes(chain[1], changed(data__sparse=sparse, checkpoint={"rename": {"a": "z"}}), D) == []


def test_the_size_of_a_hashed_table_is_its_meaning(chain):
    sparse = {"a": SparseFeature(mapping="hash"), "b/c": SparseFeature()}
    made = changed(data__sparse=sparse)
    assert classify("data.sparse.a.rows", made, False) == "refused"
    assert classify("data.sparse.b/c.rows", made, False) == "safe"
    assert classify("data.sparse_defaults.rows", made, False) == "refused"
    assert classify("data.sparse_defaults.rows", config(), False) == "safe"
