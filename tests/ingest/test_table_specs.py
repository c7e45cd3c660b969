"""``data.format=tables``: a dataset of schema and profile alone."""

import json

import numpy as np
import pytest

from pipeline.config import DataConfig, TableDefaults, TableFigures
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.ingest.stage import ingest, raw_fingerprint
from pipeline.ingest.table_specs import harmonic, hit_curve
from pipeline.records import DatasetSchema, Profile
from pipeline.store import Store
from tests.keys import key_config


def planned_for(tmp_path, **tables):
    config = compose(["experiment=dlrmv2"])
    config.data = DataConfig(name="d", format="tables", tables=tables, dense_features=2)
    store = Store(str(tmp_path))
    with store.draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        artifact = draft.commit(ingest(config.data, config.ingest, config.seed, draft))
    return artifact, *(store.read_json(f"datasets/d/k/{name}.json") for name in ("schema", "profile"))


def test_the_planner_gets_schema_and_profile(tmp_path):
    artifact, schema, profile = planned_for(
        tmp_path, a=TableFigures(rows=100, pooling=3.0, zipf=0.0), b=TableFigures(rows=7, weighted=True)
    )
    schema, profile = DatasetSchema.from_json(schema), Profile.from_json(profile)
    assert sorted(artifact.files) == ["profile.json", "schema.json"]
    assert artifact.summary == {"tables": 2, "table_rows": 107}
    assert schema.dense == ("I1", "I2")
    assert [(c.name, c.rows, c.multi, c.weighted) for c in schema.sparse] == [
        ("a", 100, True, False),
        ("b", 7, False, True),
    ]
    assert schema.rows == {"train": 0, "test": 0}
    assert (profile.sparse["a"].pooling, profile.sparse["b"].pooling) == (3.0, 1.0)
    # Exponent 0: every row is looked up alike.
    assert np.allclose(profile.sparse["a"].hot_share, np.array(profile.sparse["a"].hot_rows) / 100)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.05, 2.0])
def test_zipf_sums_are_exact_enough(exponent):
    ks = np.array([1, 2, 100, 4096, 4097, 50_000, 300_000])
    exact = np.cumsum(np.arange(1, 300_001, dtype=np.float64) ** -exponent)[ks - 1]
    assert np.abs(harmonic(ks, exponent) / exact - 1).max() < 1e-7


def test_a_measured_curve_stands_for_zipf_and_ends_at_one():
    table = TableFigures(rows=1000, hot_rows=[10, 100], hot_share=[0.4, 0.9])
    assert hit_curve(table, 1.0) == ([10, 100, 1000], [0.4, 0.9, 1.0])
    whole = TableFigures(rows=100, hot_rows=[10, 100], hot_share=[0.4, 1.0])
    assert hit_curve(whole, 1.0) == ([10, 100], [0.4, 1.0])


def test_one_row_is_a_table_too():
    assert hit_curve(TableFigures(rows=1), 1.05) == ([1], [1.0])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (TableFigures(rows=0), "data.tables.t.rows is 0"),
        (TableFigures(rows=9, pooling=-1.0), "data.tables.t.pooling is -1"),
        (TableFigures(rows=9, hot_rows=[1, 3], hot_share=[0.5]), "lists of equal length"),
        (TableFigures(rows=9, hot_rows=[3, 1], hot_share=[0.5, 0.6]), "rows rising"),
        (TableFigures(rows=9, hot_rows=[1, 10], hot_share=[0.5, 1.0]), "within 1 to 9"),
        (TableFigures(rows=9, hot_rows=[1, 9], hot_share=[0.5, 0.9]), "shares rising to 1"),
        (TableFigures(rows=9, zipf=1.0, hot_rows=[9], hot_share=[1.0]), "both zipf and a hit curve"),
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path, table, words):
    with pytest.raises(ConfigError, match=words) as caught:
        planned_for(tmp_path, t=table)
    assert "data.tables.t" in caught.value.hint


def test_no_tables_and_bad_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing to plan") as caught:
        planned_for(tmp_path)
    assert "+data.tables.user=" in caught.value.hint
    with pytest.raises(ConfigError, match="'a.b'"):
        planned_for(tmp_path, **{"a.b": TableFigures(rows=9)})


def test_the_key_covers_what_the_profile_depends_on():
    config = compose(["experiment=dlrmv2"])
    key = json.dumps([key_config("ingest", config), raw_fingerprint(config.data)])
    config.data.sparse_defaults.rows = 7
    config.seed = 3
    assert json.dumps([key_config("ingest", config), raw_fingerprint(config.data)]) == key
    config.data.table_defaults = TableDefaults(zipf=0.9)
    assert json.dumps([key_config("ingest", config), raw_fingerprint(config.data)]) != key


def test_logs_do_not_depend_on_table_specs():
    covered = key_config("ingest", compose([]))["data"]
    assert not {"tables", "table_defaults", "dense_features"} & set(covered)


def test_dlrmv2_is_the_benchmark():
    config = compose(["experiment=dlrmv2"])
    tables = config.data.tables.values()
    assert (len(tables), sum(t.rows for t in tables), sum(t.pooling for t in tables)) == (26, 204_184_588, 214)
    assert max(table.rows for table in tables) == 40_000_000
    assert (config.model.embedding_dim, config.train.global_batch) == (128, 65_536)
    assert round(sum(t.rows for t in tables) * (128 + 1) * 4 / 2**30, 2) == 98.12
