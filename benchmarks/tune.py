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

from benchmarks.harness import finish, options

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
    """Run the study, killed and resumed, and print the result line."""
    given = options(
        __doc__,
        adult=(None, "adult.data", {"type": Path, "required": True}),
        trials=24,
        validation_share=0.25,
        store=(None, "keep the store here", {"type": Path}),
    )
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or Path(folder, "store")
        common = ["experiment=adult", f"data.path={given.adult.resolve()}", f"store={store}"]
        command = [
            "tune",
            *common,
            f"data.split.validation_share={given.validation_share}",
            f"study={STUDY}",
            *SPACE,
            f"tune.trials={given.trials}",
            "tune.parallel=2",
        ]
        began = time.monotonic()
        seen: dict[str, bytes] = {}
        for place, ended in enumerate(AFTER):
            changed = _killed(command, store, min(ended, given.trials - 2), with_trials=place == 1, seen=seen)
            print(f"killed after {_ended(store)} ended trials; changed since the last kill: {changed}", flush=True)
        _nightjar(*command)
        seconds = time.monotonic() - began
        changed = [name for name, data in seen.items() if (_folder(store) / name).read_bytes() != data]
        _nightjar("run", *common, "run=committed", "train.threads_per_rank=1")
        _report(store, given.trials, seconds, changed, _best(store, "again"), _best(store, "final", ALL_ROWS))


def _nightjar(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pipeline.cli", *arguments], check=True, stdout=sys.stderr)


def _folder(store: Path) -> Path:
    return store / "studies" / STUDY / "trials"


def _trials(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(_folder(store).glob("[0-9]*.json"))]


def _ended(store: Path) -> int:
    return sum(trial["state"] in ENDED for trial in _trials(store))


def _killed(command: list[str], store: Path, ended: int, *, with_trials: bool, seen: dict[str, bytes]) -> list[str]:
    """Run the study until ``ended`` trials have ended, and kill it; which ended trials of ``seen`` have changed."""
    process = subprocess.Popen([sys.executable, "-m", "pipeline.cli", *command], stdout=sys.stderr)
    while _ended(store) < ended and process.poll() is None:
        time.sleep(0.1)
    if process.poll() is not None:
        raise SystemExit(f"the study ended with {process.returncode} before it was killed")
    below = _below(process.pid) if with_trials else []
    for number in [process.pid, *below]:
        os.kill(number, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    changed = [name for name, data in seen.items() if (_folder(store) / name).read_bytes() != data]
    seen |= {
        path.name: path.read_bytes()
        for path in _folder(store).glob("[0-9]*.json")
        if json.loads(path.read_text())["state"] in ENDED and json.loads(path.read_text()).get("exit_code") is None
    }
    return changed


def _below(process: int) -> list[int]:
    """The processes that ``process`` has started, and theirs."""
    children = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [each for child in children for each in (child, *_below(child))]


def _best(store: Path, run: str, *overrides: str) -> dict[str, Any]:
    """The result of the best trial's settings, run from ``best.yaml`` as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder, "experiment")
        experiment.mkdir()
        (experiment / "best.yaml").write_bytes((store / "studies" / STUDY / "best.yaml").read_bytes())
        _nightjar("run", "--config-dir", folder, "experiment=best", f"store={store}", f"run={run}", *overrides)
    return _result(store, run)


def _shown(store: Path) -> dict[str, Any]:
    """What ``nightjar tune show`` says of the study."""
    command = [sys.executable, "-m", "pipeline.cli", "tune", "show", STUDY, f"store={store}", "--json"]
    shown: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return shown


def _result(store: Path, run: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((store / "runs" / run / "result.json").read_text())
    return result


def _report(
    store: Path, trials: int, seconds: float, changed: list[str], again: dict[str, Any], final: dict[str, Any]
) -> None:
    known = _trials(store)
    best = next(each for each in known if each["number"] == _shown(store)["best"])
    there, committed = _result(store, best["run"]), _result(store, "committed")
    steps, whole = sum(each["steps"] for each in known), sum(each["steps_total"] for each in known)
    same = there["eval"] == again["eval"] and there["train"]["validation"]["ne"] == again["train"]["validation"]["ne"]
    looks = [[look["step"] for look in each["looks"]] for each in known]
    finish(
        "tune",
        1 - steps / whole,
        trials=len(known),
        lost=trials - len({each["run"] for each in known if each["state"] in ENDED}),
        doubled=len(known) - len({json.dumps(each["parameters"]) for each in known}),
        looks_doubled=sum(len(each) - len(set(each)) for each in looks),
        changed_after_kill=len(changed),
        done=sum(each["state"] == "done" for each in known),
        pruned=sum(each["state"] == "pruned" for each in known),
        failed=sum(each["state"] == "failed" for each in known),
        steps=steps,
        steps_in_full=whole,
        auc_all_rows=final["eval"]["auc"],
        auc_committed=committed["eval"]["auc"],
        auc_best_trial=there["eval"]["auc"],
        auc_first_trial=_result(store, known[0]["run"])["eval"]["auc"] if known[0]["state"] == "done" else None,
        ne_all_rows=final["eval"]["ne"],
        ne_committed=committed["eval"]["ne"],
        ne_best_trial=there["eval"]["ne"],
        best=best["number"],
        parameters=best["parameters"],
        bit_for_bit=same,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
