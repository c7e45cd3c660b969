"""``make bench-init``: AUC with the schema that ``nightjar init`` writes, beside that with a hand-written one.

The logs: the census (Adult) without and with a header line, Criteo's sample, flights, and a generated log with lists,
weights, maps and vectors as Parquet and as JSON lines, and six logs of codes (``code_logs``), of which the share of
columns that are typed as by a human is printed too. The guessed schema runs as it was written; both see the same
rows with the same model, and are judged by the same held-out rows: a fifth by hash, of flights the last tenth of the
days. ``ratio``: the smallest of all AUCs by guess over those by hand. A log that is not there is left out.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from benchmarks.code_logs import code_logs
from benchmarks.harness import finish, nightjar, options, words
from benchmarks.logs import flights, flights_settings
from pipeline.config.compose import compose
from pipeline.store import Store

SHARED = Path(__file__).parents[2] / "shared/data"
TRAIN, TEST = 1, 2  # days: a split by day holds out the last one
MODEL = words("""model.embedding_dim=8 model.bottom_mlp=[64] model.top_mlp=[64,32] train.precision=fp32
                hardware=laptop""")
ADULT = [*MODEL, "train.global_batch=256", "train.epochs=4", "train.warmup_steps=50"]
LAST_DAYS = 36  # of the flights' year, held out
FOLD = ["data.day_column=fold", "data.split.by=day"]


@dataclass(frozen=True)
class Log:
    """A log and its schema by hand. ``write``: the log as a file, with a column ``fold`` where it is asked for.

    ``hand``: overrides that name its columns; ``shared``: those of the model and the split, for both.
    """

    name: str
    write: Callable[[Path, int | None], Path]
    hand: list[str]
    shared: list[str]
    folded: list[str] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # of columns, as a human types them


def main() -> None:
    """Train on every log by both schemas and print a table and the JSON line."""
    given = options(
        __doc__,
        seeds=(3, "each with rows of its own held out"),
        rows=(40_000, "of the generated log"),
        logs=([], "names of those that are taken (default: all)"),
    )
    warnings.simplefilter("ignore")
    areas: dict[str, dict[str, float]] = {}
    typed: dict[str, float] = {}
    for log in _logs(given.rows):
        if given.logs and log.name not in given.logs:
            continue
        pairs = np.array([_pair(log, seed) for seed in range(1, given.seeds + 1)])
        hand, guess = (float(each) for each in pairs.mean(axis=0))
        deviation = float((pairs[:, 1] - pairs[:, 0]).std())
        areas[log.name] = {"hand": round(hand, 5), "init": round(guess, 5)}
        print(
            f"{log.name:16} by hand {hand:.5f}  by init {guess:.5f}  {guess - hand:+.5f} ± {deviation:.5f}", flush=True
        )
        if log.kinds:
            typed[log.name] = round(_typed_alike(log), 4)
            print(f"{log.name:16} {typed[log.name]:.1%} of the columns typed as by hand", flush=True)
    ratios = [each["init"] / each["hand"] for each in areas.values()]
    worst = min((each["init"] - each["hand"] for each in areas.values()), default=0.0)
    finish("init", min(ratios, default=None), worst=worst, seeds=given.seeds, auc=areas, typed=typed)


def _logs(rows: int) -> list[Log]:
    logs = []
    if (SHARED / "adult.data").is_file():
        columns = compose(["experiment=adult", "data.path=x"]).data.columns
        adult = (SHARED / "adult.data").read_text().split("\n")
        named = ["data=adult", f"data.columns=[{','.join([*columns, 'fold'])}]"]
        logs += [
            Log("adult", _lines(adult, ", ", None), named, ADULT),
            Log(
                "adult_header",
                _lines(adult, ", ", ", ".join(columns)),
                ["data=adult", "data.header=true", "data.columns=[]"],
                ADULT,
            ),
        ]
    if (SHARED / "criteo_sample.tsv").is_file():
        sample = (SHARED / "criteo_sample.tsv").read_text().split("\n")
        columns = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)), "fold"]
        named = [f"data.columns=[{','.join(columns)}]"]
        settings = [*MODEL, "train.global_batch=128", "train.warmup_steps=10", *named]
        logs.append(Log("criteo", _lines(sample, "\t", None), ["data=criteo"], settings))
    if (source := flights()) is not None:
        settings = flights_settings(source)
        split = ["data.day_column=date", "data.split.by=day", f"data.split.test_days={LAST_DAYS}"]
        of_data = [each for each in settings if "data" in each.split("=")[0] and "data.name" not in each]
        rest = [each for each in settings if each not in of_data and "data.name" not in each]
        left_out = ("data.path", "data.sparse.date", "data.sparse.day=")  # a row's day, by which rows are held out
        by_hand = [each for each in of_data if not any(name in each for name in left_out)]
        by_hand.append("+data.sparse.day_of_month={column: day}")
        logs.append(Log("flights", lambda folder, seed: source, by_hand, rest, split))
    made = mixed(rows)
    generated = [*MODEL, "train.global_batch=256", "train.epochs=2", "train.warmup_steps=50"]
    codes = code_logs(rows, SHARED / "adult.data")
    logs += [Log(each.name, _frame(each.rows, "parquet"), each.hand, generated, kinds=each.kinds) for each in codes]
    return [
        *logs,
        Log("mixed_parquet", _frame(made, "parquet"), ["data=parquet", *MIXED], generated),
        Log("mixed_jsonl", _frame(made, "jsonl"), ["data=jsonl", *MIXED], generated),
    ]


MIXED = [
    "data.label.column=clicked",
    "data.dense_transform=standardise",
    "data.sparse_defaults.min_count=5",
    "+data.dense.price={transform: log1p_standardise}",
    "+data.dense.embedding={width: 16}",
    "+data.sparse.user_id={rows: 5000}",
    "+data.sparse.ad={}",
    "+data.sparse.pages={holds: list}",
    "+data.sparse.topics={weights: topic_scores}",
    "+data.sparse.interests={holds: map}",
]


def mixed(rows: int) -> pl.DataFrame:
    """A log whose clicks depend on a number, ids, lists, weighted ids, maps and a vector."""
    rng = np.random.default_rng(11)
    effect = rng.normal(size=(4, 500))
    direction = rng.normal(size=16) / 4
    user, ad = rng.zipf(1.3, rows) % 2000, rng.integers(0, 300, rows)
    price = np.round(rng.lognormal(1, 1, rows), 2)
    vectors = np.round(rng.normal(size=(rows, 16)), 4)
    lists = {
        name: [rng.choice(60, rng.integers(1, 5), replace=False) for _ in range(rows)]
        for name in ("pages", "topics", "interests")
    }
    scores = {name: [np.round(rng.random(len(each)), 3) for each in lists[name]] for name in ("topics", "interests")}
    logits = effect[0, user % 500] + effect[1, ad % 500] - 0.5 * np.log1p(price) + vectors @ direction
    logits += np.array([effect[2, each].mean() for each in lists["pages"]])
    for name, row in (("topics", 3), ("interests", 2)):
        pairs = zip(lists[name], scores[name], strict=True)
        logits += np.array([(effect[row, ids + 100] * weights).sum() for ids, weights in pairs])
    clicked = rng.random(rows) < 1 / (1 + np.exp(1.5 - logits))
    return pl.DataFrame(
        {
            "clicked": clicked.astype(np.int64),
            "user_id": user,
            "ad": [f"a{number}" for number in ad],
            "price": price,
            "site": ["main"] * rows,
            "pages": [each.tolist() for each in lists["pages"]],
            "topics": [[f"t{one}" for one in each] for each in lists["topics"]],
            "topic_scores": [each.tolist() for each in scores["topics"]],
            "interests": [
                [{"key": f"i{one}", "value": weight} for one, weight in zip(ids, weights, strict=True)]
                for ids, weights in zip(lists["interests"], scores["interests"], strict=True)
            ],
            "embedding": vectors.tolist(),
        }
    )


def _fold(text: str, seed: int) -> int:
    drawn = hashlib.blake2b(f"{seed} {text}".encode(), digest_size=8).digest()
    return TEST if int.from_bytes(drawn, "little") % 5 == 0 else TRAIN


def _lines(lines: list[str], separator: str, header: str | None) -> Callable[[Path, int | None], Path]:
    """Text, whose lines get one more field; equal lines lie in one fold."""

    def write(folder: Path, seed: int | None) -> Path:
        path = folder / f"log{seed or ''}.csv"
        rows = [line if seed is None else f"{line}{separator}{_fold(line, seed)}" for line in lines if line.strip()]
        if header:
            rows.insert(0, header if seed is None else f"{header}{separator}fold")
        path.write_text("\n".join(rows) + "\n")
        return path

    return write


def _frame(rows: pl.DataFrame, kind: str) -> Callable[[Path, int | None], Path]:
    """Parquet, or JSON lines with maps as objects."""

    def write(folder: Path, seed: int | None) -> Path:
        path = folder / f"log{seed or ''}.{kind}"
        folds = [_fold(str(number), seed or 0) for number in range(rows.height)]
        frame = rows if seed is None else rows.with_columns(fold=pl.Series(folds))
        if kind == "parquet":
            frame.write_parquet(path)
            return path
        with path.open("w") as sink:
            for row in frame.iter_rows(named=True):
                row["interests"] = {pair["key"]: pair["value"] for pair in row["interests"]}
                sink.write(json.dumps(row) + "\n")
        return path

    return write


def _pair(log: Log, seed: int) -> tuple[float, float]:
    """AUC by hand and by guess on the same held-out rows."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        nightjar("init", str(log.write(folder, None)), "--name", "guessed", "-cd", f"{place}/my")
        path = log.write(folder, seed)
        shared = [f"data.path={path}", f"store={place}/store", f"seed={seed}", *log.shared, *(log.folded or FOLD)]
        return (
            _area(folder, "hand", [*log.hand, "data.name=hand", *shared]),
            _area(folder, "guess", ["-cd", f"{place}/my", "data=guessed", *shared, *_columns(folder)]),
        )


def _typed_alike(log: Log) -> float:
    """Share of the columns of ``log`` that the drafted schema types as a human does."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        nightjar("init", str(log.write(folder, None)), "--name", "guessed", "-cd", f"{place}/my")
        schema = yaml.safe_load((folder / "my/data/guessed.yaml").read_text())
    guessed = {
        (settings or {}).get("column", name): kind
        for kind in ("sparse", "dense")  # a number that is looked up too is dense
        for name, settings in (schema[kind] or {}).items()
    }
    return sum(guessed.get(column) == kind for column, kind in log.kinds.items()) / len(log.kinds)


def _columns(folder: Path) -> list[str]:
    """The names of a guessed schema's columns, and that of the fold, where the file does not say them."""
    schema = yaml.safe_load((folder / "my/data/guessed.yaml").read_text())
    return [f"data.columns=[{','.join([*schema['columns'], 'fold'])}]"] if "columns" in schema else []


def _area(folder: Path, run: str, arguments: list[str]) -> float:
    nightjar("run", f"run={run}", *arguments)
    return float(Store(f"{folder}/store").read_json(f"runs/{run}/result.json")["eval"]["auc"])


if __name__ == "__main__":
    main()
