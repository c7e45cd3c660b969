"""``make bench-models``: test NE, AUC, samples/s and parameters of every ranker, trained on the same rows.

Three logs: synthetic ones in which the effects of four features multiply (``planted``), the census (``adult``) and
flights. A seed draws another synthetic log, other test rows of adult, and other initial values and orders of the rows
everywhere; all rankers of a seed share all of it, and the settings of training. Each ranker is committed preset
``<ranker>_small``. The presets were chosen on seeds below ``FIRST_SEED``, so the benchmark's own are new to them. On
adult, scikit-learn's HistGradientBoostingClassifier is fitted to the same rows and columns. Each (log, seed) is a
process of one thread, so samples/s compare the rankers with each other.

``ratio``: how many rankers have a lower test NE than DLRM on the planted logs, p < 0.05 by a one-sided paired t-test
over the seeds. ``adult_gap``: test AUC of the boosted trees minus that of the best ranker.
"""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

import polars as pl

from benchmarks.harness import ADULT, PLAIN, finish, options, run, show, words
from benchmarks.logs import TEST, adult, flights, flights_settings
from benchmarks.studies import MACHINE, Figures, by_variant, mean_of, p_values, per_case, rounded
from pipeline.config.compose import compose
from pipeline.evaluation import evaluate
from pipeline.models.costs import model_costs
from pipeline.specs import MODELS, ModelInputs
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store

LOGS = ("planted", "adult", "flights")
BASE, TREES = "dlrm", "boosted trees"
SIGNIFICANT = 0.05
# Above the seeds that presets are tuned on; five seeds from here on test on every row of adult once (``logs.py``).
FIRST_SEED = 11


def main() -> None:
    given = options(
        __doc__,
        seeds=5,
        first_seed=(FIRST_SEED, "lower ones are for choosing presets"),
        logs=(list(LOGS), None, {"nargs": "+", "choices": LOGS}),
        rankers=(list(MODELS.names()), "dlrm is always among them; dhen:model.layers=8 is one, too", {"nargs": "+"}),
        rows=(250_000, "of a planted log, a fifth of them to test on"),
        **MACHINE,
    )
    began, mean, figures, chances = time.monotonic(), {}, dict[str, Any](), dict[str, float]()
    missing = {"adult": not ADULT.exists(), "flights": "flights" in given.logs and flights() is None}
    for log in given.logs:
        if missing.get(log):
            continue
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        found = per_case(every_ranker, given, [(log, seed) for seed in seeds])
        mean[log] = mean_of(found)
        for name in sorted(mean[log], key=lambda name: mean[log][name]["ne"]):
            show(f"{log}, {name}", mean[log][name], ",.5g")
        if log == "planted":
            chances = p_values(by_variant(found), BASE)
    if "adult" in mean:
        aucs = {name: each["auc"] for name, each in mean["adult"].items()}
        trees = aucs.pop(TREES)
        best = max(aucs, key=aucs.__getitem__)
        figures = {"adult_best": best, "adult_auc": aucs[best], "adult_trees_auc": trees}
        figures["adult_gap"] = trees - aucs[best]
    for log, models in mean.items():
        figures[f"{log}_ne"] = rounded({name: each["ne"] for name, each in models.items()})
    better = sum(p < SIGNIFICANT for p in chances.values()) if chances else None
    finish("models", better, seconds=time.monotonic() - began, p_values=chances, **figures)


def settings_of(log: str, folder: str, seed: int, rows: int) -> list[str]:
    """The data of ``log``, and how every ranker is trained on it."""
    if log == "adult":
        chosen = [each for each in adult(ADULT, folder, seed) if not each.startswith(("model.", "experiment="))]
        rates = ["train.epochs=6", "train.lr=0.002", "train.sparse_lr=0.05"]
        return ["data=adult", "train.global_batch=256", "train.warmup_steps=50", *chosen, *rates]
    if log == "flights":
        return [each for each in flights_settings(flights()) if not each.startswith("model.")]
    return words(f"""data=synthetic data.synthetic.rows={rows} data.synthetic.days=1 data.synthetic.zipf=0.5
        data.synthetic.ids_per_feature=100 data.synthetic.quads=3 data.synthetic.quad_effect=2.0
        data.synthetic.pairwise_effect=0 data.synthetic.first_order_effect=0.5 data.synthetic.dense_effect=0.5
        train.global_batch=512 train.epochs=2 train.lr=0.003 train.sparse_lr=0.1""")


def every_ranker(given: argparse.Namespace, folder: str, log: str, seed: int) -> Figures:
    """NE, AUC and, where they compare, samples/s and parameters of every ranker on one log."""
    found = {}
    world = [*settings_of(log, folder, seed, given.rows), f"seed={seed}", f"store={folder}/store", *PLAIN, *given.set]
    for name in dict.fromkeys([BASE, *given.rankers]):
        ranker, *own = name.split(":")
        settings = [f"model={ranker}_small", *world, *own, f"run={re.sub('[^a-z0-9_]', '-', name)}"]
        made, config = run(settings), compose(settings)
        schema, _ = read_dataset(Store(f"{folder}/store"), made["ingest"])
        vectors = tuple(column.name for column in schema.sparse)
        inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=config.model.embedding_dim)
        found[name] = {figure: made["evaluate"].summary[figure] for figure in ("ne", "auc")}
        found[name]["samples/s"] = made["train"].summary["train"]["samples_per_s"]
        found[name]["parameters"] = float(model_costs(config.model, inputs).parameters)
    if log == "adult":
        found[TREES] = boosted_trees(f"{folder}/adult-{seed}.csv", seed)
    return found


def boosted_trees(path: str, seed: int) -> dict[str, float]:
    """NE and AUC of trees that are fitted to the train rows of the fold at ``path``, on its test rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    columns = [*compose(["data=adult", f"data.path={path}"]).data.columns, "fold"]
    rows = pl.read_csv(path, has_header=False, new_columns=columns, infer_schema_length=None).drop("fnlwgt")
    rows = rows.with_columns(pl.col(pl.String).str.strip_chars())
    labels, test = (rows["income"] == ">50K").to_numpy(), rows["fold"].cast(pl.String).to_numpy() == str(TEST)
    inputs = rows.drop("income", "fold")
    texts = [name for name, kind in inputs.schema.items() if kind == pl.String]
    values = inputs.with_columns(pl.col(texts).cast(pl.Categorical).to_physical()).to_numpy()
    categories = [inputs.columns.index(name) for name in texts]
    trees = HistGradientBoostingClassifier(categorical_features=categories, random_state=seed)
    trees.fit(values[~test], labels[~test])
    scores = evaluate(labels[test].astype("float32"), trees.decision_function(values[test]).astype("float32"))
    return {name: scores[name] for name in ("ne", "auc")}


if __name__ == "__main__":
    main()
