"""``make bench-nights``: ten simulated nights of a world that drifts: nightly, from scratch, frozen.

Every night's log is drawn from a synthetic world whose effects turn and whose ids come and go. ``nightly``: `nightjar
nightly`, a warm start from the night before and one pass over the day alone. ``scratch``: a new training on all days
so far; on the first night they are the same. ``frozen``: the first night's model. All three are published versions
and score the same rows, each by the id mappings it was trained with: the held-out share of ``--judged`` rows of the
day, many more than its log has (on the log's own, the standard error of nightly over scratch is 0.27 %, as large as
the bar). By the hash split nobody trained on a row equal to one of them. Seconds are those of the stages ingest to
train, all of them in this process, without the first night's. ``ratio``: the largest NE of nightly over scratch, of all
nights; the bars: at most 1.003, with at most a quarter of the seconds, and below frozen on every night after the third.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any

import numpy as np

from benchmarks.harness import finish, nightjar, options, show, silent, words
from pipeline.core.errors import GateHeldError
from pipeline.evaluation import evaluate
from pipeline.publishing.promotion import incumbent
from pipeline.publishing.served import ServedModel, local_version
from pipeline.records import LABEL
from pipeline.serving.incumbent_features import translation
from pipeline.serving.scores import score_dataset
from pipeline.store import Artifact, Store
from pipeline.training.parquet import SplitReader

FIRST = date(2026, 1, 1)
TRAINING = ("ingest", "plan", "partition", "train")
MODELS = ("nightly", "scratch", "frozen")
NIGHT_AFTER = 3  # the first nights, in which a frozen model may still do
DRIFT = words("""data=synthetic data.synthetic.drift=0.06 data.synthetic.new_ids=0.02
    data.synthetic.popularity_drift=0.02""")
# The bench compares trainings: a night that is held because its 60,000 held-out rows are too few would make it one
# of the gate, so that allows 0.01.
SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64,32] train.global_batch=512
    train.precision=fp32 train.lr=0.001 train.warmup_steps=1 train.schedule=constant train.threads_per_rank=1
    train.log_every_steps=1000 gate.replicates=50 gate.max_psi=null gate.max_calibration_error=0.2
    gate.best_of_last=1 gate.max_ne_increase=0.01 launch.inline=[ingest,plan,partition,train,evaluate,publish]""")


def main() -> None:
    given = options(
        __doc__,
        words="settings",
        nights=10,
        rows=(300_000, "of a day, a fifth of them held out"),
        judged=(500_000, "drawn of each day, a fifth of them scored"),
        ids=(1_000, "of the largest feature"),
        seed=(2026, "of the world and the models"),
    )
    silent()
    log = [f"data.synthetic.rows={given.rows}", f"data.synthetic.ids_per_feature={given.ids}", *given.settings]
    with tempfile.TemporaryDirectory() as folder:
        world = [f"store={folder}", *DRIFT, *SETTINGS, f"seed={given.seed}", *log]
        nights = [run_night(Store(folder), world, number, given.judged) for number in range(given.nights)]
    nightly, scratch = (sum(night[f"{name}_seconds"] for night in nights[1:]) for name in MODELS[:2])
    late = nights[NIGHT_AFTER:]
    finish(
        "nights",
        max(night["nightly"] / night["scratch"] for night in nights[1:]),
        seconds_share=nightly / scratch,
        frozen_beaten=sum(night["nightly"] < night["frozen"] for night in late),
        of=len(late),
        held=sum(night["held"] for night in nights),
        standard_error=max(night["error"] for night in nights[1:]),
        **{name: [round(night[name], 5) for night in nights] for name in MODELS},
        nightly_seconds=nightly,
        scratch_seconds=scratch,
    )


def run_night(store: Store, world: Sequence[str], number: int, judged: int) -> dict[str, float]:
    """One night of all three; NE and seconds of each."""
    day = FIRST + timedelta(days=number)
    held = held_by_gate("nightly", f"date={day}", "publish.model=nightly", *world)
    if number:  # the first night is a training from scratch itself
        every = "stages=[ingest,plan,partition,train,evaluate,publish]"
        names = ["publish.model=scratch", f"run=scratch-{day}", "gate.force=to be scored"]
        held_by_gate("run", f"data.day={FIRST}..{day}", every, *names, *world)
    scratch = "scratch" if number else "nightly"
    found = {"held": float(held), **judged_nes(store, day, world, judged, "nightly", scratch)}
    for name, model in (("nightly", "nightly"), ("scratch", scratch)):
        stages = store.read_json(f"runs/{model}-{day}/result.json")["stages"]
        found[f"{name}_seconds"] = sum(stages[stage]["seconds"] for stage in TRAINING)
    show(str(day), found)
    return found


def held_by_gate(*arguments: str) -> bool:
    """Do the command, silently; whether the gate held its model."""
    held = GateHeldError.exit_code
    return nightjar(*arguments, allowed=(0, held)) == held


def judged_nes(
    store: Store, day: date, world: Sequence[str], rows: int, model: str, scratch: str = ""
) -> dict[str, float]:
    """``scores`` of ``model``, of ``scratch`` and of the first night's version of ``model``, on ``rows`` of ``day``.

    Ids and inputs are as in the night's run; those of the first night stand for ``scratch`` where there is none.
    """
    night = store.read_json(f"runs/{model}-{day}/result.json")["stages"]["ingest"]["artifact"]
    name = f"judged-{day}"
    more = [f"data.synthetic.rows={rows}", f"data.mapping_from={night}", "data.name=judged", f"run={name}"]
    nightjar("ingest", f"data.day={day}", *world, *more)
    dataset = store.get(store.read_json(f"runs/{name}/result.json")["stages"]["ingest"]["artifact"], "ingest")
    first = store.get(store.read_json(f"runs/{model}-{FIRST}/result.json")["model"]["uri"], "publish")
    versions = (serving(store, model), serving(store, scratch) if scratch else first, first)
    return scores(store, dataset, dict(zip(MODELS, versions, strict=True)))


def serving(store: Store, model: str) -> Artifact:
    """The version of ``model`` that serves."""
    found = incumbent(store, model)
    assert found is not None
    return found


def scores(store: Store, dataset: Artifact, versions: dict[str, Artifact]) -> dict[str, float]:
    """NE of each version on the held-out rows of ``dataset``, and ``error``: the standard one of nightly / scratch."""
    split = SplitReader(store, dataset, "test")
    with contextlib.ExitStack() as stack:
        models: dict[str, Any] = {}
        for name, version in versions.items():
            served = ServedModel(stack.enter_context(local_version(store, version.path)), 1 << 30)
            models[name] = served, translation(store, dataset.path, version.path)
        found = score_dataset(split, models, {}, [])
    labels = np.asarray(split.column(LABEL)).astype(np.float64)
    logits = {name: np.concatenate(found.logits[name]).astype(np.float64) for name in versions}
    losses = {name: np.logaddexp(0, values) - labels * values for name, values in logits.items()}
    difference = losses["nightly"] - losses["scratch"]
    error = float(difference.std() * np.sqrt(len(difference)) / losses["scratch"].sum())
    return {name: float(evaluate(labels, logits[name])["ne"]) for name in versions} | {"error": error}


if __name__ == "__main__":
    main()
