"""``make bench-mappings``: the four id mappings at equal rows, on logs whose ids are alike in groups and on real ones.

Every mapping trains the same model on the same logs, one epoch; all that differs is which ids share a row. A seed draws
other synthetic logs, and other initial values everywhere. ``flights``: those of ``benchmarks.logs``, fetched once;
``--adult FILE`` and ``--criteo FILE`` add a log that lies here. Real logs have fewer ids, so their tables are smaller.

``ratio``: NE of ``learned`` to the best of the three others, on the first log, the mean over seeds. ``figures``: by log
and mapping, ``seconds`` of ingestion among them.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.harness import finish, nightjar, options, result_of, show, words
from benchmarks.logs import flights, flights_settings
from benchmarks.studies import Figures, by_variant, mean_of, per_case

MAPPINGS = ("vocab", "hash", "double_hash", "learned")
REAL_TABLE, ADULT_TABLE = 150, 12  # rows of a table: about a tenth of the ids of the largest features
SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64] train.precision=fp32
    train.log_every_steps=1000 train.global_batch=512 train.warmup_steps=20 train.sparse_lr=0.1
    train.schedule=constant launch.inline=[ingest,plan,partition,train,evaluate]""")


def main() -> None:
    logs = ("synthetic", "synthetic, flights, or both")
    sizes = {"rows": 300_000, "ids": 20_000, "table": 1_000, "groups": 20}
    given = options(__doc__, logs=logs, seeds=3, **sizes, adult=None, criteo=None)
    results = {}
    for log in [*filter(None, given.logs.split(",")), *(name for name in ("adult", "criteo") if vars(given)[name])]:
        if log == "flights" and flights() is None:
            continue
        found = per_case(every_mapping, given, [(log, seed + 1) for seed in range(given.seeds)], jobs=1)
        results[log] = mean_of(found)
        for mapping, nes in by_variant(found).items():
            results[log][mapping]["ne_spread"] = statistics.stdev(nes) if given.seeds > 1 else 0.0
            show(f"{log} {mapping}", results[log][mapping])
        ratios = [each["learned"]["ne"] / min(each[name]["ne"] for name in MAPPINGS[:3]) for each in found]
        results[log]["ratio"] = statistics.fmean(ratios)
    first = next(iter(results))
    finish("mappings", results[first]["ratio"], digits=5, log=first, figures=results)


def settings_of(log: str, given: argparse.Namespace) -> list[str]:
    """The log, and the rows of its tables."""
    table, all_ids = f"data.sparse_defaults.rows={given.table}", "data.sparse_defaults.min_count=1"
    if log == "synthetic":
        return words(f"""data=synthetic data.synthetic.rows={given.rows} data.synthetic.ids_per_feature={given.ids}
            data.synthetic.id_groups={given.groups} data.synthetic.zipf=1.05 {table}""")
    if log == "flights":
        return [*flights_settings(flights()), all_ids, f"data.sparse_defaults.rows={REAL_TABLE}"]
    if log == "adult":
        return ["data=adult", f"data.path={given.adult}", f"data.sparse_defaults.rows={ADULT_TABLE}"]
    return ["experiment=criteo", f"data.path={given.criteo}", all_ids, table]


def every_mapping(given: argparse.Namespace, folder: str, log: str, seed: int) -> Figures:
    """NE and AUC on the test rows, and the seconds of ingestion, after training with each mapping."""
    figures = {}
    for mapping in MAPPINGS:
        chosen = [f"run={mapping}", f"store={folder}/{mapping}", f"data.sparse_defaults.mapping={mapping}"]
        nightjar("run", *settings_of(log, given), f"seed={seed}", *chosen, *SETTINGS)
        result = result_of(f"{folder}/{mapping}", mapping)
        figures[mapping] = {name: result["eval"][name] for name in ("ne", "auc")}
        figures[mapping]["seconds"] = result["stages"]["ingest"]["seconds"]
    return figures


if __name__ == "__main__":
    main()
