"""``make bench-defaults``: ten nights of 60,000 rows a day with nothing set but the logs.

The world drifts as that of ``make bench-nights`` does. Every night is one `nightjar nightly` with the settings that a
new user has. ``ratio``: the share of the reachable gain (1 - NE) / (1 - best reachable NE) of the first night, on its
own held-out rows; the bars: at least 0.6, no night held, and from the fourth night on each better than the first
night's model on the same rows: the held-out share of ``--judged`` rows of the day.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from benchmarks.common import finish
from benchmarks.nights import FIRST, NIGHT_AFTER, judged_dataset, run, scores, serving
from pipeline.schedule.nightly import read_record
from pipeline.store import Store

MODEL = "synthetic"  # publish.model's default: the name of the data
WORLD = (
    "data=synthetic",
    "data.synthetic.drift=0.06",
    "data.synthetic.new_ids=0.02",
    "data.synthetic.popularity_drift=0.02",
)


def main() -> None:
    """Run the nights and print a table and the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nights", type=int, default=10)
    options.add_argument("--rows", type=int, default=60_000, help="of a day, a fifth of them held out")
    options.add_argument("--judged", type=int, default=300_000, help="drawn of each day, a fifth of them scored")
    options.add_argument("--seed", type=int, default=2026, help="of the world and the model")
    options.add_argument("settings", nargs="*", help="overrides, to see what a default is worth")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    world = [*WORLD, f"data.synthetic.rows={given.rows}", f"seed={given.seed}", *given.settings]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        nights = [_night(store, world, number, given.judged) for number in range(given.nights)]
    late = nights[NIGHT_AFTER:]
    finish(
        "defaults",
        nights[0]["gain"],
        held=sum(night["held"] for night in nights),
        of=len(nights),
        frozen_beaten=sum(night["nightly"] < night["frozen"] for night in late),
        frozen_of=len(late),
        seconds=[round(night["seconds"], 1) for night in nights],
        **{name: [round(night[name], 5) for night in nights] for name in ("gain", "calibration", "nightly", "frozen")},
    )


def _night(store: Store, world: Sequence[str], number: int, judged: int) -> dict[str, Any]:
    """One night: its share of the gain, what the gate said, and NE beside the first night's model."""
    day = FIRST + timedelta(days=number)
    shared = [f"store={store.url}", *world]
    held = run(["nightly", f"date={day}", *shared])
    record = read_record(store, MODEL, day)
    assert record is not None
    result = store.read_json(f"runs/{record.run}/result.json")
    figures = result["eval"]
    first = store.get(store.read_json(f"runs/{MODEL}-{FIRST}/result.json")["model"]["uri"], "publish")
    now = serving(store, MODEL)
    dataset = judged_dataset(store, day, shared, judged, f"{MODEL}-{day}")
    found = scores(store, dataset, {"nightly": now, "scratch": first, "frozen": first})
    night = {
        "gain": (1 - figures["ne"]) / (1 - figures["bayes_ne"]),
        "calibration": figures["calibration"],
        "held": int(held),
        "nightly": found["nightly"],
        "frozen": found["frozen"],
        "seconds": sum(stage["seconds"] for stage in result["stages"].values()),
    }
    print(
        f"{day}  {night['gain']:.1%} of the reachable gain, calibration {night['calibration']:.3f}; "
        f"NE {found['nightly']:.5f}, frozen {found['frozen']:.5f} ({found['frozen'] / found['nightly'] - 1:+.2%} "
        f"± {found['error']:.2%}), "
        f"{night['seconds']:.0f} s{'  HELD: ' + '; '.join(record.reasons or ()) if held else ''}",
        flush=True,
    )
    return night


if __name__ == "__main__":
    main()
