"""Synthetic logs: seeded, calibrated, learnable in principle, the same however they are cut."""

import fsspec
import numpy as np
import polars as pl
import pytest

from pipeline.config import Config
from pipeline.core.errors import DataError
from pipeline.ingest import synthetic
from pipeline.ingest.ground_truth import planted_blocks, planted_truth, quad_logits
from pipeline.ingest.schema import CRITEO_COLUMNS
from pipeline.ingest.stage import raw_fingerprint

from .test_ingest import yaml_config


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_ROWS", 4096)


def small(*overrides: str) -> Config:
    return yaml_config("synthetic", "data.synthetic.rows=20000", *overrides)


def entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())


def test_the_log_is_criteo_shaped_and_calibrated():
    config = small()
    frame = pl.concat(list(synthetic.chunks(config.data.synthetic, config.seed)))
    assert frame.columns[:40] == CRITEO_COLUMNS
    assert frame.height == 20_000
    assert frame["C1"].str.contains("^[0-9a-f]{8}$").all()
    assert frame["day"].value_counts(sort=True)["count"].to_list() == [5000] * 4
    rate = frame["label"].cast(pl.Int32).mean()
    assert rate == pytest.approx(0.25, abs=0.02)
    p = frame["true_probability"].cast(pl.Float64).to_numpy()
    assert p.mean() == pytest.approx(rate, abs=0.01)
    bayes_ne = entropy(p) / entropy(np.array([p.mean()]))
    assert 0.7 < bayes_ne < 0.86
    counts = frame["I2"].cast(pl.Int32, strict=False)
    assert counts.min() < 0 and 0.03 < (frame["I2"] == "").mean() < 0.07


def test_the_same_seed_gives_the_same_dataset_and_another_seed_another(run_ingest, monkeypatch):
    first = run_ingest(small("data.synthetic.rows=5000"))
    monkeypatch.setattr(synthetic, "_ROW_BYTES", 1)  # more chunks to a block
    assert run_ingest(small("data.synthetic.rows=5000")).checksums == first.checksums
    assert run_ingest(small("data.synthetic.rows=5000", "seed=7")).checksums != first.checksums


def test_a_dataset_of_it_keeps_probability_and_day(run_ingest):
    dataset = run_ingest(small("data.split.by=day"))
    assert dataset.schema.true_probability
    test = dataset.split("test")
    assert test["day"].unique().to_list() == [3]
    assert test.schema["true_probability"] == pl.Float32
    assert dataset.schema.rows == {"train": 15_000, "test": 5_000}
    assert dataset.summary["bytes_in"] > 20_000 * 200


def test_drift_turns_the_effects_day_by_day():
    def slope(drift: float, day: int) -> np.ndarray:
        config = small(f"data.synthetic.drift={drift}").data.synthetic
        truth = planted_truth(config, 1)
        return truth.dense.at(drift * day)

    assert np.allclose(slope(0.0, 0), slope(0.0, 3))
    assert not np.allclose(slope(0.3, 0), slope(0.3, 3))
    frames = [
        pl.concat(
            list(synthetic.chunks(small("data.synthetic.rows=8000", f"data.synthetic.drift={d}").data.synthetic, 1))
        )
        for d in (0.0, 0.3)
    ]
    same = frames[0]["true_probability"].to_numpy() == frames[1]["true_probability"].to_numpy()
    assert frames[0].select("I1", "C1").equals(frames[1].select("I1", "C1"))
    assert not same.any()


@pytest.mark.parametrize("suffix", ["", *(pytest.param(end, marks=pytest.mark.slow) for end in (".gz", ".zst"))])
def test_write_tsv_gives_the_same_rows_as_a_criteo_file(run_ingest, suffix):
    url = f"memory://synthetic/log.tsv{suffix}"
    config = small("data.synthetic.rows=6000")
    assert synthetic.write_tsv(config.data.synthetic, config.seed, url) == 6000
    dataset = run_ingest(yaml_config("criteo", f"data.path={url}", "data.sparse_defaults.min_count=1"))
    direct = run_ingest(config)
    columns = ["label", *dataset.schema.dense, *(column.name for column in dataset.schema.sparse)]
    assert dataset.all_rows.select(columns).equals(direct.all_rows.select(columns))
    if not suffix:
        with fsspec.open(url) as source:
            assert len(source.readline().split(b"\t")) == 40
        assert dataset.summary["bytes_in"] == direct.summary["bytes_in"]


def test_fingerprint_and_unknown_columns(run_ingest):
    assert raw_fingerprint(small().data) == synthetic.VERSION
    with pytest.raises(DataError, match="the synthetic log has no column 'C99'"):
        run_ingest(small("+data.sparse.C99.column=C99".lstrip("+")))


def test_planted_blocks_hold_every_feature_once_and_all_pairs_within_interact():
    config = small("data.synthetic.blocks=4").data.synthetic
    blocks = planted_blocks(config, 1)
    assert sorted(len(block) for block in blocks) == [6, 6, 7, 7]
    assert sorted(sum(blocks, [])) == sorted(f"C{i + 1}" for i in range(26))
    home = {name: number for number, block in enumerate(blocks) for name in block}
    pairs = [(f"C{a + 1}", f"C{b + 1}") for a, b, _, _ in planted_truth(config, 1).pairs]
    assert all(home[a] == home[b] for a, b in pairs)
    assert len(set(pairs)) == 2 * 21 + 2 * 15
    assert planted_blocks(config, 2) != blocks


def test_the_pairs_of_blocks_add_the_asked_spread_to_the_log_odds():
    settings = ("data.synthetic.first_order_effect=0", "data.synthetic.dense_effect=0", "data.synthetic.zipf=0")
    config = small("data.synthetic.blocks=4", "data.synthetic.pairwise_effect=1.5", *settings).data.synthetic
    spreads = []
    for seed in range(3):
        truth = planted_truth(config, seed)
        chunk = synthetic._draw_chunk(truth, np.random.default_rng(seed), np.zeros(8192, int))
        spreads.append(synthetic._logits(truth, chunk, config).std())
    assert np.mean(spreads) == pytest.approx(1.5, rel=0.25)


def test_a_log_without_blocks_is_what_it_was_before_there_were_any():
    frame = next(synthetic.chunks(small().data.synthetic, 1))
    assert frame.row(0)[14:18] == ("6220b55c", "785416ac", "95c05919", "5b828c1d")
    assert frame["true_probability"].head(3).to_list() == pytest.approx([0.79366809, 0.07236996, 0.58245659], rel=1e-6)


def test_quads_add_a_product_of_four_effects_and_the_asked_spread():
    settings = ("data.synthetic.first_order_effect=0", "data.synthetic.dense_effect=0", "data.synthetic.zipf=0")
    quads = ("data.synthetic.pairwise_effect=0", "data.synthetic.quads=3", "data.synthetic.quad_effect=1.2")
    config, spreads = small(*settings, *quads).data.synthetic, []
    for seed in range(6):
        truth = planted_truth(config, seed)
        chunk = synthetic._draw_chunk(truth, np.random.default_rng(seed), np.zeros(8192, int))
        spreads.append(synthetic._logits(truth, chunk, config).std())
    assert np.mean(spreads) == pytest.approx(1.2, rel=0.25)
    assert len({feature for four in truth.quads for feature in four}) == 12
    # The fourth mixed difference, between ids 0 and 1 of four features, is the product of the four differences.
    four, corners = truth.quads[0], np.zeros((26, 16), int)
    signs = np.ones(16)
    for bit, feature in enumerate(four):
        corners[feature] = np.arange(16) >> bit & 1
        signs *= 2 * corners[feature] - 1
    expected = np.prod([effects.start[1] - effects.start[0] for effects in four.values()])
    found = (signs * quad_logits(truth.quads[:1], corners, 0.0, 1.0)).sum()
    assert found == pytest.approx(expected / np.sqrt(15), rel=1e-5)
