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

import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.harness import ADULT, PLAIN, SET, finish, means, options, p_lower, processes, run, show, words
from benchmarks.logs import TEST, adult, flights, flights_settings
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus
from pipeline.models.costs import model_costs
from pipeline.specs import MODELS, ModelInputs
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store

LOGS = ("planted", "adult", "flights")
BASE, TREES = "dlrm", "boosted trees"
SIGNIFICANT = 0.05
# Above the seeds that presets are tuned on; five seeds from here on test on every row of adult once (``logs.py``).
FIRST_SEED = 11
Scores = dict[str, dict[str, float]]  # by model: NE, AUC and, where they compare, samples/s and parameters


def main() -> None:
    given = options(
        __doc__,
        seeds=5,
        first_seed=(FIRST_SEED, "lower ones are for choosing presets"),
        logs=(list(LOGS), None, {"nargs": "+", "choices": LOGS}),
        rankers=(list(MODELS.names()), "dlrm is always among them; dhen:model.layers=8 is one, too", {"nargs": "+"}),
        rows=(250_000, "of a planted log, a fifth of them to test on"),
        jobs=(available_cpus(), "processes at a time"),
        set=SET,
    )
    began, rankers = time.monotonic(), tuple(dict.fromkeys([BASE, *given.rankers]))
    missing = {"adult": not ADULT.exists(), "flights": "flights" in given.logs and flights() is None}
    logs = [log for log in given.logs if not missing.get(log)]
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    jobs = [(log, seed, rankers, given.rows, given.set) for log in logs for seed in seeds]
    results: dict[str, list[Scores]] = {log: [] for log in logs}
    with processes(given.jobs, runs_each=1) as pool:
        for (log, seed, *_), scores in zip(jobs, pool.map(run_seed, *zip(*jobs, strict=True)), strict=True):
            show(f"{log}, seed {seed}, NE", {name: each["ne"] for name, each in scores.items()})
            results[log].append(scores)
    mean = {log: {name: means([each[name] for each in found]) for name in found[0]} for log, found in results.items()}
    for log, models in mean.items():
        for name in sorted(models, key=lambda name: models[name]["ne"]):
            show(f"{log}, {name}", models[name], ",.5g")
    p_values, figures = {}, {}
    if "planted" in logs and given.seeds > 1:
        nes = {name: [each[name]["ne"] for each in results["planted"]] for name in rankers}
        p_values = {name: p_lower(nes[name], nes[BASE]) for name in rankers if name != BASE}
    if "adult" in logs:
        aucs = {name: each["auc"] for name, each in mean["adult"].items()}
        trees_auc = aucs.pop(TREES)
        best = max(aucs, key=lambda name: aucs[name])
        figures = {"adult_best": best, "adult_auc": aucs[best], "adult_trees_auc": trees_auc}
        figures["adult_gap"] = trees_auc - aucs[best]
    for log, models in mean.items():
        figures[f"{log}_ne"] = {name: round(each["ne"], 5) for name, each in models.items()}
    finish(
        "models",
        sum(p < SIGNIFICANT for p in p_values.values()) if p_values else None,
        seconds=time.monotonic() - began,
        p_values={name: round(p, 6) for name, p in p_values.items()},
        **figures,
    )


def settings_of(log: str, folder: str, seed: int, rows: int) -> list[str]:
    """The data of ``log``, and how every ranker is trained on it."""
    if log == "adult":
        chosen = [each for each in adult(ADULT, folder, seed) if not each.startswith(("model.", "experiment="))]
        rates = ["train.epochs=6", "train.lr=0.002", "train.sparse_lr=0.05"]
        return ["data=adult", "train.global_batch=256", "train.warmup_steps=50", *chosen, *rates]
    if log == "flights":
        path = flights()
        assert path is not None
        return [each for each in flights_settings(path) if not each.startswith("model.")]
    return words(f"""data=synthetic data.synthetic.rows={rows} data.synthetic.days=1 data.synthetic.zipf=0.5
        data.synthetic.ids_per_feature=100 data.synthetic.quads=3 data.synthetic.quad_effect=2.0
        data.synthetic.pairwise_effect=0 data.synthetic.first_order_effect=0.5 data.synthetic.dense_effect=0.5
        train.global_batch=512 train.epochs=2 train.lr=0.003 train.sparse_lr=0.1""")


def run_seed(log: str, seed: int, rankers: tuple[str, ...], rows: int, more: list[str]) -> Scores:
    """Scores of every ranker on one log, by name."""
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        world = [*settings_of(log, folder, seed, rows), f"seed={seed}", f"store={folder}/store", *PLAIN, *more]
        for name in rankers:
            ranker, *own = name.split(":")
            settings = [f"model={ranker}_small", *world, *own, f"run={re.sub('[^a-z0-9_]', '-', name)}"]
            made, config = run(settings), compose(settings)
            schema, _ = read_dataset(Store(f"{folder}/store"), made["ingest"])
            vectors = tuple(column.name for column in schema.sparse)
            inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=config.model.embedding_dim)
            scores[name] = {figure: made["evaluate"].summary[figure] for figure in ("ne", "auc")}
            scores[name]["samples/s"] = made["train"].summary["train"]["samples_per_s"]
            scores[name]["parameters"] = float(model_costs(config.model, inputs).parameters)
        if log == "adult":
            scores[TREES] = trees(Path(folder) / f"adult-{seed}.csv", seed)
    return scores


def trees(path: Path, seed: int) -> dict[str, Any]:
    """Boosted trees on the train rows of the fold at ``path``, scored on its test rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import log_loss, roc_auc_score

    columns = [*compose(["data=adult", f"data.path={path}"]).data.columns, "fold"]
    rows = pl.read_csv(path, has_header=False, new_columns=columns, infer_schema_length=None).drop("fnlwgt")
    rows = rows.with_columns(pl.col(pl.String).str.strip_chars())
    labels = (rows["income"] == ">50K").to_numpy().astype(int)
    test = rows["fold"].cast(pl.String).str.strip_chars().to_numpy() == str(TEST)
    inputs = rows.drop("income", "fold")
    texts = [name for name, kind in inputs.schema.items() if kind == pl.String]
    values = inputs.with_columns(pl.col(name).cast(pl.Categorical).to_physical() for name in texts).to_numpy()
    chosen = [inputs.columns.index(name) for name in texts]
    model = HistGradientBoostingClassifier(categorical_features=chosen, random_state=seed)
    model.fit(values[~test], labels[~test])
    probabilities, rate = model.predict_proba(values[test])[:, 1], labels[test].mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return {"ne": log_loss(labels[test], probabilities) / entropy, "auc": roc_auc_score(labels[test], probabilities)}


if __name__ == "__main__":
    main()
