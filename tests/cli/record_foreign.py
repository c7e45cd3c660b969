"""Writes ``recorded/foreign.parquet``: held-out rows with the scores of models of scikit-learn, by its own defaults.

    python -m tests.cli.record_foreign

The log is made up: users who click more or less, items, countries, four numbers, and in one country another taste. The
last third of the rows by time is held out. Scores are probabilities as float32; the file's metadata name the release.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import sklearn
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.naive_bayes import BernoulliNB

FILE = Path(__file__).parent / "recorded" / "foreign.parquet"
ROWS, HELD_OUT = 30_000, 10_000
COUNTRIES = {"de": 0.0, "fr": 0.3, "br": 0.6, "jp": -1.0}
CODES = ["user", "item", "country", "level0", "level1", "level2", "taste"]
NUMBERS = ["x0", "x1", "x2", "x3"]


def main() -> None:
    log = made_up_log()
    test = np.arange(ROWS) >= ROWS - HELD_OUT
    hashed = hash_features(log, CODES)
    without_items = hash_features(log, [name for name in CODES if name != "item"])
    numbers = np.column_stack([log[name].to_numpy() for name in NUMBERS])
    codes = np.column_stack([log[name].cast(pl.String).rank("dense").to_numpy() % 250 for name in CODES])
    elsewhere = (log["country"] != "jp").to_numpy()
    models = {
        "logistic": (LogisticRegression(max_iter=300), hashed, ~test),
        "without_items": (LogisticRegression(max_iter=300), without_items, ~test),
        "balanced": (LogisticRegression(max_iter=300, class_weight="balanced"), hashed, ~test),
        "trees": (HistGradientBoostingClassifier(random_state=0), np.column_stack([numbers, codes]), ~test),
        "bayes": (BernoulliNB(), hashed, ~test),
        "sgd": (SGDClassifier(loss="log_loss", alpha=1e-4, random_state=0), hashed, ~test),
        "not_of_jp": (LogisticRegression(max_iter=300), hashed, ~test & elsewhere),
    }
    labels, held_out = log["label"].to_numpy(), log.filter(pl.Series(test))
    scores = {}
    for name, (model, inputs, rows) in models.items():
        model.fit(inputs[rows], labels[rows])
        scores[name] = pl.Series(model.predict_proba(inputs[test])[:, 1].astype(np.float32))
    FILE.parent.mkdir(exist_ok=True)
    held_out.select("label", "country", "user", "time").with_columns(**scores).write_parquet(
        FILE, compression="zstd", compression_level=19, metadata={"made by": f"scikit-learn {sklearn.__version__}"}
    )


def made_up_log() -> pl.DataFrame:
    """``ROWS`` rows in the order of time, with the label that a truth with interactions draws."""
    rng = np.random.default_rng(42)
    users, items = rng.integers(0, 600, ROWS), rng.integers(0, 200, ROWS)
    country = rng.choice(list(COUNTRIES), ROWS, p=[0.4, 0.3, 0.15, 0.15])
    x = rng.normal(size=(ROWS, 4))
    odds = -1.5 + rng.normal(0, 0.7, 600)[users] + rng.normal(0, 0.8, 200)[items] + 0.7 * x[:, 0]
    odds += np.array([COUNTRIES[each] for each in country]) - 0.4 * x[:, 1] * (x[:, 2] > 0)
    odds += np.where(country == "jp", 1.2, -0.2) * x[:, 3]
    levels = (2 * x).round().astype(int)
    return pl.DataFrame(
        {
            "label": (rng.random(ROWS) < 1 / (1 + np.exp(-odds))).astype(np.int8),
            "country": country,
            "user": users.astype(np.int16),
            "item": items,
            "time": 1_760_000_000 + 6 * np.arange(ROWS),
            **{f"level{i}": levels[:, i] for i in range(3)},
            "taste": [f"{name} {level}" for name, level in zip(country, levels[:, 3], strict=True)],
            **{name: x[:, i] for i, name in enumerate(NUMBERS)},
        }
    )


def hash_features(log: pl.DataFrame, names: list[str]):
    """The rows as sparse indicators of ``name=value``, 2**14 of them, by the hashing trick."""
    words = []
    for row in log.select(names).rows():
        words.append([f"{name}={value}" for name, value in zip(names, row, strict=True)])
    return FeatureHasher(2**14, input_type="string", alternate_sign=False).transform(words)


if __name__ == "__main__":
    main()
