"""``make bench-nights``: ten simulated nights of a world that drifts: nightly, from scratch, frozen.

Every night's log is drawn from a synthetic world whose effects turn and whose ids come and go. ``nightly``: `nightjar
nightly`, a warm start from the night before and one pass over the day alone. ``scratch``: a new training on all days
so far; on the first night they are the same. ``frozen``: the first night's model. All three are published versions
and score the same rows, each by the id mappings it was trained with: the held-out share of ``--judged`` rows of the
day, many more than its log has (on the log's own, the standard error of nightly over scratch is 0.27 %, as large as
the bar). By the hash split nobody trained on a row equal to one of them. Seconds are those of the stages ingest to
train, all of them in this process, without the first night's. ``ratio``: the largest NE of nightly over scratch, of all
nights of all ``--seeds``, each of which draws another world; the bars: at most 1.003, with at most a quarter of the
seconds, and below frozen on every night after the third. Lists of figures are by night, those of the first seed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import finish, nightjar, options, show, silent, words
from pipeline.core.errors import GateHeldError
from pipeline.evaluation import evaluate
from pipeline.publishing.promotion import incumbent
from pipeline.publishing.served import ServedModel, local_version
from pipeline.records import LABEL
from pipeline.report.page import Figure, from_template
from pipeline.report.svg import Axis, Frame, Point, drawing, tag, text_at
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
SETTINGS = words("""model.embedding_dim=8 model.bottom_mlp=[32] model.top_mlp=[64,32] train.global_batch=512
    train.precision=fp32 train.lr=0.001 train.warmup_steps=1 train.schedule=constant train.threads_per_rank=1
    train.log_every_steps=1000 gate.replicates=50 gate.max_psi=null gate.max_calibration_error=0.2
    gate.best_of_last=1 launch.inline=[ingest,plan,partition,train,evaluate,publish]""")
# The bench compares trainings: a night that is held because its 60,000 held-out rows are too few would make it one
# of the gate.
SETTINGS.append("gate.max_ne_increase=0.01")


def main() -> None:
    given = options(
        __doc__,
        words="settings",
        nights=10,
        rows=(300_000, "of a day, a fifth of them held out"),
        judged=(500_000, "drawn of each day, a fifth of them scored"),
        ids=(1_000, "of the largest feature"),
        seeds=("2026", "of worlds and models, such as 1,2,3"),
        plot=(None, "write the first seed's three curves there, as a page with an SVG", {"type": Path}),
    )
    silent()
    log = [f"data.synthetic.rows={given.rows}", f"data.synthetic.ids_per_feature={given.ids}", *given.settings]
    worlds: dict[str, list[dict[str, float]]] = {}
    for seed in given.seeds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            world = [f"store={folder}", *DRIFT, *SETTINGS, f"seed={seed}", *log]
            worlds[seed] = [run_night(Store(folder), world, number, given.judged) for number in range(given.nights)]
    first = next(iter(worlds.values()))
    if given.plot:
        given.plot.write_text(curves(first))
    every = [night for nights in worlds.values() for night in nights[1:]]
    late = [night for nights in worlds.values() for night in nights[NIGHT_AFTER:]]
    ends = [nights[-1] for nights in worlds.values()]
    nightly, scratch = (sum(night[f"{name}_seconds"] for night in every) for name in MODELS[:2])
    by_seed = {
        seed: max(night["nightly"] / night["scratch"] for night in nights[1:]) for seed, nights in worlds.items()
    }
    finish(
        "nights",
        max(by_seed.values()),
        by_seed={seed: round(ratio, 5) for seed, ratio in by_seed.items()},
        seconds_share=nightly / scratch,
        seconds_share_last=max(night["nightly_seconds"] / night["scratch_seconds"] for night in ends),
        frozen_beaten=sum(night["nightly"] < night["frozen"] for night in late),
        of=len(late),
        held=sum(night["held"] for nights in worlds.values() for night in nights),
        standard_error=max(night["error"] for night in every),
        frozen_last=min(night["frozen"] / night["nightly"] for night in ends),
        **{name: [round(night[name], 5) for night in first] for name in MODELS},
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
    dataset, first = judged_dataset(store, day, world, judged, f"nightly-{day}"), first_model(store, "nightly")
    scratch = serving(store, "scratch") if number else first
    found = scores(store, dataset, {"nightly": serving(store, "nightly"), "scratch": scratch, "frozen": first})
    for name, model in (("nightly", "nightly"), ("scratch", "scratch" if number else "nightly")):
        stages = store.read_json(f"runs/{model}-{day}/result.json")["stages"]
        found[f"{name}_seconds"] = sum(stages[stage]["seconds"] for stage in TRAINING)
    found["held"] = float(held)
    show(str(day), found)
    return found


def first_model(store: Store, model: str) -> Artifact:
    """The version that the first night published."""
    return store.get(store.read_json(f"runs/{model}-{FIRST}/result.json")["model"]["uri"], "publish")


def judged_dataset(store: Store, day: date, world: Sequence[str], rows: int, run_name: str) -> Artifact:
    """The dataset whose held-out rows are scored: ``rows`` of ``day``, ids and inputs as in the run ``run_name``."""
    night = store.read_json(f"runs/{run_name}/result.json")["stages"]["ingest"]["artifact"]
    name = f"judged-{day}"
    more = [f"data.synthetic.rows={rows}", f"data.mapping_from={night}", "data.name=judged", f"run={name}"]
    nightjar("ingest", f"data.day={day}", *world, *more)
    return store.get(store.read_json(f"runs/{name}/result.json")["stages"]["ingest"]["artifact"], "ingest")


def held_by_gate(*arguments: str) -> bool:
    """Do the command, silently; whether the gate held its model."""
    held = GateHeldError.exit_code
    return nightjar(*arguments, allowed=(0, held)) == held


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


def curves(nights: Sequence[dict[str, float]]) -> str:
    """The three curves over the nights, as a page."""
    lines: dict[str, list[Point]] = {name: [(i, night[name]) for i, night in enumerate(nights, 1)] for name in MODELS}
    corners = [point for line in lines.values() for point in line]
    frame = Frame.around(corners, Axis(title="night", whole=True), Axis(title="NE"))
    body = frame.grid()
    for name, kind, below in zip(MODELS, ("curve", "reference", "whisker"), (13, -5, -5), strict=True):
        body.append(tag("path", tag("title", name), class_=kind, fill="none", d=frame.path(lines[name])))
        x, y = lines[name][-1]
        body.append(text_at(frame.x(x) - 3, frame.y(y) + below, name, "end", "note"))
    figure = Figure("NE by night", "held-out rows of each day; lower is better", drawing(body, "NE by night"))
    files = "the JSON line of make bench-nights"
    return from_template("figures.html", title="Ten nights", files=files, heading="NE by night", figures=[figure])


if __name__ == "__main__":
    main()
