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
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from scipy.stats import ttest_rel

from benchmarks import adult, flights
from benchmarks.common import finish
from benchmarks.runs import processes, run, silent
from pipeline.config.compose import compose
from pipeline.core.cpus import available_cpus
from pipeline.models.costs import model_costs
from pipeline.specs import MODELS, ModelInputs
from pipeline.stages.stage_inputs import read_dataset
from pipeline.store import Store

LOGS = ("planted", "adult", "flights")
ADULT = Path("../shared/data/adult.data")
BASE = "dlrm"
TREES = "boosted trees"
SIGNIFICANT = 0.05
# Above the seeds that presets are tuned on; five seeds from here on test on every row of adult once (``adult.py``).
FIRST_SEED = 11


@dataclass(frozen=True)
class Scores:
    """Of one model on the test rows of one log; speed and size are 0 where they do not compare."""

    ne: float
    auc: float
    samples_per_s: float = 0.0
    parameters: int = 0


@dataclass(frozen=True)
class Job:
    """All rankers on one log with one seed. ``more``: overrides on top of the log's own."""

    log: str
    seed: int
    rankers: tuple[str, ...]
    rows: int
    more: tuple[str, ...]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--first-seed", type=int, default=FIRST_SEED, help="lower ones are for choosing presets")
    options.add_argument("--logs", nargs="+", default=list(LOGS), choices=LOGS)
    options.add_argument("--rankers", nargs="+", default=list(MODELS.names()), help="dlrm is always among them")
    options.add_argument("--rows", type=int, default=250_000, help="of a planted log, a fifth of them to test on")
    options.add_argument("--jobs", type=int, default=available_cpus(), help="processes at a time")
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began = time.monotonic()
    logs = [log for log in given.logs if _there(log)]
    rankers = tuple(dict.fromkeys([BASE, *given.rankers]))
    drawn = range(given.first_seed, given.first_seed + given.seeds)
    jobs = [Job(log, seed, rankers, given.rows, tuple(given.set)) for log in logs for seed in drawn]
    with processes(given.jobs, runs_each=1) as pool:
        results: dict[str, list[dict[str, Scores]]] = {log: [] for log in logs}
        for job, scores in zip(jobs, pool.map(run_job, jobs), strict=True):
            print(_line(job, scores), flush=True)
            results[job.log].append(scores)
    for log, seeds in results.items():
        print(_table(log, seeds), flush=True)
    better = _better(results["planted"]) if "planted" in results else {}
    finish(
        "models",
        len([p for p in better.values() if p < SIGNIFICANT]) if better else None,
        seconds=time.monotonic() - began,
        p_values={name: round(p, 6) for name, p in better.items()},
        **_adult_figures(results.get("adult", [])),
        **{f"{log}_ne": _rounded(seeds) for log, seeds in results.items()},
    )


def _there(log: str) -> bool:
    if log == "adult" and not ADULT.exists():
        print(f"adult: skipped, no file {ADULT}", flush=True)
        return False
    return log != "flights" or flights.flights() is not None


def settings_of(log: str, folder: str, seed: int, rows: int) -> list[str]:
    """The data of ``log``, and how every ranker is trained on it."""
    if log == "adult":
        return [*_adult_data(folder, seed), "train.epochs=6", "train.lr=0.002", "train.sparse_lr=0.05"]
    if log == "flights":
        path = flights.flights()
        assert path is not None
        return [each for each in flights.overrides(path) if not each.startswith("model.")]
    return [
        "data=synthetic",
        f"data.synthetic.rows={rows}",
        "data.synthetic.days=1",
        "data.synthetic.zipf=0.5",
        "data.synthetic.ids_per_feature=100",
        "data.synthetic.quads=3",
        "data.synthetic.quad_effect=2.0",
        "data.synthetic.pairwise_effect=0",
        "data.synthetic.first_order_effect=0.5",
        "data.synthetic.dense_effect=0.5",
        "train.global_batch=512",
        "train.epochs=2",
        "train.lr=0.003",
        "train.sparse_lr=0.1",
    ]


def _adult_data(folder: str, seed: int) -> list[str]:
    """The fold of ``seed``, without the settings of a model."""
    chosen = [each for each in adult.overrides(ADULT, folder, seed) if not each.startswith(("model.", "experiment="))]
    return ["data=adult", "train.global_batch=256", "train.warmup_steps=50", *chosen]


def run_job(job: Job) -> dict[str, Scores]:
    """Scores of every ranker of ``job``, by name."""
    silent()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        own = [
            *settings_of(job.log, folder, job.seed, job.rows),
            f"seed={job.seed}",
            f"store={store}",
            "train.threads_per_rank=1",
            "train.precision=fp32",
            "train.log_every_steps=1000",
            "train.guard.collapse=false",
            *job.more,
        ]
        scores = {name: _train(name, own, store) for name in job.rankers}
        if job.log == "adult":
            scores[TREES] = trees(Path(folder) / f"adult-{job.seed}.csv", job.seed)
    return scores


def _train(name: str, own: list[str], store: str) -> Scores:
    """The scores of ranker ``name``, by the stages of a run in this process."""
    settings = [f"model={name}_small", *own, f"run={name}"]
    made, config = run(settings), compose(settings)
    schema, _ = read_dataset(Store(store), made["ingest"])
    vectors = tuple(column.name for column in schema.sparse)
    inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=config.model.embedding_dim)
    held_out, trained = made["evaluate"].summary, made["train"].summary["train"]
    parameters = model_costs(config.model, inputs).parameters
    return Scores(held_out["ne"], held_out["auc"], trained["samples_per_s"], parameters)


def trees(path: Path, seed: int) -> Scores:
    """Boosted trees on the train rows of the fold at ``path``, scored on its test rows."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import log_loss, roc_auc_score

    columns = [*compose(["data=adult", f"data.path={path}"]).data.columns, "fold"]
    rows = pl.read_csv(path, has_header=False, new_columns=columns, infer_schema_length=None).drop("fnlwgt")
    rows = rows.with_columns(pl.col(pl.String).str.strip_chars())
    labels = (rows["income"] == ">50K").to_numpy().astype(int)
    test = rows["fold"].cast(pl.String).str.strip_chars().to_numpy() == str(adult.TEST)
    inputs = rows.drop("income", "fold")
    texts = [name for name, kind in inputs.schema.items() if kind == pl.String]
    values = inputs.with_columns(pl.col(name).cast(pl.Categorical).to_physical() for name in texts).to_numpy()
    chosen = [inputs.columns.index(name) for name in texts]
    model = HistGradientBoostingClassifier(categorical_features=chosen, random_state=seed)
    model.fit(values[~test], labels[~test])
    probabilities, rate = model.predict_proba(values[test])[:, 1], labels[test].mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return Scores(log_loss(labels[test], probabilities) / entropy, roc_auc_score(labels[test], probabilities))


def _mean(seeds: list[dict[str, Scores]], name: str, figure: str) -> float:
    return float(np.mean([getattr(each[name], figure) for each in seeds]))


def _rounded(seeds: list[dict[str, Scores]]) -> dict[str, float]:
    return {name: round(_mean(seeds, name, "ne"), 5) for name in seeds[0]}


def _better(seeds: list[dict[str, Scores]]) -> dict[str, float]:
    """One-sided p of each ranker's NE being lower than DLRM's, over the seeds; none where there is one seed."""
    if len(seeds) < 2:
        return {}
    base = [each[BASE].ne for each in seeds]
    others = [name for name in seeds[0] if name != BASE]
    return {
        name: float(ttest_rel([each[name].ne for each in seeds], base, alternative="less").pvalue) for name in others
    }


def _adult_figures(seeds: list[dict[str, Scores]]) -> dict[str, float | str]:
    if not seeds:
        return {}
    aucs = {name: _mean(seeds, name, "auc") for name in seeds[0]}
    trees_auc = aucs.pop(TREES)
    best = max(aucs, key=lambda name: aucs[name])
    return {
        "adult_best": best,
        "adult_auc": aucs[best],
        "adult_trees_auc": trees_auc,
        "adult_gap": trees_auc - aucs[best],
    }


def _line(job: Job, scores: dict[str, Scores]) -> str:
    return f"{job.log}, seed {job.seed}: " + ", ".join(f"{name} {each.ne:.5f}" for name, each in scores.items())


def _table(log: str, seeds: list[dict[str, Scores]]) -> str:
    """The means of a log over its seeds, as Markdown."""
    lines = [
        f"\n{log}, mean of {len(seeds)} seeds",
        "| ranker | NE | AUC | samples/s | parameters |",
        "|---|---|---|---|---|",
    ]
    names: Iterable[str] = sorted(seeds[0], key=lambda name: _mean(seeds, name, "ne"))
    for name in names:
        ne, auc, speed, size = (_mean(seeds, name, each) for each in ("ne", "auc", "samples_per_s", "parameters"))
        more = f"{speed:,.0f} | {size:,.0f}" if size else "- | -"
        lines.append(f"| {name} | {ne:.5f} | {auc:.5f} | {more} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
