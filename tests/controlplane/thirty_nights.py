"""``make bench-thirty-nights``: thirty nights on a real API server, started by the CronJob's own manifest, with faults.

Settings are the defaults, but for where things lie and how long a night waits for its logs. Every third night has a
fault (``nights.py``). Logs drift as those of ``make bench-defaults`` do. ``ratio``: the share of nights that ended as
they should: published or, where the logs are bad, held or failed; one training that ended, none where there is nothing
to train on, whose only artifact has every row once; one record and one call of the webhook. From the fourth night on,
the version that serves is compared with the first night's on the day's held-out rows: of good days, for the labels of
a bad one are wrong.

Each night is a line of ``nights.jsonl`` in ``--home``, and the store is copied there after it: ``--nights 12-30`` goes
on from what an earlier call left there. The last line covers all nights in ``nights.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from benchmarks.harness import finish
from benchmarks.nights import scores, serving
from pipeline.store import Store
from tests.controlplane.nights import FAULTS, FIRST, MODEL, Hook, Nights, keep, world

COMPARED_FROM = 4  # the first nights, in which a frozen model may still do


@dataclass
class Outcome:
    """What a night came to.

    ``done``: by its fault; ``rows``: trained on, over those of the day's training split; ``ne`` and ``frozen``: of the
    version that serves and of the first one, where they are compared; ``seconds``: of the night's job.
    """

    number: int
    day: str
    fault: str
    expected: str
    outcome: str = "none"
    trained: int = 0
    rows: float = 0.0
    records: int = 0
    calls: int = 0
    done: str = ""
    why: str = ""
    ne: float | None = None
    frozen: float | None = None
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether all of it is as it should be."""
        trainings = 0 if self.expected == "failed" else 1
        shown = (self.outcome, self.trained, self.rows, self.records, self.calls)
        return shown == (self.expected, trainings, float(trainings), 1, 1)

    def __str__(self) -> str:
        known = f"{self.number:2} {self.day} {self.fault or '-':26} {self.outcome:9} trained {self.trained}x"
        known += f" ({self.rows:g} of its rows), {self.records} record, {self.calls} call"
        if self.ne is not None and self.frozen is not None:
            known += f", NE {self.ne:.5f}, frozen {self.frozen:.5f}"
        known += f", {self.seconds:.0f} s{f', {self.done}' if self.done else ''}"
        return known if self.right else f"{known}  NOT {self.expected.upper()} AS IT SHOULD\n   {self.why}"


def observed(nights: Nights, number: int, fault: str) -> Outcome:
    """Do night ``number``, from 1 on, and look at what it left."""
    day = FIRST + timedelta(days=number - 1)
    night = Outcome(number, str(day), fault, FAULTS.get(fault, "published"))
    said, store = "", Store(nights.store)
    try:
        night.done = nights.night(day, fault)
        said = nights.await_end(day)
        night.seconds = nights.seconds(day)
        store.fs.invalidate_cache()
        look(nights, store, day, night)
        if night.outcome == night.expected == "published" and number >= COMPARED_FROM:
            night.ne, night.frozen = judged(store, day)
    except Exception:  # one night must not end the others
        night.why += traceback.format_exc()
    if not night.right:
        night.why += f"\n{said[-4000:]}"
    return night


def look(nights: Nights, store: Store, day: date, night: Outcome) -> None:
    """Fill in what the store, the cluster and the webhook know of the night."""
    night.calls = sum(body["date"] == str(day) for body in Hook.bodies)
    night.trained = nights.trainings(day)
    run = f"runs/{MODEL}-{day}"
    records = [name for name in store.names("runs") if str(day) in name and store.exists(f"runs/{name}/nightly.json")]
    night.records = len(records)
    if not store.exists(f"{run}/nightly.json"):
        return
    record = store.read_json(f"{run}/nightly.json")
    night.outcome, night.why = record["outcome"], f"{record.get('message')} {record.get('reasons')}"
    if store.exists(f"{run}/train") and store.exists(f"{run}/result.json"):
        result = store.read_json(f"{run}/result.json")
        rows = store.get(result["stages"]["ingest"]["artifact"], "ingest").summary["rows_train"]
        night.rows = len(store.names(f"{run}/train")) * result["train"]["samples"] / rows


def judged(store: Store, day: date) -> tuple[float, float]:
    """NE on the held-out rows of ``day``: of the version that serves, and of the first one."""
    first = store.get(store.read_json(f"runs/{MODEL}-{FIRST}/result.json")["model"]["uri"], "publish")
    result = store.read_json(f"runs/{MODEL}-{day}/result.json")
    dataset = store.get(result["stages"]["ingest"]["artifact"], "ingest")
    seen = scores(store, dataset, {"nightly": serving(store, MODEL), "scratch": first, "frozen": first})
    return seen["nightly"], seen["frozen"]


def report(lines: Path) -> None:
    """The JSON line about all nights, the last try of each."""
    nights = {each["number"]: Outcome(**each) for each in map(json.loads, lines.read_text().splitlines())}.values()
    good = [night for night in nights if night.expected == "published"]
    bad = [night for night in nights if night.expected != "published"]
    compared = [night for night in nights if night.ne is not None and night.frozen is not None]
    finish(
        "thirty-nights",
        sum(night.right for night in nights) / len(nights),
        nights=len(nights),
        right=sum(night.right for night in nights),
        faults=sum(night.fault != "" for night in nights),
        good=len(good),
        published=sum(night.outcome == "published" for night in good),
        bad=len(bad),
        not_published=sum(night.outcome in ("held", "failed") for night in bad),
        trained_twice=sum(night.trained > 1 or night.rows > 1 for night in nights),
        one_record=sum(night.records == 1 for night in nights),
        one_call=sum(night.calls == 1 for night in nights),
        frozen_beaten=sum(night.ne < night.frozen for night in compared),  # type: ignore[operator]
        frozen_of=len(compared),
        frozen_last=_gain(compared),
        seconds=sum(night.seconds for night in nights),
    )


def _gain(compared: list[Outcome]) -> float | None:
    """NE of the frozen version over that of the one that serves, on the last day compared."""
    last: Any = max(compared, key=lambda night: night.number, default=None)
    return None if last is None else last.frozen / last.ne


def main() -> None:
    """Run the nights and print a line for each and the JSON line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--nights", default="30", help="how many, or from-to, such as 12-30")
    options.add_argument("--home", type=Path, help="keep nights.jsonl and the store there, and go on from there")
    options.add_argument("--rows", type=int, default=60_000, help="of a day, a fifth of them held out")
    options.add_argument("--faults", default="", help="faults to make, parts of their names, comma-separated; all")
    options.add_argument("--every", type=int, default=3, help="each of how many nights has a fault")
    options.add_argument("--k8s-assets", type=Path, default=Path.home() / ".cache/nightjar/k8s-assets")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's requests
    first, _, last = given.nights.rpartition("-")
    faults = [name for name in FAULTS if any(part in name for part in given.faults.split(","))]
    home = given.home or Path(tempfile.mkdtemp(prefix="nightjar-nights-"))
    home.mkdir(parents=True, exist_ok=True)
    print(f"nights lie in {home}", flush=True)
    shutil.rmtree(home / "k8s", ignore_errors=True)
    with world(home, given.rows, given.k8s_assets) as nights, (home / "nights.jsonl").open("a") as lines:
        for number in range(int(first or 1), int(last) + 1):
            fault = faults[(number // given.every - 1) % len(faults)] if number % given.every == 0 else ""
            night = observed(nights, number, fault)
            print(night, flush=True)
            lines.write(json.dumps(asdict(night)) + "\n")
            lines.flush()
            keep(home)
    report(home / "nights.jsonl")


if __name__ == "__main__":
    main()
