"""A mapping that this test adds, in one class: two nights of it train, publish and predict."""

import json

import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.config.compose import compose, from_yaml, to_yaml
from pipeline.core.errors import ConfigError
from pipeline.ingest import id_mappings
from pipeline.ingest.counts import VocabCounts
from pipeline.records import RESERVED_ROWS
from pipeline.specs import ID_MAPPINGS, id_mapping_names
from pipeline.specs.id_mapping import BINS, FittedMapping, IdMapping, id_table, no_rows_freed
from pipeline.store import Store

STAGES = "ingest,plan,partition,train,evaluate,publish"


class FrequencyHash(IdMapping):
    """Ids with ``min_count`` lookups get half of the rows; all others hash into the rest."""

    def counts(self, feature, vocabularies):
        return VocabCounts.sharing(feature.rows, vocabularies)

    def fit(self, feature, counts, before, day):
        if before is not None:
            return before
        frequent = counts.table().filter(pl.col("count") >= feature.min_count)
        frequent = frequent.sort(["count", "hash"], descending=[True, False]).head(feature.rows // 2)
        first = RESERVED_ROWS + frequent.height
        ids = id_table(frequent, np.arange(RESERVED_ROWS, first))
        return FittedMapping(rows=feature.rows, ids=ids, freed=no_rows_freed(), spread=(first, feature.rows - first))

    def apply(self, fitted, hashes):
        return (fitted.known_rows(hashes),)


OWN = FrequencyHash(
    name="frequency_hash",
    doc="frequent ids get a row each, others hash.",
    settings=("min_count",),
    vocabulary=True,
    ranked=True,
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(id_mappings, "SPECS", (*id_mappings.SPECS, OWN))
    monkeypatch.setattr(ID_MAPPINGS, "_specs", None)


def write_nights(folder):
    for day in (1, 2):
        rng = np.random.default_rng(day)
        ids = np.where(rng.random(4000) < 0.7, rng.integers(0, 20, 4000), rng.integers(20 * day, 400 * day, 4000))
        clicks = (rng.random(4000) < np.where(ids % 2, 0.7, 0.2)).astype(int)
        lines = [f"{click},{x:.2f},id{i}" for click, x, i in zip(clicks, rng.normal(size=4000), ids, strict=True)]
        (folder / f"2026-01-0{day}.csv").write_text("\n".join(["label,x,c", *lines]) + "\n")


def overrides(folder, day, *more):
    return [
        "data=csv",
        "data.name=own",
        "data.label.column=label",
        f"data.path='{folder}/{{day}}.csv'",
        f"data.day=2026-01-0{day}",
        "+data.dense={x: {}}",
        "+data.sparse={c: {mapping: frequency_hash, rows: 64, min_count: 5}}",
        f"store={folder}/store",
        "train.threads_per_rank=1",
        f"run=night{day}",
        f"stages=[{STAGES}]",
        f"launch.inline=[{STAGES}]",
        "train.global_batch=256",
        "train.precision=fp32",
        "model.embedding_dim=4",
        "model.bottom_mlp=[8]",
        "model.top_mlp=[8]",
        "gate.force='a short training'",
        "publish.quantise=fp32",
        *more,
    ]


def test_two_nights_of_a_mapping_of_ones_own(registered, tmp_path, capfd):
    write_nights(tmp_path)
    store = Store(f"{tmp_path}/store")
    assert main(["run", *overrides(tmp_path, 1)]) == 0, capfd.readouterr().err
    first = store.read_json("runs/night1/result.json")["stages"]["ingest"]["artifact"]
    more = (f"data.mapping_from={first}", "checkpoint.init_from=night1")
    assert main(["run", *overrides(tmp_path, 2, *more)]) == 0, capfd.readouterr().err
    result = store.read_json("runs/night2/result.json")
    dataset = result["stages"]["ingest"]["artifact"]
    record = store.read_json(f"{dataset}/transforms.json")["sparse"]["c"]
    assert (record["mapping"], record["rows"], record["vocab"]) == ("frequency_hash", 64, "vocab/c.parquet")
    assert record["spread"] == [34, 30] and result["train"]["steps"] > 5
    then, now = (pl.read_parquet(f"{store.url}/{path}/vocab/c.parquet") for path in (first, dataset))
    assert then.select("id", "row").equals(now.select("id", "row")), "the second night carries the first one's rows"
    capfd.readouterr()
    scored = ["predict", f"{tmp_path}/2026-01-02.csv", "--store", store.url, "--out", f"{tmp_path}/s.parquet", "--json"]
    assert main(scored) == 0
    assert json.loads(capfd.readouterr().out)["rows"] == 4000
    assert pl.read_parquet(tmp_path / "s.parquet")["probability"].is_between(0, 1).all()


def test_it_is_a_choice_like_the_others(registered):
    assert id_mapping_names()[:2] == ("vocab", "hash") and id_mapping_names()[-1] == "frequency_hash"
    compose(["data.sparse_defaults.mapping=frequency_hash"])


def test_bins_cannot_be_chosen_by_name():
    assert BINS not in id_mapping_names() and ID_MAPPINGS.get(BINS).numbers
    with pytest.raises(ConfigError, match="data.sparse_defaults.mapping is 'bins', expected one of: vocab, hash,"):
        compose(["data.sparse_defaults.mapping=bins"])


@pytest.mark.parametrize(
    ("feature", "message", "hint"),
    [
        (
            "mapping: hash, evict_after_days: 30",
            "data.sparse.c sets evict_after_days=30, but mapping hash does not use it",
            "data.sparse.c.evict_after_days=null, or data.sparse.c.mapping=vocab",
        ),
        (
            "mapping: learned, min_count: 2, when_full: keep",
            "data.sparse.c sets min_count=2 and when_full=keep, but mapping learned does not use them",
            "data.sparse.c.min_count=null data.sparse.c.when_full=null, or data.sparse.c.mapping=vocab",
        ),
        (
            "bins: 5, min_count: 2",
            "data.sparse.c sets min_count=2, but a feature with bins does not use it",
            "data.sparse.c.min_count=null",
        ),
    ],
)
def test_a_setting_that_the_mapping_of_a_feature_does_not_use_is_refused(feature, message, hint):
    with pytest.raises(ConfigError) as error:
        compose([f"+data.sparse.c={{{feature}}}"])
    assert (error.value.message, error.value.hint) == (message, hint)


def test_the_default_of_a_setting_may_be_one_that_some_mappings_do_not_use():
    config = compose(["data.sparse_defaults.min_count=5", "+data.sparse.c={mapping: hash}"])
    assert config.data.sparse_defaults.min_count == 5
    config.data.sparse["c"].evict_after_days = 30
    assert from_yaml(to_yaml(config)).data.sparse["c"].evict_after_days == 30  # as stores may hold it


@pytest.mark.parametrize("mapping", ID_MAPPINGS, ids=lambda each: each.name)
def test_the_settings_of_a_mapping_exist(mapping):
    defaults = compose([]).data.sparse_defaults
    assert all(hasattr(defaults, name) for name in mapping.settings)
    assert mapping.doc.endswith(".")
