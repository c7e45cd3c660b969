"""The four id mappings at equal rows: test NE and AUC on synthetic logs whose ids behave alike in groups.

    python -m benchmarks.mappings [--rows 400000] [--ids 20000] [--table 1000] [--criteo FILE]

Every mapping trains the same model on the same logs, one epoch; all that differs is which ids share a row.
``--criteo``: also on real logs in Criteo's format. The ratio of the JSON line: NE of ``learned`` to the best of the
three others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from pipeline.cli import main as nightjar

MAPPINGS = ("vocab", "hash", "double_hash", "learned")


def main() -> None:
    """Train once for each mapping and log, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--ids", type=int, default=20_000)
    parser.add_argument("--table", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--criteo", default=None)
    args = parser.parse_args()
    logs = {
        "synthetic": [
            "data=synthetic", f"data.synthetic.rows={args.rows}", f"data.synthetic.ids_per_feature={args.ids}",
            f"data.synthetic.id_groups={args.groups}", "data.synthetic.zipf=1.05",
        ]
    }  # fmt: skip
    if args.criteo:
        logs["criteo"] = ["experiment=criteo", f"data.path={args.criteo}", "data.sparse_defaults.min_count=1"]
    found = {name: {m: measured(overrides, m, args.table) for m in MAPPINGS} for name, overrides in logs.items()}
    print(f"{'logs':<12}{'mapping':<14}{'NE':>9}{'AUC':>9}{'seconds':>9}")
    for name, figures in found.items():
        for mapping, result in figures.items():
            print(f"{name:<12}{mapping:<14}{result['ne']:>9.5f}{result['auc']:>9.5f}{result['seconds']:>9.1f}")
    ne = {mapping: result["ne"] for mapping, result in found["synthetic"].items()}
    ratio = ne["learned"] / min(value for mapping, value in ne.items() if mapping != "learned")
    print(json.dumps({"bench": "mappings", "ratio": round(ratio, 5), "table_rows": args.table, "figures": found}))


def measured(overrides: list[str], mapping: str, table: int) -> dict[str, Any]:
    """NE and AUC on the test rows, and the seconds of ingestion, after training with ``mapping``."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *overrides, "run=m", f"store={folder}", f"data.sparse_defaults.mapping={mapping}",
            f"data.sparse_defaults.rows={table}", "model.embedding_dim=8", "model.bottom_mlp=[32]",
            "model.top_mlp=[64]", "train.precision=fp32", "train.log_every_steps=1000", "train.global_batch=512",
            "train.warmup_steps=20", "train.sparse_lr=0.1",
            "launch.inline=[ingest,plan,partition,train,evaluate]",
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            code = nightjar(["run", *settings])
        result = json.loads(Path(folder, "runs/m/result.json").read_text())
    if code:
        raise SystemExit(f"{mapping}: {result['error']['message']}")
    ingest = result["stages"]["ingest"]["seconds"]
    return {"ne": result["eval"]["ne"], "auc": result["eval"]["auc"], "seconds": ingest}


if __name__ == "__main__":
    main()
