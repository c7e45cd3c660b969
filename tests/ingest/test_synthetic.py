"""Synthetic logs: seeded, calibrated, learnable in principle, the same however they are cut."""

import fsspec
import numpy as np
import polars as pl
import pytest

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.ingest import raw_fingerprint, synthetic
from pipeline.ingest.spec import CRITEO_COLUMNS

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
    first = run_ingest(small("data.synthetic.rows=9000"))
    monkeypatch.setattr(synthetic, "_ROW_BYTES", 1)  # more chunks to a block
    assert run_ingest(small("data.synthetic.rows=9000")).checksums == first.checksums
    assert run_ingest(small("data.synthetic.rows=9000", "seed=7")).checksums != first.checksums


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
        truth = synthetic._truth(config, 1)
        return truth.dense.at(drift * day)

    assert np.allclose(slope(0.0, 0), slope(0.0, 3))
    assert not np.allclose(slope(0.3, 0), slope(0.3, 3))
    frames = [
        pl.concat(list(synthetic.chunks(small(f"data.synthetic.drift={d}").data.synthetic, 1))) for d in (0.0, 0.3)
    ]
    same = frames[0]["true_probability"].to_numpy() == frames[1]["true_probability"].to_numpy()
    assert frames[0].select("I1", "C1").equals(frames[1].select("I1", "C1"))
    assert not same.any()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_write_tsv_gives_the_same_rows_as_a_criteo_file(run_ingest, suffix):
    url = f"memory://synthetic/log.tsv{suffix}"
    config = small("data.synthetic.rows=6000")
    assert synthetic.write_tsv(config, url) == 6000
    dataset = run_ingest(yaml_config("criteo", f"data.path={url}", "data.sparse_defaults.min_count=1"))
    direct = run_ingest(config)
    columns = ["label", *dataset.schema.dense, *(column.name for column in dataset.schema.sparse)]
    assert dataset.all_rows.select(columns).equals(direct.all_rows.select(columns))
    if not suffix:
        with fsspec.open(url) as source:
            assert len(source.readline().split(b"\t")) == 40
        assert dataset.summary["bytes_in"] == direct.summary["bytes_in"]


def test_fingerprint_and_unknown_columns(run_ingest):
    assert raw_fingerprint(small()) == synthetic.VERSION
    with pytest.raises(DataError, match="the synthetic log has no column 'C99'"):
        run_ingest(small("+data.sparse.C99.column=C99".lstrip("+")))
