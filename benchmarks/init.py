"""``make bench-init``: AUC with the schema that ``nightjar init`` writes, beside that with a hand-written one.

The logs: the census (Adult) without and with a header line, Criteo's sample, flights, a generated log with lists,
weights, maps and vectors as Parquet and as JSON lines, and six logs of codes, of which the share of columns that are
typed as by a human is told too. The guessed schema runs as it was written; both see the same rows with the same model,
and are judged by the same held-out rows: a fifth by hash, of flights the last tenth of the days. ``ratio``: the
smallest of all AUCs by guess over those by hand. A log that is not there is left out.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from benchmarks.harness import finish, nightjar, options, result_of, silent, words
from benchmarks.logs import TEST, TRAIN, clicked, drawn_fold, flights, flights_settings, typed
from pipeline.config.compose import compose

SHARED = Path(__file__).parents[2] / "shared/data"
MODEL = words("model.embedding_dim=8 model.bottom_mlp=[64] model.top_mlp=[64,32] train.precision=fp32 hardware=laptop")
ADULT = [*MODEL, "train.global_batch=256", "train.epochs=4", "train.warmup_steps=50"]
GENERATED = [*MODEL, "train.global_batch=256", "train.epochs=2", "train.warmup_steps=50"]
CODES = words("""data=parquet data.label.column=clicked data.sparse_defaults.min_count=5
    data.sparse_defaults.rows=5000""")
MIXED = [
    *words("data.label.column=clicked data.dense_transform=standardise data.sparse_defaults.min_count=5"),
    "+data.dense={price: {transform: log1p_standardise}, embedding: {width: 16}}",
    "+data.sparse={user_id: {rows: 5000}, ad: {}, pages: {holds: list}, topics: {weights: topic_scores}}",
    "+data.sparse.interests={holds: map}",
]
LAST_DAYS = 36  # of the flights' year, held out
BY_FOLD = words("data.day_column=fold data.split.by=day")
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Log:
    """A log and its schema by hand.

    ``rows``: a file, lines of text, or a frame; ``hand``: overrides that name its columns; ``shared``: those of the
    model and the split, for both; ``kinds``: of columns, as a human types them.
    """

    name: str
    rows: Path | list[str] | pl.DataFrame
    hand: list[str]
    shared: list[str]
    separator: str = ", "
    header: str = ""
    kinds: dict[str, str] = field(default_factory=dict)

    def write(self, folder: str, seed: int | None) -> Path:
        """The log as a file, with a column ``fold`` where there is a seed; equal lines lie in one fold."""
        if isinstance(self.rows, Path):
            return self.rows
        if isinstance(self.rows, pl.DataFrame):
            folds = [_fold(str(number), seed) for number in range(self.rows.height)]
            frame = self.rows if seed is None else self.rows.with_columns(fold=pl.Series(folds))
            path = Path(folder, f"log{seed or ''}.{'jsonl' if self.name.endswith('jsonl') else 'parquet'}")
            if path.suffix == ".parquet":
                frame.write_parquet(path)
                return path
            texts = [json.dumps({**row, "interests": _map(row["interests"])}) for row in frame.iter_rows(named=True)]
        else:
            path = Path(folder, f"log{seed or ''}.csv")
            texts = [line + (f"{self.separator}{_fold(line, seed)}" if seed else "") for line in self.rows]
            if self.header:
                texts.insert(0, self.header + (f"{self.separator}fold" if seed else ""))
        path.write_text("\n".join(texts) + "\n")
        return path


def _fold(text: str, seed: int | None) -> int:
    return TRAIN if drawn_fold(f"{seed} {text}") else TEST


def _map(pairs: list[dict[str, Any]]) -> dict[str, float]:
    return {pair["key"]: pair["value"] for pair in pairs}


def main() -> None:
    given = options(
        __doc__,
        seeds=(3, "each with rows of its own held out"),
        rows=(40_000, "of the generated logs"),
        logs=([], "names of those that are taken (default: all)"),
    )
    silent()
    areas, shares = dict[str, dict[str, float]](), dict[str, float]()
    for log in every_log(given.rows):
        if given.logs and log.name not in given.logs:
            continue
        runs = [measured(log, seed) for seed in range(1, given.seeds + 1)]
        hand, guess = np.array([areas_of for areas_of, _ in runs]).T
        areas[log.name] = {"hand": round(float(hand.mean()), 5), "init": round(float(guess.mean()), 5)}
        print(f"{log.name:16} {areas[log.name]} {(guess - hand).mean():+.5f} ± {(guess - hand).std():.5f}", flush=True)
        if log.kinds:
            alike = [runs[0][1].get(column) == kind for column, kind in log.kinds.items()]
            shares[log.name] = round(sum(alike) / len(alike), 4)
    ratios = [each["init"] / each["hand"] for each in areas.values()]
    worst = min((each["init"] - each["hand"] for each in areas.values()), default=0.0)
    finish("init", min(ratios, default=None), worst=worst, seeds=given.seeds, auc=areas, typed=shares)


def measured(log: Log, seed: int) -> tuple[tuple[float, float], dict[str, str]]:
    """AUC by hand and by guess on the same held-out rows, and the kinds of the guessed columns."""
    with tempfile.TemporaryDirectory() as folder:
        nightjar("init", str(log.write(folder, None)), "--name", "guessed", "-cd", f"{folder}/my")
        schema = yaml.safe_load(Path(folder, "my/data/guessed.yaml").read_text())
        own = [f"data.columns=[{','.join([*schema['columns'], 'fold'])}]"] if "columns" in schema else []
        path = log.write(folder, seed)
        shared = [f"data.path={path}", f"store={folder}", f"seed={seed}", *log.shared]
        nightjar("run", "run=hand", *log.hand, "data.name=hand", *shared)
        nightjar("run", "run=guess", "-cd", f"{folder}/my", "data=guessed", *shared, *own)
        hand, guess = (float(result_of(folder, run)["eval"]["auc"]) for run in ("hand", "guess"))
    kinds = {
        (settings or {}).get("column", name): kind
        for kind in ("sparse", "dense")  # a number that is looked up too is dense
        for name, settings in (schema[kind] or {}).items()
    }
    return (hand, guess), kinds


def every_log(rows: int) -> list[Log]:
    """All logs that are there."""
    logs, census = [], list[str]()
    names = list(compose(["experiment=adult", "data.path=x"]).data.columns)
    if (SHARED / "adult.data").is_file():
        census = [line for line in (SHARED / "adult.data").read_text().split("\n") if line.strip()]
        hand = ["data=adult", f"data.columns=[{','.join([*names, 'fold'])}]"]
        logs.append(Log("adult", census, hand, [*ADULT, *BY_FOLD]))
        hand = ["data=adult", "data.header=true", "data.columns=[]"]
        logs.append(Log("adult_header", census, hand, [*ADULT, *BY_FOLD], header=", ".join(names)))
    if (SHARED / "criteo_sample.tsv").is_file():
        lines = [line for line in (SHARED / "criteo_sample.tsv").read_text().split("\n") if line.strip()]
        columns = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)), "fold"]
        shared = [*MODEL, "train.global_batch=128", "train.warmup_steps=10", f"data.columns=[{','.join(columns)}]"]
        logs.append(Log("criteo", lines, ["data=criteo"], [*shared, *BY_FOLD], separator="\t"))
    if (source := flights()) is not None:
        logs.append(_flights(source))
    for name, columns, dense, clicks in code_logs(rows):
        kinds = {column: "dense" if column in dense else "sparse" for column in columns}
        frame = pl.DataFrame({**columns, "clicked": clicks.astype(np.int64)})
        logs.append(Log(name, frame, [*CODES, *typed(kinds)], [*GENERATED, *BY_FOLD], kinds=kinds))
    if census:
        frame, kinds = _adult_in_codes(census, names)
        logs.append(Log("codes_adult", frame, [*CODES, *typed(kinds)], [*GENERATED, *BY_FOLD], kinds=kinds))
    made = mixed(rows)
    for kind in ("parquet", "jsonl"):
        logs.append(Log(f"mixed_{kind}", made, [f"data={kind}", *MIXED], [*GENERATED, *BY_FOLD]))
    return logs


def _flights(source: Path) -> Log:
    """Judged by the last days of the year; a row's day is no feature."""
    settings = flights_settings(source)
    hand = [each for each in settings if "data" in each.split("=")[0]]
    left_out = ("data.name", "data.path", "data.sparse.date", "data.sparse.day=")
    by_hand = [each for each in hand if not any(name in each for name in left_out)]
    split = words(f"data.day_column=date data.split.by=day data.split.test_days={LAST_DAYS}")
    model = [each for each in settings if each not in hand]
    return Log("flights", source, [*by_hand, "+data.sparse.day_of_month={column: day}"], [*model, *split])


def mixed(rows: int) -> pl.DataFrame:
    """A log whose clicks depend on a number, ids, lists, weighted ids, maps and a vector."""
    rng = np.random.default_rng(11)
    effect, direction = rng.normal(size=(4, 500)), rng.normal(size=16) / 4
    user, ad = rng.zipf(1.3, rows) % 2000, rng.integers(0, 300, rows)
    price = np.round(rng.lognormal(1, 1, rows), 2)
    vectors = np.round(rng.normal(size=(rows, 16)), 4)
    lists = {
        name: [rng.choice(60, rng.integers(1, 5), replace=False) for _ in range(rows)]
        for name in ("pages", "topics", "interests")
    }
    weights = {name: [np.round(rng.random(len(each)), 3) for each in lists[name]] for name in ("topics", "interests")}
    logits = effect[0, user % 500] + effect[1, ad % 500] - 0.5 * np.log1p(price) + vectors @ direction
    logits += np.array([effect[2, each].mean() for each in lists["pages"]])
    for name, row in (("topics", 3), ("interests", 2)):
        pairs = zip(lists[name], weights[name], strict=True)
        logits += np.array([(effect[row, ids + 100] * each).sum() for ids, each in pairs])
    clicks = clicked(rng, logits - 1.5).astype(np.int64)
    interests = [
        [{"key": f"i{one}", "value": weight} for one, weight in zip(ids, each, strict=True)]
        for ids, each in zip(lists["interests"], weights["interests"], strict=True)
    ]
    columns = {"clicked": clicks, "user_id": user, "ad": [f"a{one}" for one in ad], "price": price}
    columns |= {"site": ["main"] * rows, "pages": [each.tolist() for each in lists["pages"]]}
    columns["topics"] = [[f"t{one}" for one in each] for each in lists["topics"]]
    columns["topic_scores"] = [each.tolist() for each in weights["topics"]]
    return pl.DataFrame(columns | {"interests": interests, "embedding": vectors.tolist()})


def code_logs(rows: int) -> list[tuple[str, Columns, tuple[str, ...], np.ndarray]]:
    """Five logs: name, columns (codes, but for those that are named next), and clicks."""
    rng = np.random.default_rng(21)  # uniform users and movies with latent factors
    ratings = {"user": rng.integers(1, 901, rows), "movie": rng.integers(1, 401, rows)}
    users, movies = (rng.normal(size=(size, 4))[ratings[name]] for name, size in (("user", 901), ("movie", 401)))
    logs = [("codes_ratings", ratings, (), (users * movies).sum(axis=1) / 2 + users[:, 0] + movies[:, 0])]
    logs += [_hashed(rows), _contexts(rows), _blocks(rows), _rare(rows)]
    return [
        (name, columns, dense, clicked(np.random.default_rng(len(name)), logits))
        for name, columns, dense, logits in logs
    ]


def _hashed(rows: int) -> tuple[str, Columns, tuple[str, ...], np.ndarray]:
    """Ids of a power law, numbered in the order of a hash."""
    rng = np.random.default_rng(22)
    columns, logits = {}, np.full(rows, -0.5)
    for name, size in (("visitor", 2000), ("banner", 300), ("channel", 60)):
        columns[name] = rng.permutation(size)[(rng.zipf(1.3, rows) - 1) % size]
        logits += rng.normal(size=size)[columns[name]]
    return "codes_hashed", columns, (), logits


def _contexts(rows: int) -> tuple[str, Columns, tuple[str, ...], np.ndarray]:
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
    return "codes_contexts", columns, ("age", "price", "cnt"), logits


def _blocks(rows: int) -> tuple[str, Columns, tuple[str, ...], np.ndarray]:
    """Codes without telling names, in blocks of values with gaps between them."""
    rng = np.random.default_rng(24)
    columns, logits = {}, np.zeros(rows)
    for name, blocks, size in (("f1", 6, 30), ("f2", 4, 12), ("f3", 9, 50)):
        place = rng.integers(0, blocks * size, rows)
        columns[name] = 1000 * (1 + place // size) + place % size
        logits += rng.normal(size=blocks * size)[place]
    columns["f4"] = np.round(rng.gamma(3, 20, rows)).astype(np.int64)
    return "codes_blocks", columns, ("f4",), logits + (columns["f4"] / 60 - 1)


def _rare(rows: int) -> tuple[str, Columns, tuple[str, ...], np.ndarray]:
    """A rare click: users of a row or two, cities by frequency, shops of which some are unknown, and a count."""
    rng = np.random.default_rng(25)
    city, shop = (rng.zipf(1.5, rows) - 1) % 300, rng.integers(0, 80, rows)
    columns = {"user": rng.integers(1, 5 * rows, rows), "city": city}
    columns["shop"] = np.where(rng.random(rows) < 0.05, -1, shop)
    columns["user_visits"] = rng.poisson(4, rows)
    logits = rng.normal(size=300)[city] + rng.normal(size=80)[shop] + 0.1 * columns["user_visits"] - 5.5
    return "codes_large", columns, ("user_visits",), logits


def _adult_in_codes(census: list[str], names: list[str]) -> tuple[pl.DataFrame, dict[str, str]]:
    """Adult, its words replaced by codes in the order of the alphabet, and the kinds of its columns."""
    frame = pl.DataFrame([line.split(", ") for line in census], schema=names, orient="row")
    columns, kinds = [], {}
    for name in names[:-1]:
        number = frame[name].cast(pl.Int64, strict=False)
        kinds[name] = "sparse" if number.null_count() else "dense"
        codes = frame[name].rank("dense") if kinds[name] == "sparse" else number
        columns.append(codes.cast(pl.Int64).alias(name))
    label = frame[names[-1]].str.starts_with(">50K").cast(pl.Int64).alias("clicked")
    return pl.DataFrame([*columns, label]), kinds


if __name__ == "__main__":
    main()
