"""Starting from another checkpoint: which tables and rows are taken, which settings may differ, what is said."""

import dataclasses
import itertools
import re
import shlex

import pytest
import torch

from pipeline.checkpoint import config_compatibility
from pipeline.checkpoint.reader import RestoreTarget
from pipeline.checkpoint.warm import warm_start
from pipeline.config import CheckpointConfig, DenseFeature, SparseDefaults, SparseFeature
from pipeline.config.compose import compose
from pipeline.config.compose.overrides import parse
from pipeline.config.sequences import EventColumn, SequenceConfig
from pipeline.config.tasks import TaskLabel
from pipeline.core.errors import ArtifactError, ConfigError
from tests.checkpoint.built import CODINGS, DIM, ROWS, config, dense, model, new_store, put, restored


def check_changes(artifact, config, dataset):
    return config_compatibility.check_changes(
        artifact, dataclasses.asdict(config), config.checkpoint, config.data, dataset
    )


@pytest.fixture
def chain(tmp_path):
    store = new_store(tmp_path)
    put(store, 1, coding=CODINGS["q8"])
    return store, put(store, 2, [1], 0.3)


def start(chain, rows, **options):
    target = model(rows=rows, fill=7.0)
    parameters = dense()
    lines = warm_start(*chain, RestoreTarget(target, parameters), **options)
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
    assert "3 tables loaded unchanged, 987 rows" in lines
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
        "table a: 50 rows loaded, 10 new ones keep their initial values",
        "table b/c: 20 rows loaded, 17 left out",
        "table new: not in the checkpoint, keeps its initial values",
        "table long of the checkpoint: not loaded",
        "dense parameters and their optimizer keep their initial values",
    ]


def test_tables_may_be_renamed_even_into_another_ones_name(chain):
    there = whole(chain)
    tables, parameters, lines = start(chain, {"a": 50, "b/c": 50}, tables_only=True, rename={"a": "b/c"})
    assert torch.equal(tables["b/c"][0], there["a"][0])
    assert (tables["a"][0] == 7).all()
    assert (parameters["head.weight"] == 0).all()
    assert "table b/c (was a): 50 rows loaded" in lines


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"x": "a"}, "names table 'x', which the checkpoint does not have"),
        ({"a": "x"}, "the name 'x', which the model does not have"),
        ({"a": "long", "b/c": "long"}, "'a' and 'b/c' the same name 'long'"),
    ],
)
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
        warm_start(*chain, RestoreTarget(model(dim=8), dense()))
    with pytest.raises(ConfigError, match="parameter 'head.bias'") as caught:
        warm_start(*chain, RestoreTarget(model(), {"head.weight": torch.zeros(3, 4)}))
    assert "init_tables_only=true" in caught.value.hint


def test_features_in_another_order_are_refused(tmp_path):
    """No record of a configuration has an order, and all shapes fit."""
    store = new_store(tmp_path)
    order = {"dense": ["age", "price"], "sparse": ["a", "b/c", "long"]}
    artifact = put(store, 1, order=order)
    target = RestoreTarget(model(), dense())
    assert warm_start(store, artifact, target, order=order)
    assert warm_start(store, artifact, target, order={"dense": ["age", "cost"], "sparse": order["sparse"]})
    for group, names in (("dense", ["price", "age"]), ("sparse", ["a", "long", "b/c"])):
        other = {**order, group: names}
        with pytest.raises(
            ConfigError, match=f"data.{group} has the features of checkpoint .* in another order"
        ) as error:
            warm_start(store, artifact, target, order=other)
        assert f"data.{group} in the order {', '.join(order[group])}" in str(error.value.hint)
        assert warm_start(store, artifact, target, order=other, tables_only=True)


@pytest.mark.parametrize(
    ("now", "wanted"),
    [
        (["b/c", "long", "new"], ["new", "b/c", "long"]),
        (["c", "a", "long"], ["a", "c", "long"]),
    ],
)
def test_features_that_moved_up_are_refused(tmp_path, now, wanted):
    """Where one is gone and one is new, all shapes fit, too. A renamed feature keeps its place."""
    store = new_store(tmp_path)
    order = {"sparse": ["a", "b/c", "long"], "sequences.seen.features": ["item", "action"]}
    artifact = put(store, 1, order=order)
    target, rename = RestoreTarget(model(rows={"a": 50, "c": 37, "long": 900}), dense()), {"b/c": "c"}
    if "c" not in now:
        target, rename = RestoreTarget(model(), dense()), {}
    with pytest.raises(ConfigError, match="in another order: feature 1 was 'a', is") as error:
        warm_start(store, artifact, target, order=order | {"sparse": now}, rename=rename)
    assert f"data.sparse in the order {', '.join(wanted)}, or" in str(error.value.hint)
    assert warm_start(store, artifact, target, order=order | {"sparse": wanted}, rename=rename)
    with pytest.raises(ConfigError, match=r"data.sequences.seen.features has the features of checkpoint .* in another"):
        warm_start(store, artifact, target, order={"sequences.seen.features": ["action", "item"]}, rename=rename)


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


def test_the_size_of_a_hashed_table_is_its_meaning(tmp_path):
    store, hashed, plain = new_store(tmp_path), SparseFeature(mapping="hash"), SparseFeature()
    vocab = {"a": plain, "b/c": plain}
    before = started(store, {"a": hashed, "b/c": plain})
    defaults = SparseDefaults(rows=77)
    for made, path in (
        (features({"a": replaced(hashed, rows=9), "b/c": plain}), "data.sparse.a.rows was not set, is 9"),
        (features({"a": hashed, "b/c": plain}, defaults), "data.sparse_defaults.rows was 100000, is 77 (tables a)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"cannot be changed: {path}")):
            check_changes(before, made, D)
    assert check_changes(before, features({"a": hashed, "b/c": replaced(plain, rows=9)}), D) == []
    assert check_changes(started(store, vocab), features(vocab, defaults), D) == []
    own = {"a": replaced(hashed, rows=9), "b/c": plain}
    assert check_changes(started(store, own), features(own, defaults), D) == []


def replaced(feature, **settings):
    return dataclasses.replace(feature, **settings)


def features(sparse, defaults=None, **checkpoint):
    """A configuration with these sparse features."""
    made = config(**checkpoint)
    data = dataclasses.replace(made.data, sparse=sparse, sparse_defaults=defaults or SparseDefaults())
    return dataclasses.replace(made, data=data)


def started(store, sparse, defaults=None):
    """A checkpoint of a training with these sparse features."""
    made = dataclasses.asdict(features(sparse, defaults))
    step = next(numbers)
    return put(store, step, config=made, directory=f"runs/r{step}/checkpoints/0123456789")


numbers = itertools.count(1)
WORDS, LIST = SparseFeature(), SparseFeature(separator="|")
ONE_OF_TWO = SparseFeature(cross=["x", "y"])
# feature then, now, what is said, what the hint begins with; None: nothing is said.
ALLOWED = [
    (WORDS, SparseFeature(column="x"), "data.sparse.a.column was not set, is 'x'", "data.sparse.a.column=null"),
    (SparseFeature(column="x"), WORDS, "data.sparse.a.column was 'x', is not set", "data.sparse.a.column=x"),
    (WORDS, LIST, "data.sparse.a.separator was not set, is '|'", "data.sparse.a.separator=null"),
    (LIST, SparseFeature(separator=","), "data.sparse.a.separator was '|', is ','", "'data.sparse.a.separator=\"|\"'"),
    (
        LIST,
        SparseFeature(separator="|", weight_separator=":"),
        "data.sparse.a.weight_separator was not set, is ':'",
        "data.sparse.a.weight_separator=null",
    ),
    (
        ONE_OF_TWO,
        SparseFeature(cross=["x", "z"]),
        "data.sparse.a.cross was ['x', 'y'], is ['x', 'z']",
        "data.sparse.a.cross=[x,y]",
    ),
]
REFUSED = [
    (WORDS, ONE_OF_TWO, "data.sparse.a.cross was [], is ['x', 'y']", "data.sparse.a.cross=[]"),
    (
        ONE_OF_TWO,
        SparseFeature(cross=["x", "y", "z"]),
        "data.sparse.a.cross was ['x', 'y'], is ['x', 'y', 'z']",
        "data.sparse.a.cross=[x,y]",
    ),
    (WORDS, SparseFeature(bins=10), "data.sparse.a.bins was not set, is 10", "data.sparse.a.bins=null"),
    (SparseFeature(bins=20), SparseFeature(bins=10), "data.sparse.a.bins was 20, is 10", "data.sparse.a.bins=20"),
    (
        WORDS,
        SparseFeature(mapping="learned"),
        "data.sparse.a.mapping was not set, is 'learned'",
        "data.sparse.a.mapping=null",
    ),
]
NOTHING = [
    (WORDS, SparseFeature(column="a")),
    (WORDS, SparseFeature(mapping="vocab")),
    (WORDS, SparseFeature(min_count=3)),
    (WORDS, SparseFeature(required=True)),
    (WORDS, SparseFeature(integer=True)),
    (LIST, replaced(LIST, max_ids=2)),
    (WORDS, SparseFeature(weight_separator=":")),
    (WORDS, SparseFeature(evict_after_days=3)),
    (ONE_OF_TWO, SparseFeature(cross=["x", "y"], column="z")),
]


@pytest.mark.parametrize("tables_only", [False, True])
@pytest.mark.parametrize(("then", "now", "said", "back"), ALLOWED)
def test_where_ids_are_read_must_be_allowed_by_name(tmp_path, then, now, said, back, tables_only):
    before = started(new_store(tmp_path), {"a": then})
    path = said.split(" ", 1)[0]
    with pytest.raises(ConfigError) as caught:
        check_changes(before, features({"a": now}, init_tables_only=tables_only), D)
    assert f"must be allowed: {said}" in caught.value.message
    assert caught.value.hint.startswith(f"checkpoint.allow=[{path}] if the ids and values are unchanged")
    assert caught.value.hint.endswith(f"else {back}")
    for option in (path, "data"):
        assert check_changes(before, features({"a": now}, allow=[option], init_tables_only=tables_only), D) == [
            f"allowed: {said}"
        ]


@pytest.mark.parametrize("tables_only", [False, True])
@pytest.mark.parametrize(("then", "now", "said", "back"), REFUSED)
def test_ids_that_cannot_be_the_same_are_refused(tmp_path, then, now, said, back, tables_only):
    before = started(new_store(tmp_path), {"a": then})
    with pytest.raises(ConfigError) as caught:
        check_changes(before, features({"a": now}, allow=["data"], init_tables_only=tables_only), D)
    assert f"cannot be changed: {said}" in caught.value.message
    assert caught.value.hint == f"{back}, or give the feature another name and a new table"
    (override,) = shlex.split(caught.value.hint.split(", or give")[0])
    parse([override])


@pytest.mark.parametrize("gone", [False, True])
def test_a_task_that_comes_or_goes_needs_a_new_dense_part_and_nothing_else(tmp_path, gone):
    plain = features({"a": WORDS})
    more = dataclasses.replace(plain.data, tasks={"buy": TaskLabel(column="bought", given="click")})
    made = [plain, dataclasses.replace(plain, data=more)]
    then, now = made[::-1] if gone else made
    before = put(new_store(tmp_path), 1, config=dataclasses.asdict(then), directory="runs/r/checkpoints/0123456789")
    with pytest.raises(ConfigError, match=r"cannot be changed: data.tasks.buy.kind was") as caught:
        check_changes(before, now, D)
    assert caught.value.hint == "checkpoint.init_tables_only=true"
    check_changes(before, dataclasses.replace(now, checkpoint=CheckpointConfig(init_tables_only=True)), D)


@pytest.mark.parametrize(
    ("gone", "said", "hint"),
    [
        (False, "must be allowed: data.dense.price is new", "~data.dense.price"),
        (True, "must be allowed: data.dense.price is gone", "'+data.dense.price={...}'"),
    ],
)
def test_a_number_that_comes_or_goes_is_one_change(tmp_path, gone, said, hint):
    plain = features({"a": WORDS})
    more = dataclasses.replace(plain.data, dense={**plain.data.dense, "price": DenseFeature()})
    made = [plain, dataclasses.replace(plain, data=more)]
    then, now = made[::-1] if gone else made
    before = put(new_store(tmp_path), 1, config=dataclasses.asdict(then), directory="runs/r/checkpoints/0123456789")
    with pytest.raises(ConfigError) as caught:
        check_changes(before, now, D)
    assert caught.value.message.endswith(said)
    assert caught.value.hint == (
        f"checkpoint.allow=[data.dense.price] if the ids and values are unchanged, else {hint}"
    )
    check_changes(before, dataclasses.replace(now, checkpoint=CheckpointConfig(allow=["data.dense.price"])), D)


@pytest.mark.parametrize(("then", "now"), NOTHING)
def test_what_gives_no_row_another_id_is_safe(tmp_path, then, now):
    assert check_changes(started(new_store(tmp_path), {"a": then}), features({"a": now}), D) == []


def test_a_default_counts_for_the_tables_that_take_it(tmp_path):
    own = {"a": LIST, "c": ONE_OF_TWO}
    commas = SparseDefaults(separator=",")
    store = new_store(tmp_path)
    assert check_changes(started(store, own), features(own, commas), D) == []
    with pytest.raises(ConfigError) as caught:
        check_changes(started(store, {**own, "b": WORDS}), features({**own, "b": WORDS}, commas), D)
    assert "data.sparse_defaults.separator was not set, is ',' (tables b)" in caught.value.message
    spelt = SparseFeature(separator=",")
    assert check_changes(started(store, {"b": WORDS}, commas), features({"b": spelt}), D) == []


@pytest.mark.parametrize("setting", [{"strip": True}, {"quote": None}])
def test_what_the_text_of_all_fields_is_must_be_allowed(tmp_path, setting):
    before, made = started(new_store(tmp_path), {"a": WORDS}), features({"a": WORDS}, init_tables_only=True)
    made = dataclasses.replace(made, data=dataclasses.replace(made.data, **setting))
    with pytest.raises(ConfigError, match=f"must be allowed: data.{next(iter(setting))} was "):
        check_changes(before, made, D)


@pytest.mark.parametrize("mapping", ["hash", "double_hash"])
def test_a_feature_whose_name_seeds_its_hash_cannot_be_renamed(tmp_path, mapping):
    before = started(new_store(tmp_path), {"a": SparseFeature(mapping=mapping)})
    with pytest.raises(ConfigError) as caught:
        check_changes(before, features({"z": SparseFeature(mapping=mapping)}, rename={"a": "z"}), D)
    assert "feature 'a' is now 'z', but the hash of its ids is seeded with the name" in caught.value.message
    assert caught.value.hint == "keep the name: data.sparse.a.column=z without checkpoint.rename of a"


def with_sequence(timed=True, **settings):
    """A configuration of a sequence, or (None) of none."""
    made = config(**settings.pop("checkpoint", {}))
    if not timed:
        return made
    sequence = SequenceConfig(features={"item": EventColumn()}, time="times", **settings)
    return dataclasses.replace(made, data=dataclasses.replace(made.data, sequences={"seen": sequence}))


@pytest.mark.parametrize(
    ("settings", "said", "back"),
    [
        ({"age_bins": 32}, "data.sequences.seen.age_bins was 64, is 32", "data.sequences.seen.age_bins=64"),
        ({"max_length": 50}, "data.sequences.seen.max_length was 100, is 50", "checkpoint.init_tables_only=true"),
        (
            {"max_length": 500, "age_bins": 9},
            "data.sequences.seen.max_length was 100, is 500",
            "checkpoint.init_tables_only=true and data.sequences.seen.age_bins=64",
        ),
    ],
)
def test_events_that_mean_something_else_are_refused_by_name(tmp_path, settings, said, back):
    """Allowed or not: the row of an age is the number of its bin, and a place beyond the longest has no vector."""
    before = put(new_store(tmp_path), 1, config=dataclasses.asdict(with_sequence()))
    with pytest.raises(ConfigError, match="cannot be changed") as caught:
        check_changes(before, with_sequence(**settings, checkpoint={"allow": ["data.sequences"]}), D)
    assert said in caught.value.message and caught.value.hint == back


def test_tables_alone_may_have_histories_of_another_length(tmp_path):
    before = put(new_store(tmp_path), 1, config=dataclasses.asdict(with_sequence()))
    tables = {"init_tables_only": True, "allow": ["dataset"]}
    check_changes(before, with_sequence(max_length=7, checkpoint=tables), D)
    with pytest.raises(ConfigError, match=r"cannot be changed: data\.sequences\.seen\.age_bins was 64, is 7"):
        check_changes(before, with_sequence(age_bins=7, checkpoint=tables), D)


def test_a_sequence_that_is_new_or_gone_is_one_change(tmp_path):
    store = new_store(tmp_path)
    without = put(store, 1, config=dataclasses.asdict(with_sequence(timed=False)))
    with pytest.raises(ConfigError, match=r"must be allowed: data\.sequences\.seen is new") as caught:
        check_changes(without, with_sequence(checkpoint={"allow": ["dataset"]}), D)
    assert caught.value.hint is not None and "else ~data.sequences.seen" in caught.value.hint
    check_changes(without, with_sequence(checkpoint={"init_tables_only": True, "allow": ["dataset"]}), D)
