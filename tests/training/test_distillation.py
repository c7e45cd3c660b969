"""``train.distill``: the loss with a teacher, whose scores follow the rows on any ranks, and which version teaches."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline import cli
from pipeline.config import CheckpointConfig, TrainConfig
from pipeline.config.compose import compose, to_yaml
from pipeline.config.train import DistillConfig
from pipeline.core.errors import ArtifactError, ConfigError, DamagedError
from pipeline.launch.run_records import write_steps
from pipeline.publishing.promotion import promote
from pipeline.publishing.versions import version_path
from pipeline.records import DatasetSchema, SparseColumn, TaskColumn
from pipeline.records.runs import Step
from pipeline.stages.distillation import covered_teacher
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.model import DensePart
from pipeline.training.parquet import SCORES, SplitReader
from pipeline.training.predict import predict
from pipeline.training.sampler import Order
from pipeline.training.trainer import train
from tests.embeddings.ranks import plan_for, spawn
from tests.few_features import FEW
from tests.training.dataset import KEY, write_dataset
from tests.training.test_train import ROWS, config, digests, trained

COLUMNS = (SparseColumn(name="a", rows=9),)
SHARE = 0.25


def loss_of(schema, extra, *, share=SHARE, evaluation=False, **settings):
    """Of three rows with logits 0.3, -1 and 2 (of a task: 0.5); labels 1, 0, 1; weights 1, 2, 0."""
    part = DensePart(torch.nn.Identity(), schema, None, train=TrainConfig(**settings))
    part.teacher_share = share
    part.train(not evaluation)
    logits, labels = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0])
    if schema.tasks:
        logits = torch.stack([logits, torch.full((3,), 0.5)], dim=1)
    loss, found, _ = part.compute_loss(logits, labels, torch.tensor([1.0, 2.0, 0.0]), torch.tensor(extra))
    assert torch.equal(found if found.dim() == 1 else found[:, 0], labels)  # figures are of the labels
    return float(loss)


def log_loss(logits, targets):
    """Of the first two rows."""
    x, y = np.array(logits), np.array(targets)
    return float(((np.logaddexp(0, x) - y * x) * [1.0, 2.0]).sum())


def schema(**changes):
    return DatasetSchema(dense=(), sparse=COLUMNS, rows={}, files={}, groups={}, **changes)


TAUGHT = 1 / (1 + np.exp([-0.7, 1.5]))  # of the logits 0.7 and -1.5
EXTRA = [[0.7], [-1.5], [9.0]]


def test_the_loss_is_that_of_labels_and_teacher_by_their_shares():
    expected = 0.75 * log_loss([0.3, -1.0], [1, 0]) + 0.25 * log_loss([0.3, -1.0], TAUGHT)
    assert loss_of(schema(), EXTRA) == pytest.approx(expected, rel=1e-6)
    assert loss_of(schema(), EXTRA, share=1.0) == pytest.approx(log_loss([0.3, -1.0], TAUGHT), rel=1e-6)
    for nothing in ({"share": 0.0}, {"evaluation": True}):
        assert loss_of(schema(), EXTRA, **nothing) == pytest.approx(log_loss([0.3, -1.0], [1, 0]), rel=1e-6)


def test_smoothing_takes_the_mean_of_both_towards_one_half():
    mixed = 0.8 * (0.75 * np.array([1, 0]) + 0.25 * TAUGHT) + 0.2 * 0.5
    assert loss_of(schema(), EXTRA, label_smoothing=0.2) == pytest.approx(log_loss([0.3, -1.0], mixed), rel=1e-6)


def test_where_rows_were_left_out_the_teacher_knows_it_as_the_model_does():
    rates = np.array([0.5, 0.25])
    x, t = np.array([0.3, -1.0]) - np.log(rates), np.array([0.7, -1.5]) - np.log(rates)
    expected = 0.75 * log_loss(x, [1, 0]) + 0.25 * log_loss(x, 1 / (1 + np.exp(-t)))
    extra = [[0.7, 0.5], [-1.5, 0.25], [9.0, 1.0]]
    assert loss_of(schema(sampled="logit"), extra) == pytest.approx(expected, rel=1e-5)


def test_further_tasks_learn_from_their_labels_alone():
    tasks = schema(tasks=(TaskColumn(name="buy", kind="binary"),))
    clicks = 0.75 * log_loss([0.3, -1.0], [1, 0]) + 0.25 * log_loss([0.3, -1.0], TAUGHT)
    expected = clicks + log_loss([0.5, 0.5], [1, 0])
    assert loss_of(tasks, [[1.0, 0.7], [0.0, -1.5], [0.0, 9.0]]) == pytest.approx(expected, rel=1e-6)


def scores_of(store, rows, name="scored"):
    """An artifact whose score of a row tells its number; column d0 does so, too."""
    with store.draft(f"teachers/{name}", kind="teacher", key=KEY, config={}, inputs={}) as draft:
        with draft.open(SCORES) as sink:
            np.lib.format.write_array(sink, np.arange(rows, dtype=np.float32) / 1000 - 1, allow_pickle=False)
        return draft.commit({"rows": rows, "problem": ""})


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_follow_their_rows_through_every_shuffle(tmp_path, ranks):
    tasks = (TaskColumn(name="buy", kind="binary"),)
    store, dataset = write_dataset(tmp_path, train=1000, group=16, tasks=tasks, row_weights=True)
    split = SplitReader(store, dataset, "train", scores_of(store, 1000))
    seen = set()
    for rank in range(ranks):
        order = Order(key="k", seed=3, global_batch=100, lanes=2, rank=rank, world_size=ranks)
        with BatchReader(split, order, independent=True) as reader:
            for batch in reader:
                rows = (batch.dense[batch.weights > 0, 0] * 1000).round()
                torch.testing.assert_close(batch.extra[batch.weights > 0, 1], rows / 1000 - 1)
                seen |= set(rows.int().tolist())
    plain = SplitReader(store, dataset, "train")
    assert len(plain.extra) == 2 and len(split.extra) == 3 and len(seen) > 700  # some rows have weight 0


def test_scores_of_other_rows_are_refused(tmp_path):
    store, dataset = write_dataset(tmp_path, train=1000)
    with pytest.raises(ArtifactError, match=r"has scores of shape \(999,\), expected 1000 rows"):
        SplitReader(store, dataset, "train", scores_of(store, 999))


EXACT = CheckpointConfig(every_steps=3, keep_last=2, quantise="fp32")
TAUGHT_BY = {"distill": DistillConfig(weight=0.5), "checkpoint": EXACT}
CASES = {
    "alone": {"checkpoint": EXACT},
    "taught": TAUGHT_BY,
    "parts": {**TAUGHT_BY, "accumulate": 3},
    "stopped": {**TAUGHT_BY, "max_steps": 7, "then": {}},
}


def run_cases(folder):
    """Each training with the scores of a teacher that likes late rows; logits and bits of its last checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = tuple(SparseColumn(name=name, rows=rows) for name, rows in ROWS.items())
    for name, case in CASES.items():
        settings = {key: value for key, value in case.items() if key != "then"}
        if rank == 0:
            scores_of(write_dataset(folder / name, train=2110, test=700, sparse=columns)[0], 2110)
        dist.barrier()
        store = Store(str(folder / name))
        dataset = store.get(f"datasets/t/{KEY}", "ingest")
        teacher = store.get("teachers/scored", "teacher") if "distill" in settings else None
        plan = plan_for("table_wise", world, rows=ROWS, dim=8)
        for each in [settings, *([{**settings, "max_steps": None}] if "then" in case else [])]:
            made = config(world, **each)
            arguments = ("runs/r/checkpoints/k", "key", lambda record: None)
            asked = select_training_settings(made)
            summary = train(asked, store, dataset, plan, *arguments, teacher=teacher)
        predictions = predict(select_prediction_settings(made), store, dataset, plan, summary["final"])
        if rank == 0:
            found = {"digests": digests(store, store.get(summary["final"], "train"))}
            found["logits"] = predictions.logits.tolist()
            (folder / f"{name}.json").write_text(json.dumps(found))
        dist.barrier()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By ranks and case."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"taught{ranks}")
        spawn(run_cases, ranks, folder)
        for name in CASES:
            found[ranks, name] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_a_teacher_teaches_the_same_on_any_ranks_and_in_parts(outcomes):
    alone, taught = (np.array(outcomes[1, name]["logits"]) for name in ("alone", "taught"))
    assert np.abs(taught - alone).mean() > 0.1
    for key in ((2, "taught"), (1, "parts"), (2, "parts")):
        np.testing.assert_allclose(outcomes[key]["logits"], taught, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_training_learns_from_the_same_scores(outcomes, ranks):
    assert trained(outcomes[ranks, "stopped"]["digests"]) == trained(outcomes[ranks, "taught"]["digests"])


SMALL = [
    "data=synthetic",
    *FEW,
    "data.name=clicks",
    "data.synthetic.rows=4000",
    "data.synthetic.ids_per_feature=60",
    "train.global_batch=256",
    "train.threads_per_rank=1",
    "train.lr=0.01",
    "train.sparse_lr=0.2",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "model.embedding_dim=8",
    "launch.inline=[ingest,plan,partition,train,evaluate,publish]",
    "stages=[ingest,plan,partition,train,evaluate,publish]",
    "gate.force='a test of teachers, whose models are small'",
    "gate.replicates=50",
]
TEACH = "train.distill.weight=0.6"
COMMANDS = {
    "first": ["run=first", TEACH],
    "second": ["run=second", TEACH, "seed=5"],
    "again": ["run=second", TEACH, "seed=5"],
    "alone": ["run=alone", "seed=5", "stages=[ingest,plan,partition,train]"],
    "third": ["run=third", TEACH, "seed=5", "data.dense_transform=percentile", "data.synthetic.rows=5000"],
    "named": ["run=named", TEACH, "train.distill.teacher=v00009-00000000"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The store, and exit code and output of each of ``COMMANDS``."""
    folder, found = tmp_path_factory.mktemp("taught"), {}
    for name, overrides in COMMANDS.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.main(["run", f"store={folder}/store", *SMALL, *overrides])
        found[name] = code, out.getvalue()
    return Store(f"{folder}/store"), found


def result(store, run):
    return store.read_json(f"runs/{run}/result.json")


def test_the_first_training_learns_from_labels_and_says_so(said):
    store, found = said
    code, text = found["first"]
    assert code == 0, text
    assert "no earlier version of model 'clicks' served: trained on labels alone" in text
    assert "teacher" not in result(store, "first")["train"]


def test_the_next_one_learns_from_the_version_that_serves(said):
    store, found = said
    code, text = found["second"]
    assert code == 0, text
    first, second = result(store, "first"), result(store, "second")
    assert second["train"]["teacher"] == first["model"]["version"]
    assert f"learnt from labels and from version {first['model']['version']}" in text
    (scores,) = store.names("runs/second/teacher")
    assert store.get(f"runs/second/teacher/{scores}", "teacher").summary["problem"] == ""
    # Scores are those of the version as it is published, whatever trains now.
    assert second["stages"]["train"]["artifact"] != result(store, "alone")["stages"]["train"]["artifact"]


def test_a_run_keeps_its_teacher_once_its_own_version_serves(said):
    store, found = said
    code, text = found["again"]
    assert code == 0, text
    assert {stage["status"] for stage in result(store, "second")["stages"].values()} == {"skipped"}


def test_a_version_that_cannot_read_the_rows_fails_no_run_unless_it_is_named(said):
    store, found = said
    code, text = found["third"]
    assert code == 0, text
    assert " cannot teach, so labels alone do: " in text
    assert "teacher" not in result(store, "third")["train"]
    code, text = found["named"]
    assert code == 7 and "model 'clicks' has no version 'v00009-00000000'" in text


def test_a_named_version_that_cannot_read_the_rows_is_refused_each_time(said, capsys):
    store, _ = said
    version = result(store, "first")["model"]["version"]
    other = ["data.dense_transform=percentile", "data.synthetic.rows=5000", "stages=[ingest,plan,partition,train]"]
    for _ in range(2):
        named = ["run=refused", TEACH, f"train.distill.teacher={version}", *other]
        assert cli.main(["run", f"store={store.url}", *SMALL, *named]) == 2
        error = capsys.readouterr().err
        assert f"train.distill.teacher={version} cannot teach this training: " in error
        assert "hint: train.distill.weight=0" in error


@pytest.mark.parametrize("named", [True, False])
def test_a_version_teaches_once_what_the_message_advises_was_done(said, capsys, named):
    """The log renamed a column. Without a name the first training goes on, so only force=true begins another one."""
    store, _ = said
    version = result(store, "first")["model"]["version"]
    run = [f"run=renamed-{named}", TEACH, "+data.dense.I1.column=I2", "data.synthetic.rows=5000", f"store={store.url}"]
    run += [
        "stages=[ingest,plan,partition,train]",
        f"{'train.distill.teacher' if named else 'publish.judge_beside'}={version}",
    ]
    assert cli.main(["run", *SMALL, *run]) == (2 if named else 0)
    allowed = "checkpoint.allow=[data.dense.I1.column]"
    shown = capsys.readouterr()
    assert f"if the log renamed it, {allowed} says so" in shown.err + shown.out
    assert cli.main(["run", *SMALL, *run, allowed, f"force={not named}"]) == 0
    assert result(store, f"renamed-{named}")["train"]["teacher"] == version


def put_version(store, number, run):
    """A version of ``run`` that serves from now on."""
    name = f"v{number:05d}-0000000{number}"
    with store.draft(version_path("clicks", name), kind="model", key=f"k{number}", config={}, inputs={}) as draft:
        draft.commit({"run": run})
    promote(store, "clicks", name, by="publish")
    return {"version": name, "key": f"k{number}"}


def begin(store, config):
    """Record what ``config`` begins with, as a run does; return its teacher."""
    taught_by = covered_teacher(config, store)
    store.write_bytes(f"runs/{config.run}/config.yaml", to_yaml(config).encode())
    write_steps(store, config.run, [Step(name="train", key="k", path="p", config={"teacher": taught_by})])
    return taught_by


def test_no_run_learns_from_its_own_version_however_often_it_is_forced(tmp_path):
    """That version has learnt from these very labels, and the same command would train another model each time."""
    store, night = Store(str(tmp_path)), ["run=clicks-2026-01-02", "publish.model=clicks", TEACH]
    assert begin(store, compose([*night, "run=clicks-2026-01-01"])) is None
    first = put_version(store, 1, "clicks-2026-01-01")
    assert begin(store, compose([*night, "run=clicks-2026-01-01", "force=true"])) is None
    assert begin(store, compose(night)) == first
    for number in (2, 3):
        put_version(store, number, "clicks-2026-01-02")
        assert begin(store, compose(night)) == first
        assert begin(store, compose([*night, "force=true"])) == first
    assert begin(store, compose([*night, "run=clicks-2026-01-03"]))["version"] == "v00003-00000003"


def test_a_run_that_starts_from_another_checkpoint_by_now_learns_from_what_serves_by_now(tmp_path):
    """As a night that was held, where somebody let another version serve before it was called again."""
    store, night = Store(str(tmp_path)), ["run=clicks-2026-01-02", "publish.model=clicks", TEACH]
    assert begin(store, compose(night)) is None
    first = put_version(store, 1, "clicks-2026-01-01")
    assert begin(store, compose(night)) is None
    assert begin(store, compose([*night, "checkpoint.init_from=clicks-2026-01-01"])) == first
    put_version(store, 2, "other")
    assert begin(store, compose([*night, "checkpoint.init_from=clicks-2026-01-01"])) == first
    assert begin(store, compose([*night, "checkpoint.init_from=other"]))["version"] == "v00002-00000002"


def test_a_run_keeps_the_teacher_that_it_named_once_that_is_removed(tmp_path):
    """It has the teacher's scores, so it goes on, or is finished; a run that begins only now has none."""
    store = Store(str(tmp_path))
    named = put_version(store, 1, "clicks-2026-01-01")
    run = ["run=a", "publish.model=clicks", TEACH, f"train.distill.teacher={named['version']}"]
    assert begin(store, compose(run)) == named
    path = store.full(version_path("clicks", named["version"]))
    manifest = store.fs.cat_file(f"{path}/manifest.json")
    store.fs.pipe_file(f"{path}/manifest.json", b"{")
    with pytest.raises(DamagedError):  # it is there, so nothing tells that it was removed
        covered_teacher(compose(run), store)
    store.fs.pipe_file(f"{path}/manifest.json", manifest)
    store.fs.rm(path, recursive=True)
    assert begin(store, compose(run)) == named
    for other in ("run=b", "force=true"):
        with pytest.raises(ArtifactError, match="has no version"):
            covered_teacher(compose([*run, other]), store)


def test_a_teacher_without_a_share_is_refused():
    with pytest.raises(ConfigError) as caught:
        compose(["run=r", "train.distill.teacher=v00001-00000000"])
    assert (caught.value.message, caught.value.hint) == (
        "train.distill.teacher is v00001-00000000, but train.distill.weight is 0: nothing is learnt from it",
        "train.distill.weight=0.5, or train.distill.teacher=null",
    )
