"""Widths by frequency: at most the bytes asked for, wide where rows are read often; refused where it cannot be."""

import shlex

import pytest
import yaml

from pipeline.config.compose import compose
from pipeline.config.paths import override_key
from pipeline.core.errors import ConfigError
from pipeline.planning import PlanInputs
from pipeline.planning.choices import tables_of
from pipeline.planning.width_choice import TableWidths, shown, widths
from tests.planning.plan_cases import configure, cpu, dataset

ROWS = {"country": 200, "ad": 20_000, "user": 1_000_000}


def inputs(dim=32):
    config = configure(cpu(1, 1))
    config.model.embedding_dim = dim
    return PlanInputs.of(config, *dataset(ROWS))


@pytest.mark.parametrize("share", [0.7, 0.5, 0.25])
def test_widths_take_the_share_and_fall_with_the_frequency_of_rows(share):
    chosen = widths(inputs(), share)
    assert share / 2 < chosen.bytes / chosen.even_bytes <= share
    assert chosen.even_bytes == 4 * 32 * sum(ROWS.values())
    assert chosen.dims["country"] == 32 >= chosen.dims["ad"] >= chosen.dims["user"]
    assert all(dim % 4 == 0 for dim in chosen.dims.values())


def test_all_of_the_bytes_are_one_width_and_too_few_are_refused():
    assert set(widths(inputs(), 1.0).dims.values()) == {32}
    with pytest.raises(ConfigError, match="13% of the bytes of width 32, expected at most 1%") as refused:
        widths(inputs(), 0.01)
    assert "--share 0.13" in refused.value.hint


def test_the_override_sets_the_widths_and_the_plan_counts_them():
    given = inputs()
    chosen = widths(given, 0.5)
    features = [f"+data.sparse.{name}={{}}" for name in ROWS]
    config = compose(["data=parquet", "data.path=/logs", "model.embedding_dim=32", *features, chosen.override])
    given = given.changed("model", config.model)
    tables = {table.name: table.dim for table in tables_of(given)}
    assert tables == chosen.dims
    assert "width   32: 1 table, 200 rows: country" in shown(chosen, ROWS)


@pytest.mark.parametrize("name", ["user:id", "a b", "a,b=c", "x/y-z@1", "(p)[q]{r}", "back\\slash"])
def test_the_printed_line_can_be_pasted_whatever_hydra_means_by_the_characters(name: str):
    line = shown(TableWidths(dims={name: 8, "plain": 16}, exponent=0.5, bytes=1, even_bytes=2), {name: 1, "plain": 2})[
        -1
    ]
    [override] = shlex.split(line)
    features = [f"+data.sparse={{{override_key(name)}: {{}}, plain: {{}}}}"]
    config = compose(["data=parquet", "data.path=/logs", "model.embedding_dim=32", *features, override])
    assert {table: each.dim for table, each in config.model.tables.items()} == {name: 8, "plain": 16}


@pytest.mark.parametrize("name", ["größe", "it's", 'a"b', "a#b", "null", "7", "-1.5e3", "True", " a"])
def test_names_that_no_override_can_write_are_printed_as_yaml(name: str):
    chosen = TableWidths(dims={name: 8}, exponent=0.5, bytes=1, even_bytes=2)
    line = shown(chosen, {name: 1})[-1]
    assert chosen.override is None and line.startswith("in YAML")
    assert yaml.safe_load(line.partition("): ")[2]) == {"model": {"tables": {name: {"dim": 8}}}}


FEATURES = ["data=parquet", "data.path=/logs", "+data.sparse.item={rows: 50}", "+data.sparse.price={bins: 10}"]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["+data.sparse.past={table: items}"], "data.sparse.past.table is 'items', which is no such feature", "=item"),
        (["+data.sparse.past={table: past}"], "which is no such feature, expected another", "table=item"),
        (
            ["+data.sparse.past={table: item}", "+data.sparse.more={table: past}"],
            "data.sparse.more.table is 'past', which shares a table itself",
            "table=item",
        ),
        (["+data.sparse.past={table: price}"], "'price', which has bins of numbers: no other", "table=null"),
        (
            ["+data.sparse.past={table: item}", "data.sparse.item.mapping=learned"],
            "'item', which has mapping learned",
            "data.sparse.item.mapping=vocab",
        ),
        (
            ["+data.sparse.past={table: item, rows: 9}"],
            "data.sparse.past shares the table of item and sets rows, expected them there",
            "past.rows=null",
        ),
        (["+model.tables.itme={dim: 8}"], "model.tables names 'itme', which is no table; the nearest is", "item"),
        (
            ["+data.sparse.past={table: item}", "+model.tables.past={dim: 8}"],
            "feature 'past' shares the table of item, expected the settings there",
            "model.tables.item",
        ),
        (["+model.tables.item={dim: 0}"], "model.tables.item.dim is 0", ""),
        (["+model.tables.item={pooling: max}"], "model.tables.item.pooling is 'max', expected one of: sum, mean", ""),
        (
            ["+model.tables.item={dim: 3}", "hardware=h100x8"],
            "model.tables.item.dim is 3, expected a multiple of 4 on a GPU",
            "model.tables.item.dim=4",
        ),
    ],
)
def test_tables_that_cannot_be_are_refused_with_the_way_out(overrides, message, hint):
    with pytest.raises(ConfigError) as refused:
        compose([*FEATURES, *overrides])
    assert message in refused.value.message and hint in refused.value.hint
