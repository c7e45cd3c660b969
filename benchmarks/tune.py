"""A study of 24 trials on Adult, killed twice: trials lost or doubled, AUC of the best, steps saved.

The first kill -9 hits the tuner, the second the tuner and all processes of its trials at once. ``best.yaml`` is then
run twice: as it is, which must give the same bits again, and with ``data.split.validation_share=0``, on all train rows
to the end of the last epoch, as the committed experiment trains, its rival on the held-out rows. No trial is chosen by
those.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import NIGHTJAR, finish, options, python, result_of

STUDY, AFTER = "bench", (6, 14)  # ended trials after which the study is killed
ALL_ROWS = "data.split.validation_share=0"
SPACE = (
    "train.lr=tag(log, interval(5e-4,2e-2))",
    "train.sparse_lr=tag(log, interval(2e-2,1))",
    "model.embedding_dim=choice(4,8,16)",
    "train.warmup_steps=int(interval(20,150))",
)
ENDED = ("done", "pruned", "failed")


def main() -> None:
    given = options(
        __doc__,
        adult=(None, "adult.data", {"type": Path, "required": True}),
        trials=24,
        validation_share=0.25,
        store=(None, "keep the store here", {"type": Path}),
    )
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or Path(folder, "store")
        study = Study(store)
        common = ["experiment=adult", f"data.path={given.adult.resolve()}", f"store={store}"]
        split = [f"data.split.validation_share={given.validation_share}", f"study={STUDY}"]
        command = ["tune", *common, *split, *SPACE, f"tune.trials={given.trials}", "tune.parallel=2"]
        began = time.monotonic()
        for place, ended in enumerate(AFTER):
            changed = study.kill(command, min(ended, given.trials - 2), with_trials=place == 1)
            print(f"killed after {study.ended()} ended trials; changed since the last kill: {changed}", flush=True)
        python(*NIGHTJAR, *command)
        seconds, changed = time.monotonic() - began, study.changed()
        python(*NIGHTJAR, "run", *common, "run=committed", "train.threads_per_rank=1")
        again, final = study.run_best("again"), study.run_best("final", ALL_ROWS)
        study.report(given.trials, seconds, changed, again, final)


class Study:
    """The study in ``store``, and what its ended trials looked like when it was last killed."""

    def __init__(self, store: Path) -> None:
        self.store, self.seen = store, dict[str, bytes]()
        self.folder = store / "studies" / STUDY

    def trials(self) -> list[dict[str, Any]]:
        """The records of all trials."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / "trials").glob("[0-9]*.json"))]

    def ended(self) -> int:
        """How many have ended."""
        return sum(trial["state"] in ENDED for trial in self.trials())

    def changed(self) -> list[str]:
        """The ended trials that have changed since the last kill."""
        return [name for name, data in self.seen.items() if (self.folder / "trials" / name).read_bytes() != data]

    def kill(self, command: list[str], ended: int, *, with_trials: bool) -> list[str]:
        """Run the study until ``ended`` trials have ended, and kill it; which ended trials had changed before."""
        process = subprocess.Popen([sys.executable, *NIGHTJAR, *command], stdout=sys.stderr)
        while self.ended() < ended and process.poll() is None:
            time.sleep(0.1)
        if process.poll() is not None:
            raise SystemExit(f"the study ended with {process.returncode} before it was killed")
        below = psutil.Process(process.pid).children(recursive=True) if with_trials else []
        for number in [process.pid, *(each.pid for each in below)]:
            os.kill(number, signal.SIGKILL)
        process.wait()
        time.sleep(1.0)
        changed = self.changed()
        for path in (self.folder / "trials").glob("[0-9]*.json"):
            trial = json.loads(path.read_text())
            if trial["state"] in ENDED and trial.get("exit_code") is None:
                self.seen[path.name] = path.read_bytes()
        return changed

    def run_best(self, run: str, *overrides: str) -> dict[str, Any]:
        """The result of the best trial's settings, run from ``best.yaml`` as a user does."""
        with tempfile.TemporaryDirectory() as folder:
            experiment = Path(folder, "experiment")
            experiment.mkdir()
            (experiment / "best.yaml").write_bytes((self.folder / "best.yaml").read_bytes())
            named = ["experiment=best", f"store={self.store}", f"run={run}"]
            python(*NIGHTJAR, "run", "--config-dir", folder, *named, *overrides)
        return result_of(self.store, run)

    def report(
        self, trials: int, seconds: float, changed: list[str], again: dict[str, Any], final: dict[str, Any]
    ) -> None:
        """Print the JSON line."""
        known = self.trials()
        shown = json.loads(python(*NIGHTJAR, "tune", "show", STUDY, f"store={self.store}", "--json"))
        best = next(each for each in known if each["number"] == shown["best"])
        found, committed = result_of(self.store, best["run"]), result_of(self.store, "committed")
        steps, whole = sum(each["steps"] for each in known), sum(each["steps_total"] for each in known)
        nes = [each["train"]["validation"]["ne"] for each in (found, again)]
        looks = [[look["step"] for look in each["looks"]] for each in known]
        first = result_of(self.store, known[0]["run"])["eval"]["auc"] if known[0]["state"] == "done" else None
        finish(
            "tune",
            1 - steps / whole,
            trials=len(known),
            lost=trials - len({each["run"] for each in known if each["state"] in ENDED}),
            doubled=len(known) - len({json.dumps(each["parameters"]) for each in known}),
            looks_doubled=sum(len(each) - len(set(each)) for each in looks),
            changed_after_kill=len(changed),
            **{state: sum(each["state"] == state for each in known) for state in ENDED},
            steps=steps,
            steps_in_full=whole,
            auc_all_rows=final["eval"]["auc"],
            auc_committed=committed["eval"]["auc"],
            auc_best_trial=found["eval"]["auc"],
            auc_first_trial=first,
            ne_all_rows=final["eval"]["ne"],
            ne_committed=committed["eval"]["ne"],
            ne_best_trial=found["eval"]["ne"],
            best=best["number"],
            parameters=best["parameters"],
            bit_for_bit=found["eval"] == again["eval"] and nes[0] == nes[1],
            seconds=seconds,
        )


if __name__ == "__main__":
    main()
