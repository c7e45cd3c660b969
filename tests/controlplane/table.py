"""Run the fault table and print it: python -m tests.controlplane.table [part of a name].., --short: no long cells.

``--k8s-assets`` and ``--k8s-kit`` are those of pytest (tests/conftest.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tests.cluster_kit import running
from tests.conftest import SHARED
from tests.controlplane.faults import CELLS
from tests.controlplane.world import World


def main() -> int:
    """The number of cells that did not end as expected."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("parts", nargs="*", help="parts of the names of cells (default: all)")
    parser.add_argument("--short", action="store_true", help="leave out the cells that take long")
    parser.add_argument("--k8s-assets", type=Path, default=Path.home() / ".cache/nightjar/k8s-assets")
    parser.add_argument("--k8s-kit", type=Path, default=SHARED / "k8s")
    options = parser.parse_args()
    wrong = 0
    home = Path(tempfile.mkdtemp(prefix="nightjar-faults-"))
    with running(options.k8s_assets, options.k8s_kit, home / "k8s") as cluster:
        (home / "world").mkdir()
        world = World(cluster, home / "world")
        print("| fault | expected | observed |\n|---|---|---|", flush=True)
        for name, cell in CELLS.items():
            if (options.short and cell.long) or not any(part in name for part in options.parts or [""]):
                continue
            try:
                seen = cell.act(world)
            except Exception:
                wrong, seen = wrong + 1, "NOT AS EXPECTED"
                traceback.print_exc()
            print(f"| {name} | {cell.expected} | {seen} |", flush=True)
    shutil.rmtree(home)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
