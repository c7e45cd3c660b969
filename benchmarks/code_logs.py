"""Six logs of codes for ``make bench-init``, each with the kinds of its columns as a human types them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import words
from pipeline.config.compose import compose


@dataclass(frozen=True)
class CodeLog:
    """A log with the label ``clicked``. ``kinds``: dense | sparse of each other column."""

    name: str
    rows: pl.DataFrame
    kinds: dict[str, str]

    @property
    def hand(self) -> list[str]:
        """Overrides that write the human-typed schema."""
        typed = [f"+data.{kind}.{column}={{}}" for column, kind in self.kinds.items()]
        return [
            *words("""data=parquet data.label.column=clicked data.sparse_defaults.min_count=5
                data.sparse_defaults.rows=5000"""),
            *typed,
        ]


def code_logs(rows: int, adult: Path) -> list[CodeLog]:
    """The generated logs of ``rows`` rows, and Adult in codes if the file ``adult`` exists."""
    logs = [_ratings(rows), _hashed(rows), _contexts(rows), _blocks(rows), _large(rows)]
    return [*logs, _adult(adult)] if adult.is_file() else logs


def _log(name: str, columns: dict[str, np.ndarray], logits: np.ndarray, dense: tuple[str, ...] = ()) -> CodeLog:
    """A log whose clicks are drawn by ``logits``; all columns but ``dense`` are codes."""
    drawn = np.random.default_rng(len(name)).random(len(logits))
    clicked = (drawn < 1 / (1 + np.exp(-logits))).astype(np.int64)
    kinds = {column: "dense" if column in dense else "sparse" for column in columns}
    return CodeLog(name, pl.DataFrame({**columns, "clicked": clicked}), kinds)


def _ratings(rows: int) -> CodeLog:
    """Uniform users and movies with latent factors."""
    rng = np.random.default_rng(21)
    user, movie = rng.integers(1, 901, rows), rng.integers(1, 401, rows)
    users, movies = rng.normal(size=(901, 4)), rng.normal(size=(401, 4))
    logits = (users[user] * movies[movie]).sum(axis=1) / 2 + users[user, 0] + movies[movie, 0]
    return _log("codes_ratings", {"user": user, "movie": movie}, logits)


def _hashed(rows: int) -> CodeLog:
    """Ids of a power law, numbered in the order of a hash."""
    rng = np.random.default_rng(22)
    columns, logits = {}, np.full(rows, -0.5)
    for name, size in (("visitor", 2000), ("banner", 300), ("channel", 60)):
        drawn = rng.permutation(size)[(rng.zipf(1.3, rows) - 1) % size]
        columns[name] = drawn
        logits += rng.normal(size=size)[drawn]
    return _log("codes_hashed", columns, logits)


def _contexts(rows: int) -> CodeLog:
    """Codes of a context, with quantities mixed in."""
    rng = np.random.default_rng(23)
    columns, logits = {}, np.full(rows, -0.5)
    for name, size in (("user", 900), ("item", 500), ("weekday", 7), ("country", 70), ("city", 230)):
        columns[name] = rng.integers(0, size, rows)
        logits += 0.7 * rng.normal(size=size)[columns[name]]
    columns["age"] = np.clip(np.round(rng.normal(38, 12, rows)), 16, 90).astype(np.int64)
    columns["price"] = np.round(rng.lognormal(3, 1, rows)).astype(np.int64)
    columns["cnt"] = rng.geometric(0.2, rows)
    logits += (columns["age"] - 38) / 20 - 0.3 * np.log1p(columns["price"]) + 0.05 * columns["cnt"]
    return _log("codes_contexts", columns, logits, dense=("age", "price", "cnt"))


def _blocks(rows: int) -> CodeLog:
    """Codes without telling names, in blocks of values with gaps between them."""
    rng = np.random.default_rng(24)
    columns, logits = {}, np.zeros(rows)
    for name, blocks, size in (("f1", 6, 30), ("f2", 4, 12), ("f3", 9, 50)):
        place = rng.integers(0, blocks * size, rows)
        columns[name] = 1000 * (1 + place // size) + place % size
        logits += rng.normal(size=blocks * size)[place]
    columns["f4"] = np.round(rng.gamma(3, 20, rows)).astype(np.int64)
    logits += columns["f4"] / 60 - 1
    return _log("codes_blocks", columns, logits, dense=("f4",))


def _large(rows: int) -> CodeLog:
    """A rare click: users of a row or two, cities by frequency, shops of which some are unknown, and a count."""
    rng = np.random.default_rng(25)
    city, shop = (rng.zipf(1.5, rows) - 1) % 300, rng.integers(0, 80, rows)
    columns = {
        "user": rng.integers(1, 5 * rows, rows),
        "city": city,
        "shop": np.where(rng.random(rows) < 0.05, -1, shop),
        "user_visits": rng.poisson(4, rows),
    }
    logits = rng.normal(size=300)[city] + rng.normal(size=80)[shop] + 0.1 * columns["user_visits"] - 5.5
    return _log("codes_large", columns, logits, dense=("user_visits",))


def _adult(path: Path) -> CodeLog:
    """Adult, its words replaced by codes in the order of the alphabet."""
    names = list(compose(["experiment=adult", "data.path=x"]).data.columns)
    lines = [line.split(", ") for line in path.read_text().split("\n") if line.strip()]
    frame = pl.DataFrame(lines, schema=names, orient="row")
    columns, kinds = [], {}
    for name in names[:-1]:
        number = frame[name].cast(pl.Int64, strict=False)
        kinds[name] = "sparse" if number.null_count() else "dense"
        codes = frame[name].rank("dense") if kinds[name] == "sparse" else number
        columns.append(codes.cast(pl.Int64).alias(name))
    clicked = (frame[names[-1]].str.starts_with(">50K")).cast(pl.Int64).alias("clicked")
    return CodeLog("codes_adult", pl.DataFrame([*columns, clicked]), kinds)
