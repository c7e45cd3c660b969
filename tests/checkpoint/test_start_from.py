"""``checkpoint.init_from``: a new run starts from another one's checkpoint, a resumed one goes on from its own."""

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from tests.commands import nightjar_in_turn
from tests.few_features import FEW

SMALL = [
    *FEW,
    "data.synthetic.rows=3000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=256",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate]",
    "checkpoint.every_steps=3",
    "train.threads_per_rank=1",
    "stages=[ingest,plan,partition,train]",
]
DAY = ["data.synthetic.new_ids=0.2", "train.max_steps=2", "train.sparse_lr=0.5", "train.warmup_steps=0"]
NORMALISED = ["data.dense_transform=max_norm", "train.max_steps=2"]
ALLOWED = ["run=b", "checkpoint.init_from=a", "checkpoint.allow=[train]", "train.lr=0.001"]
TABLES_ONLY = ["run=f", "checkpoint.init_from=a/step-00000009", "checkpoint.init_tables_only=true"]
FIRST = [["run=a"], ALLOWED]
SECOND = [  # once b's training, but not its checkpoints, is forgotten
    ["run=a", "train.max_steps=4", "train.weight_decay=0.01"],
    ALLOWED,
    ["run=c", "checkpoint.init_from=a/step-00000009", "train.lr=0.001"],
    ["run=d", "checkpoint.init_from=d"],
    ["run=e", "checkpoint.init_from=nowhere"],
]
THIRD = [TABLES_ONLY]  # and again, once a's checkpoints and f's training are forgotten
FOURTH = [  # once the newest manifest of f is spoilt
    ["run=g", "checkpoint.init_from=f", "stages=[ingest]"],
    ["run=h", *DAY, "data.day=2026-01-01"],
    ["run=i", *DAY, "data.day=2026-01-05", "checkpoint.init_from=h", "checkpoint.allow=[dataset]"],
    ["run=j", *NORMALISED],
    ["run=k", *NORMALISED, "checkpoint.init_from=j"],
]


def told(store, jobs):
    """What each of ``jobs`` said, and the errors of all of them."""
    done = nightjar_in_turn([["run", f"store={store}", *SMALL, *job] for job in jobs])
    parts = [f"{each.stdout}code {each.returncode}" for each in done]
    return parts, [error for each in done for error in each.stderr.split("nightjar: ")[1:]]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The store after the first jobs, what each of them said, and their errors."""
    store = tmp_path_factory.mktemp("start") / "store"
    parts, errors = told(store, FIRST)
    shutil.rmtree(store / "runs/b/train")
    more, further = told(store, SECOND)
    return store, [*parts, *more], [*errors, *further]


@pytest.fixture(scope="module")
def further(said, tmp_path_factory):
    """The same of the further jobs, in a copy of the store."""
    store = tmp_path_factory.mktemp("further") / "store"
    shutil.copytree(said[0], store)
    parts, _ = told(store, THIRD)
    shutil.rmtree(store / "runs/f/train")
    shutil.rmtree(store / "runs/a/checkpoints")
    parts += told(store, THIRD)[0]
    newest = max((store / "runs/f/checkpoints").glob("*/*/manifest.json"))
    newest.write_text(newest.read_text()[:-9])
    more, errors = told(store, FOURTH)
    return store, [*parts, *more], errors


def test_a_new_run_starts_from_the_newest_checkpoint_of_another(said):
    _, parts, _ = said
    assert "code 0" in parts[1]
    assert "starting from runs/a/checkpoints/" in parts[1]
    assert "allowed: train.lr was 0.002, is 0.001" in parts[1]
    assert "6 tables loaded unchanged" in parts[1]
    assert "dense part: all 8 parameters and their optimizer loaded" in parts[1]
    assert "resumed" not in parts[1]


def test_a_resumed_run_goes_on_from_its_own_checkpoints(said):
    _, parts, _ = said
    # By now run a has newer checkpoints (of four steps): b goes on all the same.
    assert "resumed from runs/b/checkpoints/" in parts[3]
    assert "starting from" not in parts[3]


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_what_it_started_from_is_gone(further):
    _, parts, _ = further
    assert "resumed from runs/f/checkpoints/" in parts[1]


def test_what_it_starts_from_is_part_of_the_training_key(said):
    assert keys_of(said, "ab") == [2, 1]


@pytest.mark.slow
def test_whether_it_starts_from_the_tables_alone_is_part_of_it_too(further):
    assert keys_of(further, "abf") == [2, 1, 1]


def keys_of(said, runs):
    """How many trainings each of ``runs`` has; no two runs have one in common."""
    store, _, _ = said
    keys = {run: {path.name for path in (store / f"runs/{run}/train").iterdir()} for run in runs}
    assert len(set().union(*keys.values())) == sum(map(len, keys.values()))
    return [len(keys[run]) for run in runs]


def test_settings_that_are_not_allowed_stop_the_run_before_anything_starts(said):
    store, parts, errors = said
    assert "code 2" in parts[4]
    assert "must be allowed: train.lr was 0.002, is 0.001" in errors[0]
    assert "checkpoint.allow=[train.lr]" in errors[0]
    assert not (store / "runs/c/train").exists()


def test_itself_and_nothing_are_no_places_to_start_from(said):
    _, parts, errors = said
    assert "code 2" in parts[5]
    assert "the run itself" in errors[1]
    assert "code 7" in parts[6]
    assert "no checkpoint 'nowhere'" in errors[2]


@pytest.mark.slow
def test_tables_alone_start_with_a_fresh_dense_part(further):
    _, parts, _ = further
    assert "dense parameters and their optimizer keep their initial values" in parts[0]
    assert "code 0" in parts[0]


@pytest.mark.slow
def test_a_run_whose_newest_manifest_is_damaged_is_not_started_from_unasked(further):
    _, parts, errors = further
    assert "code 7" in parts[2]
    assert "cannot be used: its manifest.json is not a manifest" in errors[0]
    assert "hint: checkpoint.init_from=runs/f/checkpoints/" in errors[0]


@pytest.mark.slow
def test_rows_that_belong_to_other_ids_by_now_begin_anew(further):
    store, parts, _ = further
    reset = {line.split()[1][:-1]: int(line.split()[2]) for line in parts[4].splitlines() if "rows reset" in line}
    vocab = [
        {
            path.stem: dict(zip(*pq.read_table(path, columns=["row", "id"]).to_pydict().values(), strict=True))
            for path in (store / f"datasets/synthetic/{day}").glob("*/vocab/*.parquet")
        }
        for day in ("2026-01-01", "2026-01-05")
    ]
    for table, then in vocab[0].items():
        assert reset.get(table, 0) == sum(vocab[1][table].get(row) != name for row, name in then.items()), table
    assert len(reset) > 4


@pytest.mark.slow
def test_a_layer_that_normalises_inputs_goes_with_the_checkpoint(further):
    """Run j trains with max-normalised inputs, k starts from it; the first two steps of both see their own maxima."""
    store, parts, _ = further
    assert "code 0" in parts[5] and "code 0" in parts[6]
    assert "dense part: all 10 parameters and their optimizer loaded" in parts[6]
    newest = max((store / "runs/j/checkpoints").glob("*/*/dense.safetensors"))
    largest = load_file(newest)["param/head.normalise.largest"]
    raw = [pq.read_table(path, columns=["I1", "I2"]) for path in store.glob("datasets/synthetic/*/train/*.parquet")]
    assert len(largest) == 3 and (largest > 1).all()
    assert any(np.nanmax(np.abs(table["I1"].to_numpy())) >= largest[0] > 10 for table in raw)
