"""A version that several ranks write and judge: the same bytes and figures on any number, nothing half published."""

import dataclasses
import functools
import importlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from benchmarks.harness import run_config
from pipeline.checkpoint.collectives import Parcel, all_gather_parcels, gather_parcels, run_on_rank0, this_rank
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, NightjarError
from pipeline.publishing.model_commands import collect
from pipeline.records import BudgetLedger, GateRecord, read
from pipeline.stages.release import find_or_judge_version
from pipeline.stages.release_ranks import _version_folder, join_ranks, names_for_this_rank, open_version
from pipeline.stages.steps import steps
from pipeline.store import Store
from tests.checkpoint.s3 import bucket
from tests.commands import nightjar
from tests.embeddings.ranks import spawn
from tests.publishing import made

WORLDS = (2, 3, 4)
TABLES = 8
SMALL = [
    "experiment=demo",
    *(f"~data.sparse.C{number}" for number in range(TABLES + 1, 27)),
    *(f"~data.dense.I{number}" for number in range(4, 14)),
    "data.synthetic.rows=12000",
    "ingest.rows_per_group=300",
    "data.split.validation_share=0.2",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "train.global_batch=256",
    "train.threads_per_rank=1",
    "gate.importance_rows=500",
    "gate.replicates=50",
    "gate.max_ne_increase=0.5",
    "gate.slices=[C1]",
    "stages=[ingest,plan,partition,train,evaluate,publish]",
]
ENSEMBLE = ["train.epochs=3", "train.snapshots.count=3", "train.snapshots.keep=2"]
CASES = {
    "fp32": ["publish.quantise=fp32"],
    "4 bits": ["publish.quantise=4"],
    "calibrated": ["publish.calibrator.method=isotonic", "publish.calibrator.slices=C2"],
    "ensemble": ["publish.quantise=8", *ENSEMBLE],
}


def settings(store: Path, case: str, world: int = 1, run: str = "first"):
    more = [f"store={store}", f"run={run}", f"hardware.ranks_per_host={world}"]
    return compose([*SMALL, *CASES[case], *more])


def inputs_of(config, store):
    """The publish stage's step and its inputs; other stages' artifacts are those of one rank."""
    *earlier, last = steps(config, store)
    return last, {step.name: store.get(step.path, step.name) for step in earlier}


def publish(folder: Path, root: str, case: str) -> None:
    """Two versions of model ``ranks<world>``, the second judged beside the first."""
    world = dist.get_world_size()
    config, store = settings(Path(root), case), Store(root)
    step, inputs = inputs_of(config, store)
    config.hardware = dataclasses.replace(config.hardware, ranks_per_host=world)
    config.publish = dataclasses.replace(config.publish, model=f"{case}-{world}".replace(" ", "-"))
    join_ranks(config)
    first = find_or_judge_version(
        config, store, dataclasses.replace(step, config={**step.config, "incumbent": None}), inputs
    )
    assert (first is None) == (this_rank() != 0)
    name = run_on_rank0("looking for the first", lambda: sorted(store.names(f"models/{config.model_name}"))[-1])
    about = {**step.config, "incumbent": name}
    config.force = True
    find_or_judge_version(config, store, dataclasses.replace(step, config=about), inputs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[str], Store]:
    """By case a store with the run of one rank; made when it is first asked for."""

    @functools.cache
    def store_of(case: str) -> Store:
        folder = tmp_path_factory.mktemp("store")
        run_config(settings(folder, case))
        return Store(str(folder))

    return store_of


@pytest.fixture(scope="module")
def published(tmp_path_factory, trained) -> Callable[[str, int], list]:
    """By case and world what is told of the versions that so many ranks published of the case's training."""

    @functools.cache
    def versions_of(case: str, world: int) -> list:
        store = trained(case)
        spawn(publish, world, tmp_path_factory.mktemp("ranks"), store.url, case)
        return told(store, f"{case}-{world}".replace(" ", "-"))

    return versions_of


def told(store: Store, model: str) -> list:
    """Of a model's committed versions, files' checksums and gate records without times and names."""
    found = []
    for name in sorted(store.names(f"models/{model}")):
        artifact = store.find(f"models/{model}/{name}")
        if artifact is None:
            continue
        gate = store.read_json(f"{artifact.path}/gate.json")
        names = {"version", "incumbent_version", "best"} & {part for part, value in gate.items() if value}
        gate |= {"model": ""} | dict.fromkeys(names - {"best"}, "v")
        if "best" in names:
            gate["best"] |= {"version": "v"}
        if gate.get("cost"):
            gate["cost"] |= {"row_us": 0.0, "row_us_of_incumbent": 0.0}
        changing = {"gate.json", "card.json", "card.md", "README.md", "config.yaml"}
        files = {file: entry.checksum for file, entry in artifact.files.items() if file not in changing}
        found.append((files, gate))
    return found


@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(case, world, marks=() if (case, world) == ("fp32", 2) else pytest.mark.slow)
        for case in CASES
        for world in WORLDS
    ],
)
def test_versions_of_several_ranks_have_the_bytes_and_the_record_of_one(published, case: str, world: int) -> None:
    found = published(case, 1)
    assert len(found) == 2 and published(case, world) == found
    (files, gate), (_, beside) = found
    assert sum(file.startswith("tables/") for file in files) == TABLES
    assert gate["importance"] and gate["coverage"] and (gate["slices"] or case == "calibrated")
    record = GateRecord.from_json(beside)
    assert record.change.ne.point == (0 if case != "calibrated" else pytest.approx(0, abs=0.2))
    assert record.incumbent_version


def test_every_look_of_the_stage_spends_its_share_and_a_verdict_that_is_found_none(trained) -> None:
    """On one rank, of one training: beside nothing, twice beside the first version, and once more from the store."""
    store = trained("fp32")
    config = settings(Path(store.url), "fp32")
    step, inputs = inputs_of(config, store)
    config.publish = dataclasses.replace(config.publish, model="budget")
    config.gate = dataclasses.replace(config.gate, budget=1.0)
    config.data = dataclasses.replace(config.data, day="2026-02-01..2026-02-02")

    def found(beside: str | None, force: bool) -> GateRecord:
        config.force = force
        own = dataclasses.replace(step, config={**step.config, "incumbent": beside})
        version = find_or_judge_version(config, store, own, inputs)
        assert version is not None
        return read(GateRecord, store, f"{version.path}/gate.json")

    ledger = "models/budget/budget.json"
    first = found(None, force=True)
    assert first.budget is None and not store.exists(ledger)
    looks = [found(first.version, force) for force in (True, True, False)]
    assert [look.budget.look for look in looks] == [1, 2, 2] and looks[1] == looks[2]
    rows = read(BudgetLedger, store, ledger).looks
    assert [(row.day, row.candidate, row.verdict) for row in rows] == [
        ("2026-02-02", look.version, look.verdict) for look in looks[:2]
    ]
    assert [row.alpha * 365 for row in rows] == pytest.approx([0.8, 0.16])
    assert looks[0].budget.alpha == rows[0].alpha and looks[0].power.power == 1 - rows[0].alpha

    # Clean-up keeps the ledger, and one that is damaged ends the stage before anything is scored.
    collect(store, "budget", keep=0, min_age_seconds=0, dry_run=False)
    assert store.names("models/budget") == ["budget.json"]
    store.write_bytes(ledger, b"{}")
    with pytest.raises(ArtifactError, match="budget.json is not a ledger of gate.budget"):
        found(None, force=True)
    assert store.names("models/budget") == ["budget.json"]


@pytest.mark.slow
def test_a_launched_run_publishes_with_all_of_its_ranks(tmp_path: Path) -> None:
    """Towers on two hosts: the whole run from the log to a published version, again with nothing to do."""
    run = [
        *SMALL,
        "partition=dmt",
        "hardware.hosts=2",
        f"store={tmp_path}",
        "run=towers",
        "gate.max_ne=null",
        "gate.max_calibration_error=null",
        "gate.min_baseline_gain=null",
    ]
    done = nightjar("run", *run)
    assert done.returncode == 0, done.stdout + done.stderr
    store = Store(str(tmp_path))
    current = store.read_json("models/synthetic/current.json")
    gate = store.read_json(f"models/synthetic/{current['version']}/gate.json")
    assert gate["tower_importance"] and gate["importance"]
    shares = [line for line in done.stdout.splitlines() if "tables and scores by 2 ranks" in line]
    assert len(shares) == 1


def damage(folder: Path, root: str) -> None:
    """Rank 1's chunk of the checkpoint is damaged: all ranks raise the same error, and nothing is left."""
    from pipeline.training.distributed import shared_failure

    config, store = settings(Path(root), "fp32"), Store(root)
    step, inputs = inputs_of(config, store)
    config.hardware = dataclasses.replace(config.hardware, ranks_per_host=2)
    config.publish = dataclasses.replace(config.publish, model="damaged")
    join_ranks(config)
    try:
        with shared_failure():
            find_or_judge_version(config, store, step, inputs)
    except NightjarError as error:
        (folder / f"{this_rank()}.json").write_text(json.dumps(error.to_json()))


def test_damage_that_one_rank_meets_is_the_error_of_all(trained, tmp_path: Path) -> None:
    store = trained("fp32")
    config = settings(Path(store.url), "fp32")
    final = inputs_of(config, store)[1]["train"].summary["final"]
    file = max(store.get(final, "train").files.items(), key=lambda each: each[1].bytes)[0]
    path = Path(store.full(f"{final}/{file}"))
    data = path.read_bytes()
    try:
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        spawn(damage, 2, tmp_path, store.url)
    finally:
        path.write_bytes(data)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and file in first["message"]
    assert not store.fs.find(store.full("models/damaged")), store.fs.find(store.full("models/damaged"))


# What a rank is killed before: a piece of work of its own, for the second table; rank 0 may come to none of the tables.
POINTS = {
    "a table": ("release_ranks", "write_table", 1),
    "the rest": ("release", "_write_rest", 0),
    "scores of the first": ("release_ranks", "score_dataset", 0),
    "scores of the second": ("release_ranks", "score_dataset", 1),
    "the worth of features": ("release_ranks", "importance", 0),
    "the worth of others": ("release_ranks", "importance", 1),
}


def killed(folder: Path, root: str, module: str, name: str, victim: int) -> None:
    """Rank ``victim`` is killed when it comes to function ``name`` of ``module``."""
    own = importlib.import_module(f"pipeline.stages.{module}")
    real, calls = getattr(own, name), []

    def fatal(*arguments, **named):
        calls.append(1)
        if len(calls) > (name == "write_table"):
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    if this_rank() == victim:
        setattr(own, name, fatal)
    publish(folder, root, "fp32")


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point == "a table" else pytest.mark.slow) for point in POINTS]
)
def test_a_rank_that_is_killed_leaves_nothing_published(trained, published, tmp_path: Path, point: str) -> None:
    """Whichever it is; the same command then publishes the same version."""
    whole, store, model = published("fp32", 2), trained("fp32"), "fp32-2"
    store.fs.rm(store.full(f"models/{model}"), recursive=True)
    with pytest.raises(ProcessExitedException, match="SIGKILL|exit code"):  # whichever rank's end is noticed first
        spawn(killed, 2, tmp_path, store.url, *POINTS[point])
    assert (tmp_path / "killed").exists()
    assert told(store, model) == []
    assert not store.exists(f"models/{model}/current.json")
    spawn(publish, 2, tmp_path, store.url, "fp32")
    assert told(store, model) == whole


def parcels(folder: Path) -> None:
    rank = this_rank()
    own = Parcel({"rank": rank}, [np.arange(rank, dtype=np.int16), np.full((2, rank), rank, np.float32)])
    every, first = all_gather_parcels(own), gather_parcels(own)
    assert [each.record["rank"] for each in every] == [*range(dist.get_world_size())]
    assert len(first) == (dist.get_world_size() if rank == 0 else 0)
    for number, each in enumerate([*every, *first]):
        of = number % dist.get_world_size()
        assert each.arrays[0].dtype == np.int16 and each.arrays[0].tolist() == [*range(of)]
        assert each.arrays[1].shape == (2, of) and (each.arrays[1] == of).all()
    (folder / f"{rank}").touch()


def test_parcels_bring_arrays_of_any_shape_as_they_are(tmp_path: Path) -> None:
    spawn(parcels, 3, tmp_path)
    assert all((tmp_path / f"{rank}").exists() for rank in range(3))
    alone = Parcel("x", [np.zeros(2)])
    assert all_gather_parcels(alone) == gather_parcels(alone) == [alone]


def test_one_rank_has_everything(tmp_path: Path) -> None:
    assert sorted(names_for_this_rank({"a": 3, "b": 2, "c": 2})) == ["a", "b", "c"]


def opened(folder: Path, url: str, path: str, settings: dict) -> None:
    fsspec.config.conf["s3"] = settings
    with _version_folder(Store(url), path) as here, open_version(Store(url), path, 1 << 20) as served:
        dense, ids = made.rows(20)
        found = {"folder": str(here), "logits": served.score(dense, ids).tolist()}
        (folder / f"{this_rank()}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_of_an_object_store_each_host_fetches_a_version_once(endpoint, monkeypatch, tmp_path: Path, hosts: int) -> None:
    """And its ranks read the same files; all give the same scores."""
    with bucket(endpoint, monkeypatch) as url:
        path = made.write_version(Store(url), "8")
        endpoint.read.clear()
        spawn(opened, 2 * hosts, tmp_path, url, path, fsspec.config.conf["s3"], local=2)
    tables = {part: times for part, times in endpoint.read.items() if "/tables/" in part[0]}
    assert tables and set(tables.values()) == {2 * hosts}  # ``opened`` opens it twice
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * hosts)]
    assert found[::2] == found[1::2] and len({each["folder"] for each in found}) == hosts
    assert all(each["logits"] == found[0]["logits"] for each in found)
    assert not any(Path(each["folder"]).exists() for each in found)
