"""Which settings make which towers, and what is said about those that cannot be."""

import dataclasses

import pytest

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.records import Tower, TowerModuleSpec, Towers
from pipeline.towers.assignment import (
    check_partition,
    flat_towers,
    kept_together,
    strided,
    tower_hosts,
    towers_of,
    unread_settings,
)
from pipeline.towers.layout import layout_of, united_plan
from tests.embeddings.ranks import plan_for

FEATURES = ["a", "b", "c", "d", "e"]


def dmt(*overrides, hosts=2):
    return compose(["run=x", "partition=dmt", f"hardware.hosts={hosts}", *overrides])


def checked(config, features):
    check_partition(config.partition, config.plan, config.hardware.hosts, features)


def made(config, assigned, features):
    return towers_of(config.partition, config.model.embedding_dim, config.hardware.hosts, assigned, features)


SEQUENCES = {"history": ["a", "c"], "searches": ["e"], "alone": []}
SHARED = [["a", "b", "history"], ["c", "history"], ["e", "searches"], ["d"]]


def with_sequences(*overrides, hosts=2):
    """The features and sequences by tower, strided; a and b share a table."""
    config, names = dmt("partition.strategy=strided", *overrides, hosts=hosts), [*FEATURES, *SEQUENCES]
    part = kept_together(config.partition, SHARED)
    check_partition(part, config.plan, hosts, names, SEQUENCES)
    return strided(names, hosts, part.pins, part.groups)


@pytest.mark.parametrize(
    ("overrides", "hosts", "expected"),
    [
        ([], 2, [["a", "b", "c", "e", "history", "searches"], ["d", "alone"]]),
        (["+partition.pins.history=1"], 2, [["d", "alone"], ["a", "b", "c", "e", "history", "searches"]]),
        (
            ["+partition.pins.alone=1", "+partition.pins.a=0"],
            2,
            [["a", "b", "c", "d", "history"], ["e", "searches", "alone"]],
        ),
        (["partition.groups=[[alone,d]]"], 3, [["a", "b", "c", "history"], ["d", "alone"], ["e", "searches"]]),
    ],
)
def test_a_sequence_lies_with_all_features_whose_tables_it_has(overrides, hosts, expected):
    assert with_sequences(*overrides, hosts=hosts) == expected


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ["+partition.pins.a=0", "+partition.pins.c=1"],
            "partition.pins sends a to tower 0, c to tower 1, but the events of sequence 'history' are looked up in "
            "the tables of a, c: a sequence and its tables lie in one tower",
            "++partition.pins.c=0",
        ),
        (
            ["+partition.pins.searches=0", "+partition.pins.e=1"],
            "partition.pins sends e to tower 1, searches to tower 0, but the events of sequence 'searches'",
            "++partition.pins.searches=1",
        ),
    ],
)
def test_pins_that_split_a_sequence_are_named_with_their_fix(overrides, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        with_sequences(*overrides)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("count", "pins", "groups", "expected"),
    [
        (2, {}, [], [["a", "c", "e"], ["b", "d"]]),
        (2, {"a": 1}, [], [["b", "d"], ["a", "c", "e"]]),
        (2, {}, [["a", "d"]], [["a", "c", "d"], ["b", "e"]]),
        (3, {"e": 2}, [["b", "e"]], [["a"], ["c"], ["b", "d", "e"]]),
        (3, {"a": 0, "b": 0, "c": 0}, [], [["a", "b", "c"], ["d"], ["e"]]),
        (2, {}, [["c", "a"]], [["a", "c", "d"], ["b", "e"]]),
    ],
)
def test_strided_deals_features_in_turn_around_pins_and_groups(count, pins, groups, expected):
    assert strided(FEATURES, count, pins, groups) == expected


@pytest.mark.parametrize(
    ("count", "hosts", "expected"),
    [
        (2, 2, [(0,), (1,)]),
        (2, 4, [(0, 1), (2, 3)]),
        (1, 3, [(0, 1, 2)]),
        (4, 2, [(0,), (0,), (1,), (1,)]),
        (3, 1, [(0,), (0,), (0,)]),
    ],
)
def test_towers_are_divided_among_hosts_or_hosts_among_towers(count, hosts, expected):
    assert tower_hosts(count, hosts) == expected


@pytest.mark.parametrize(
    ("overrides", "hosts", "message"),
    [
        (["partition.towers=3"], 4, "3 towers do not divide 4 hosts"),
        (["partition.towers=3"], 2, "3 towers do not divide 2 hosts"),
        (["partition.towers=6"], 2, r"6 towers for 5 features \(a, b, c, d, e\)"),
        (["+partition.pins.C9=0"], 2, "partition.pins names 'C9', which is not a feature"),
        (["+partition.pins.a=2"], 2, "partition.pins.a is 2, expected a tower between 0 and 1"),
        (["partition.groups=[[a,b],[b,c]]"], 2, "partition.groups names 'b' twice"),
        (["partition.groups=[[a,a]]"], 2, "partition.groups names 'a' twice"),
        (
            ["partition.groups=[[a,b]]", "+partition.pins.a=0", "+partition.pins.b=1"],
            2,
            "partition.groups keeps a, b together, but partition.pins sends a to 0, b to 1",
        ),
        (["plan.sharding_types=[table_row_wise]"], 2, r"plan.sharding_types=\[table_row_wise\] spread over all hosts"),
        (
            ["+plan.tables.b.sharding=table_column_wise"],
            2,
            "plan.tables.b.sharding is table_column_wise, which spreads over all hosts",
        ),
        (["partition.module=dlrm", "partition.c=0"], 2, "partition.c and partition.p are both 0"),
    ],
)
def test_settings_that_cannot_be_are_named_before_anything_runs(overrides, hosts, message):
    with pytest.raises(ConfigError, match=message) as caught:
        checked(dmt(*overrides, hosts=hosts), FEATURES)
    assert caught.value.exit_code == 2 and caught.value.hint


@pytest.mark.parametrize(
    ("module", "unread"),
    [
        ("pass_through", ["c", "p", "dim", "cross_layers", "rank"]),
        ("dlrm", ["cross_layers", "rank"]),
        ("dcn", ["c", "p", "rank"]),
        ("low_rank", ["c", "p"]),
        ("dcn_low_rank", ["c", "p", "cross_layers"]),
    ],
)
def test_settings_that_a_module_does_not_read_are_named_with_those_that_do(module, unread):
    changed = ["partition.c=2", "partition.p=4", "partition.dim=8", "partition.cross_layers=2", "partition.rank=8"]
    config = dmt(f"partition.module={module}", *changed)
    checked(config, FEATURES)
    said = unread_settings(config.partition)
    assert [sentence.split()[0] for sentence in said] == [f"partition.{name}" for name in unread]
    assert unread_settings(dmt(f"partition.module={module}").partition) == []
    for sentence in said:
        assert f"partition.module is {module}, which does not read it" in sentence
        assert module not in sentence.partition("one of the modules that do: ")[2].split(", ")


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ([["a", "b"], ["c", "d", "e", "a"]], "feature 'a' is in tower 0 and in tower 1"),
        ([["a", "b"], ["c"]], "no tower has: d, e"),
        ([["a", "b", "x"], ["c", "d", "e"]], "not in the dataset: x"),
        ([["a", "b", "c", "d", "e"], []], "tower 1 has no feature"),
    ],
)
def test_a_feature_belongs_to_exactly_one_tower(assigned, message):
    with pytest.raises(ConfigError, match=message) as caught:
        made(dmt(), assigned, FEATURES)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("hosts", "count"), [(((0,), (0, 1)), 2), (((0,), (2,)), 3), (((0,), (0,)), 2), (((0, 1), (2,)), 3)]
)
def test_towers_share_all_their_hosts_or_none_and_use_every_host(hosts, count):
    towers = Towers(
        partition="dmt",
        towers=tuple(Tower(features=f, hosts=h) for f, h in zip((("a", "b"), ("c", "d", "e")), hosts, strict=True)),
    )
    with pytest.raises(ConfigError, match="a, b on hosts .*; c, d, e on hosts"):
        layout_of(towers, FEATURES, count, 2)


def test_peers_are_the_ranks_of_one_place_of_all_tower_hosts():
    towers = made(dmt("partition.towers=2", hosts=4), [["a", "b"], ["c", "d", "e"]], FEATURES)
    layout = layout_of(towers, FEATURES, 4, 2)
    assert [layout.tower_ranks(group) for group in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [layout.peers(place) for place in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [layout.tower_hosts_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_towers_json_is_what_was_written():
    towers = dataclasses.replace(
        made(dmt(), [["a", "b"], ["c", "d", "e"]], FEATURES), module=TowerModuleSpec(name="dlrm", p=2, dim=4)
    )
    record = towers.to_json()
    assert record["version"] == 2 and record["partition"] == "dmt"
    assert record["towers"] == [{"features": ["a", "b"], "hosts": [0]}, {"features": ["c", "d", "e"], "hosts": [1]}]
    assert Towers.from_json(record) == towers and not towers.is_flat
    assert flat_towers(3, FEATURES).towers == (Tower(features=tuple(FEATURES), hosts=(0, 1, 2)),)


def test_a_united_plan_has_global_ranks():
    rows = dict.fromkeys(FEATURES, 10)
    towers = made(dmt(), [["a", "c", "e"], ["b", "d"]], FEATURES)
    layout = layout_of(towers, FEATURES, 2, 2)
    plans = [plan_for("table_wise", 2, rows={f: rows[f] for f in group.features}) for group in layout.tower_hosts]
    plans = [dataclasses.replace(p, memory=[{"ddr": 10 * i}, {"ddr": 10 * i + 1}]) for i, p in enumerate(plans)]
    plan = united_plan(layout, plans, FEATURES)
    assert list(plan.tables) == FEATURES and plan.world_size == 4 and plan.ranks_per_host == 2
    assert {name: table.shards[0].rank for name, table in plan.tables.items()} == {
        "a": 0,
        "c": 1,
        "e": 0,
        "b": 2,
        "d": 3,
    }
    assert [rank["ddr"] for rank in plan.memory] == [0, 1, 10, 11]
