"""A checkpoint's logits and figures are the same to the last digit on any number of ranks, whatever the model has."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from pipeline.config import CheckpointConfig
from pipeline.config.sequences import SequenceModel, SequenceOptions
from pipeline.evaluation import evaluate
from pipeline.models.settings import DlrmConfig
from pipeline.records import Member, SequenceColumn, SequenceGroup, TowerModuleSpec
from pipeline.store import Store
from pipeline.training import predict as predicting
from pipeline.training.config_settings import select_prediction_settings, select_training_settings
from pipeline.training.predict import EVEN_ROWS, even_batch, predict
from pipeline.training.trainer import train
from tests.embeddings.ranks import on_tier, plan_for, spawn
from tests.models.trained import COLUMNS, DIM, ROWS, config_of
from tests.tiers import Together
from tests.towers.cases import tower_plan, towers_on
from tests.training.dataset import KEY, write_dataset

MODEL = DlrmConfig(embedding_dim=DIM, bottom_mlp=[96, 32], top_mlp=[200, 64])
TEST_ROWS, WORLDS = 1_003, (1, 2, 3, 4)  # in 63 row groups, so that each rank reads a part of its own
SEEN = SequenceGroup(
    name="seen",
    max_length=7,
    columns=(SequenceColumn(name="seen__a", rows=40, table="a"), SequenceColumn(name="seen__age", rows=9)),
)
HEARD = SequenceGroup(name="heard", columns=(SequenceColumn(name="heard__f", rows=13),), max_length=5)
BLOCKS = {"seen": SequenceModel(block="bst", options=SequenceOptions(layers=2)), "heard": SequenceModel(block="din")}
TOWERS = towers_on([("ab", (0,)), ("c", (1,))], TowerModuleSpec(name="dlrm", p=1, dim=DIM))
CASES = {
    "table-wise": {},
    "row-wise": {"sharding": "row_wise"},
    "bf16": {"precision": "bf16"},
    "on ssd": {"sharding": "row_wise", "tier": "ssd"},
    "ensemble": {"ensemble": True},
    "whole": {"sharding": "row_wise", "whole": True},  # every rank has all tables
    "whole on one": {"sharding": "row_wise", "whole": "on one"},  # one rank alone has room: all must exchange
    "whole in bf16": {"precision": "bf16", "whole": True},
    "whole ensemble": {"ensemble": True, "whole": True},
    "sequences": {"sequences": True},
    "whole sequences": {"sequences": True, "whole": True},
    "sequences on ssd": {"sequences": True, "sharding": "row_wise", "tier": "ssd"},
    "towers": {"towers": True},  # of two hosts, of one rank or two
}
# On one and two ranks; the other cases, and three and four ranks, are slow.
DEFAULT = ("row-wise", "ensemble", "whole on one", "sequences")


def setting(folder, world, *, sequences=False, towers=False, sharding="table_wise", tier="ddr", precision="fp32"):
    """The configuration, store, dataset, plan and towers of a case."""
    root = folder / ("sequences" if sequences else "rows")
    store = Store(str(root))
    made = config_of(replace(MODEL, sequences=BLOCKS if sequences else {}), world, precision=precision)
    made.checkpoint = CheckpointConfig(every_steps=4, keep_last=9, quantise="fp32")
    rows = {**ROWS, **({"seen__age": 9, "heard__f": 13} if sequences else {})}
    plan = on_tier(plan_for(sharding, world, rows=rows, dim=DIM), tier, cache_rows=4)
    if towers:
        made.hardware.hosts, made.hardware.ranks_per_host, made.partition.name = 2, world // 2, "dmt"
        plan = tower_plan(TOWERS, 2, world // 2, {}, COLUMNS)
    return made, store, store.get(f"datasets/t/{KEY}", "ingest"), plan, TOWERS if towers else None


def trained(folder, *kinds):
    """Train each of the ``kinds`` of model; the paths of its checkpoints go to a file."""
    for kind in kinds:
        made, store, dataset, plan, towers = setting(folder, dist.get_world_size(), **({kind: True} if kind else {}))
        asked, place = select_training_settings(made), f"runs/r/{kind or 'plain'}"
        train(asked, store, dataset, plan, place, kind, lambda record: None, towers=towers)
        steps = sorted(name for name in store.names(place) if name.startswith("step-"))
        (folder / f"{kind or 'plain'}.json").write_text(json.dumps([f"{place}/{step}" for step in steps]))


@contextmanager
def sending(*, among_ranks):
    """AssertionError for what sends ids or embeddings to other ranks, where it is not ``among_ranks``."""
    send = dist.all_to_all_single

    def checked(*arguments, group=None, **others):
        assert dist.get_world_size(group) == 1
        return send(*arguments, group=group, **others)

    dist.all_to_all_single = send if among_ranks else checked
    try:
        yield
    finally:
        dist.all_to_all_single = send


def predicted(folder, names):
    """Score the held-out rows in each of the cases; rank 0 keeps the logits."""
    for name in names:
        world, own = dist.get_world_size(), dict(CASES[name])
        kind = next((each for each in ("sequences", "towers") if own.get(each)), "plain")
        ensemble, whole = own.pop("ensemble", False), own.pop("whole", False)
        paths = json.loads((folder / f"{kind}.json").read_text())
        members = [Member(checkpoint=path, weight=0.3 + n) for n, path in enumerate(paths)] if ensemble else []
        made, store, dataset, plan, towers = setting(folder, world, **own)
        everywhere = whole is True
        here = everywhere or bool(whole and not dist.get_rank())
        predicting.whole_tables_pay = lambda *_, here=here: here
        if everywhere:  # several batches, after each of which the ranks meet
            predicting.MEETING, made.evaluate.global_batch = 1, 64
        with sending(among_ranks=not everywhere):
            found = predict(select_prediction_settings(made), store, dataset, plan, paths[-1], towers, members)
        if found is not None:
            np.savez(folder / f"{name}-{world}.npz", logits=found.logits, labels=found.labels)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By case and number of ranks the labels and logits."""
    folder = tmp_path_factory.mktemp("stores")
    write_dataset(folder / "rows", train=1010, test=TEST_ROWS, group=16, sparse=COLUMNS)
    write_dataset(folder / "sequences", train=1010, test=TEST_ROWS, group=16, sparse=COLUMNS, sequences=(SEEN, HEARD))
    spawn(trained, 1, folder, "", "sequences")

    def predict_together(cases):
        world = cases[0][1]
        if ("towers", world) in cases and not (folder / "towers.json").exists():
            spawn(trained, 2, folder, "towers")
        spawn(predicted, world, folder, [name for name, _ in cases])
        found = {}
        for name, _ in cases:
            with np.load(folder / f"{name}-{world}.npz", allow_pickle=False) as kept:
                found[name, world] = kept["labels"], kept["logits"]
        return found

    default = [[(name, world) for name in DEFAULT] for world in (1, 2)]
    further = [[(name, world) for name in CASES if name not in DEFAULT and runs(name, world)] for world in (1, 2)]
    larger = [[(name, world) for name in CASES if runs(name, world)] for world in (3, 4)]
    return Together(predict_together, *default, *further, *larger)


def runs(name, world):
    """Whether a case runs on so many ranks: towers need two hosts."""
    return name != "towers" or world % 2 == 0


def assert_same(outcomes, name, worlds):
    found = {}
    for world in worlds:
        labels, logits = outcomes[name, world]
        assert len(logits) == TEST_ROWS and np.ptp(logits) > 0.01
        found[world] = logits.tobytes(), evaluate(labels, logits)
    first = found[worlds[0]]
    assert all(each == first for each in found.values()), [world for world in worlds if found[world] != first]


@pytest.mark.parametrize("name", DEFAULT)
def test_logits_and_figures_are_the_same_on_1_and_2_ranks(outcomes, name) -> None:
    assert_same(outcomes, name, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_and_figures_are_the_same_on_1_2_3_and_4_ranks(outcomes, name) -> None:
    assert_same(outcomes, name, [world for world in WORLDS if runs(name, world)])


def test_default_cases_differ(outcomes) -> None:
    """But for where their tables lie: a case without its setting would be another one again."""
    digests = {name: outcomes[name, 2][1].tobytes() for name in DEFAULT}
    assert digests["row-wise"] == digests["whole on one"]
    assert len(set(digests.values())) == len(DEFAULT) - 1


@pytest.mark.slow
def test_cases_differ(outcomes) -> None:
    digests = {name: outcomes[name, 2][1].tobytes() for name in CASES}
    same = [
        {"table-wise", "row-wise", "on ssd", "whole", "whole on one"},
        {"sequences", "sequences on ssd", "whole sequences"},
        {"bf16", "whole in bf16"},
        {"ensemble", "whole ensemble"},
    ]
    assert all(len({digests[name] for name in names}) == 1 for names in same)
    assert len(set(digests.values())) == len(CASES) - sum(len(names) - 1 for names in same)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 64, 130, 16_384])
def test_a_batch_is_divided_evenly(rows: int, ranks: int) -> None:
    made = even_batch(rows, ranks)
    assert made % (ranks * EVEN_ROWS) == 0 and rows <= made < rows + ranks * EVEN_ROWS
