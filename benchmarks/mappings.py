"""The four id mappings at equal rows: test NE and AUC on synthetic logs whose ids are alike in groups and on real ones.

    python -m benchmarks.mappings [--logs synthetic,flights] [--seeds 3] [--rows 300000] [--table 1000]

Every mapping trains the same model on the same logs, one epoch; all that differs is which ids share a row. A seed draws
other synthetic logs, and other initial values everywhere. ``flights``: those of ``benchmarks.logs``, fetched once;
``--adult FILE`` and ``--criteo FILE`` add a log that lies here. Real logs have fewer ids, so their tables are smaller.
The ratio of the JSON line: NE of ``learned`` to the best of the three others, on the first log, the mean over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from benchmarks.harness import finish, means, nightjar, options, result_of, show, words
from benchmarks.logs import flights, flights_settings

MAPPINGS = ("vocab", "hash", "double_hash", "learned")
REAL_TABLE, ADULT_TABLE = 150, 12  # rows of a table: about a tenth of the ids of the largest features
SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64] train.precision=fp32
                train.log_every_steps=1000 train.global_batch=512 train.warmup_steps=20 train.sparse_lr=0.1
                train.schedule=constant launch.inline=[ingest,plan,partition,train,evaluate]""")


def main() -> None:
    """Train once for each log, seed and mapping, and print the figures."""
    given = options(
        __doc__,
        logs=("synthetic", "synthetic, flights, or both"),
        seeds=3,
        rows=300_000,
        ids=20_000,
        table=1_000,
        groups=20,
        adult=None,
        criteo=None,
    )
    found = {}
    for log, settings in logs_of(given).items():
        runs = [{m: measure([*settings, f"seed={seed + 1}"], m) for m in MAPPINGS} for seed in range(given.seeds)]
        found[log] = {}
        for mapping in MAPPINGS:
            nes = [run[mapping]["ne"] for run in runs]
            spread = statistics.stdev(nes) if len(runs) > 1 else 0.0
            found[log][mapping] = means([run[mapping] for run in runs]) | {"ne_spread": spread}
            show(f"{log} {mapping}", found[log][mapping])
        ratios = [run["learned"]["ne"] / min(run[m]["ne"] for m in MAPPINGS[:3]) for run in runs]
        found[log]["ratio"] = statistics.fmean(ratios)
    first = next(iter(found))
    finish("mappings", found[first]["ratio"], digits=5, log=first, figures=found)


def logs_of(given: argparse.Namespace) -> dict[str, list[str]]:
    """The settings of every log that is asked for."""
    logs = {}
    table, all_ids = f"data.sparse_defaults.rows={given.table}", "data.sparse_defaults.min_count=1"
    for name in filter(None, given.logs.split(",")):
        if name == "synthetic":
            logs[name] = f"""data=synthetic data.synthetic.rows={given.rows} data.synthetic.ids_per_feature={given.ids}
                data.synthetic.id_groups={given.groups} data.synthetic.zipf=1.05 {table}""".split()
        elif (path := flights()) is not None:
            settings = [each for each in flights_settings(path) if "sparse_defaults" not in each]
            logs[name] = [*settings, all_ids, f"data.sparse_defaults.rows={REAL_TABLE}"]
    if given.adult:
        logs["adult"] = ["data=adult", f"data.path={given.adult}", f"data.sparse_defaults.rows={ADULT_TABLE}"]
    if given.criteo:
        logs["criteo"] = ["experiment=criteo", f"data.path={given.criteo}", all_ids, table]
    return logs


def measure(overrides: list[str], mapping: str) -> dict[str, float]:
    """NE and AUC on the test rows, and the seconds of ingestion, after training with ``mapping``."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = ["run=m", f"store={folder}", f"data.sparse_defaults.mapping={mapping}"]
        nightjar("run", *overrides, *chosen, *SETTINGS)
        result = result_of(folder, "m")
    return {"ne": result["eval"]["ne"], "auc": result["eval"]["auc"], "seconds": result["stages"]["ingest"]["seconds"]}


if __name__ == "__main__":
    main()
