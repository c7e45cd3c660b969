"""``train.compile=auto``: when it is tried, that a trial changes nothing, and that ranks and resumed runs agree."""

import json
import logging

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.reader import read_state
from pipeline.config import CheckpointConfig, TrainConfig
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.models.settings import DlrmConfig
from pipeline.records import DatasetSchema, SparseColumn
from pipeline.specs import ModelInputs
from pipeline.store import Store
from pipeline.training import compiling
from pipeline.training.compiling import Timed, trial, use
from pipeline.training.model import DensePart
from tests.embeddings.ranks import spawn
from tests.tiers import with_slow
from tests.training.test_train import run_case, trained

# The cheaper one, where nothing is asked of what compiled code computes.
TRACED, PLAIN = "aot_eager", "eager"
NEVER, ALWAYS = -1.0, float("inf")  # the share of the eager passes' time that pays


def broken(*_):
    raise RuntimeError("no compiler here")


def run(folder, name, *, backend=TRACED, shortest=0.0, worth=ALWAYS, **case):
    """A training, the lines it logged, what was decided as its checkpoint has it, and the kept times."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pipeline").addHandler(handler)
    logging.getLogger("pipeline").setLevel(logging.INFO)
    compiling.BACKEND, compiling.SHORTEST, compiling.WORTH = backend, shortest, worth
    compiling.FIRST, compiling.TIMED = 2, 2
    rank, world = dist.get_rank(), dist.get_world_size()
    outcome = run_case(folder / name, world, rank, **case)
    logging.getLogger("pipeline").removeHandler(handler)
    store = Store(str(folder / name))
    state = read_state(store, store.get(outcome["summary"]["final"], "train"))["train"]
    told = [line for line in lines if "compile" in line]
    kept = [store.read_json(f"compile/{name}") for name in store.names("compile")]
    return {
        "told": told,
        "compiled": state.get("compiled"),
        "names": store.names("compile"),
        "kept": kept,
        "trained": trained(outcome["digests"]),
    }


def run_all(folder):
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    outcomes = {
        "short": run(folder, "short", shortest=compiling.SHORTEST),
        "never": run(folder, "never", compile=False),
        "slower": run(folder, "slower", backend=PLAIN, worth=NEVER),
        "faster": run(folder, "faster"),
        "parts": run(folder, "parts", accumulate=3),
        "broken": run(folder, "broken", backend=broken if last else PLAIN),
    }
    # Another training on the same machine takes the times that the first one kept.
    store = Store(str(folder / "faster"))
    (name,) = store.names("compile")
    record = store.read_json(f"compile/{name}")
    dist.barrier()
    for case, eager in (("pays", 1e6), ("pays_not", 0.0)):
        if rank == 0:
            times = {"eager_ms": eager, "compiled_ms": 1.0, "seconds": 1.0}
            Store(str(folder / case)).write_json(f"compile/{name}", {**record, "times": times})
        dist.barrier()
        outcomes[case] = run(folder, case, backend=PLAIN)
    # A session that continues compiles where the one before did, whatever the times say by now.
    outcomes["resumed"] = run(
        folder, "resumed", worth=ALWAYS, max_steps=9, then={"epochs": 2}, checkpoint=CheckpointConfig(every_steps=6)
    )
    outcomes["ended"] = run(folder, "ended", backend=PLAIN, then={"max_steps": None})
    (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module", params=with_slow((1, 2), (2,)))
def outcomes(request, tmp_path_factory):
    """By case, the outcome on each rank."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    spawn(run_all, request.param, folder)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(request.param)]
    return {case: [each[case] for each in ranks] for case in ranks[0]}


def test_a_short_training_is_not_tried(outcomes):
    for each in outcomes["short"]:
        assert (each["told"], each["compiled"], each["kept"]) == ([], None, [])
    assert outcomes["never"][0]["compiled"] is None


def test_what_is_slower_compiled_stays_as_it_is_to_the_bit(outcomes):
    for each in outcomes["slower"]:
        assert each["compiled"] is False and len(each["kept"]) == 1
        assert each["trained"] == outcomes["short"][0]["trained"] == outcomes["never"][0]["trained"]
    (line,) = outcomes["slower"][0]["told"]
    assert line.startswith("train.compile=auto: the dense part is not compiled; a step's passes take ")
    assert set(outcomes["slower"][0]["kept"][0]) == {"device", "threads", "torch", "times"}


def test_what_is_faster_compiled_stays_compiled(outcomes):
    for each in outcomes["faster"]:
        assert each["compiled"] is True
    (line,) = outcomes["faster"][0]["told"]
    assert line.startswith("train.compile=auto: the dense part is compiled; a step's passes take ")
    assert line.endswith(" steps are left")


def test_the_passes_of_all_parts_are_timed_together(outcomes):
    for each in outcomes["parts"]:
        assert each["compiled"] is True and len(each["kept"]) == 1
    assert outcomes["parts"][0]["names"] != outcomes["faster"][0]["names"]  # other parts have other times


def test_a_failure_on_one_rank_leaves_all_as_they_are(outcomes):
    told = [line for each in outcomes["broken"] for line in each["told"]]
    assert sum("torch.compile failed: " in line and "no compiler here" in line for line in told) == 1
    assert "not compiled; it cannot be compiled here" in outcomes["broken"][0]["told"][-1]
    for each in outcomes["broken"]:
        assert each["compiled"] is False and not each["kept"]
        assert each["trained"] == outcomes["short"][0]["trained"]


def test_later_trainings_take_the_kept_times(outcomes):
    for each, line in zip(outcomes["pays"], ["the dense part is compiled; "], strict=False):
        assert line in each["told"][0] and "1.00 ms compiled and 1000000.00 ms as they are" in each["told"][0]
    assert {each["compiled"] for each in outcomes["pays"]} == {True}
    assert {each["compiled"] for each in outcomes["pays_not"]} == {False}
    assert outcomes["pays_not"][0]["trained"] == outcomes["short"][0]["trained"]


def test_a_resumed_training_goes_on_as_it_was(outcomes):
    assert {each["compiled"] for each in outcomes["resumed"]} == {True}
    told = outcomes["resumed"][0]["told"]
    assert len(told) == 2 and told[1].endswith("the dense part is compiled; as before this training was resumed")
    assert outcomes["resumed"][0]["trained"] == outcomes["faster"][0]["trained"]


def test_a_training_that_has_ended_compiles_nothing(outcomes):
    (line,) = outcomes["ended"][0]["told"]  # that of the first session, which took all steps
    assert " compiled; a step's passes take " in line
    assert {each["compiled"] for each in outcomes["ended"]} == {True}


def test_times_pay_where_they_save_twice_what_compiling_takes():
    timed = Timed(eager_ms=30.0, compiled_ms=20.0, seconds=60.0)
    assert timed.pays(12_001) and not timed.pays(12_000)
    assert not Timed(eager_ms=20.0, compiled_ms=30.0, seconds=0.0).pays(10**9)


@pytest.mark.measures
def test_a_trial_leaves_running_means_gradients_and_random_numbers(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    names = tuple(SparseColumn(name=name, rows=9) for name in "abc")
    schema = DatasetSchema(dense=("d",), sparse=names, rows={}, files={}, groups={})
    inputs = ModelInputs(dense=("d",), vectors=("a", "b", "c"), dim=4, seed=0)
    ranking = build_model(DlrmConfig(embedding_dim=4, bottom_mlp=[8], top_mlp=[8], norm="batch", dropout=0.5), inputs)
    part = DensePart(ranking, schema, None)
    part.inputs = inputs
    before, state = {k: v.clone() for k, v in ranking.state_dict().items()}, torch.get_rng_state()
    timed = trial(part, 32)
    assert timed is not None and min(timed.eager_ms, timed.compiled_ms, timed.seconds) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in ranking.state_dict().items())
    assert all(each.grad is None for each in ranking.parameters())
    assert ranking._compiled_call_impl is not None
    use(part, False)
    assert ranking._compiled_call_impl is None


def test_the_setting_is_true_false_or_auto():
    assert TrainConfig().compile == "auto"
    assert compose(["train.compile=true"]).train.compile is True
    with pytest.raises(ConfigError, match=r"train.compile is 'always', expected auto or true or false"):
        compose(["train.compile=always"])
