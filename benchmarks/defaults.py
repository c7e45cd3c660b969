"""``make bench-defaults``: ten nights of 60,000 rows a day with nothing set but the logs.

The world drifts as that of ``make bench-nights`` does. Every night is one `nightjar nightly` with the settings that a
new user has. ``ratio``: the share of the reachable gain (1 - NE) / (1 - best reachable NE) of the first night, on its
own held-out rows; the bars: at least 0.6, no night held, and from the fourth night on each better than the first
night's model on the same rows: the held-out share of ``--judged`` rows of the day.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from typing import Any

from benchmarks.harness import finish, options, show, silent
from benchmarks.nights import DRIFT, FIRST, NIGHT_AFTER, held_by_gate, judged_nes
from pipeline.schedule.nightly import read_record
from pipeline.store import Store

MODEL = "synthetic"  # publish.model's default: the name of the data


def main() -> None:
    given = options(
        __doc__,
        words="settings",
        nights=10,
        rows=(60_000, "of a day, a fifth of them held out"),
        judged=(300_000, "drawn of each day, a fifth of them scored"),
        seed=(2026, "of the world and the model"),
    )
    silent()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        world = [f"store={folder}", *DRIFT, f"data.synthetic.rows={given.rows}", f"seed={given.seed}", *given.settings]
        nights = [run_night(store, world, number, given.judged) for number in range(given.nights)]
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


def run_night(store: Store, world: list[str], number: int, judged: int) -> dict[str, Any]:
    """One night: its share of the gain, what the gate said, and NE beside the first night's model."""
    day = FIRST + timedelta(days=number)
    held = held_by_gate("nightly", f"date={day}", *world)
    record = read_record(store, MODEL, day)
    assert record is not None
    result = store.read_json(f"runs/{record.run}/result.json")
    figures = result["eval"]
    night = {
        "gain": (1 - figures["ne"]) / (1 - figures["bayes_ne"]),
        "calibration": figures["calibration"],
        "held": int(held),
        "seconds": sum(stage["seconds"] for stage in result["stages"].values()),
        **judged_nes(store, day, world, judged, MODEL),
    }
    show(str(day), night | ({"reasons": record.reasons} if held else {}))
    return night


if __name__ == "__main__":
    main()
