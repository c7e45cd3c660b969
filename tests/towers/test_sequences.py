"""Towers with sequences on real ranks: a history is looked up in the tower of its tables, and the model is the same."""

import json

import pytest
import torch
from safetensors.torch import load_file

from pipeline.records import TowerModuleSpec
from tests.embeddings.ranks import spawn
from tests.tiers import Together, with_slow
from tests.towers.cases import STEPS
from tests.towers.sequence_cases import flat, with_towers

AHEAD, PLAIN = {"pipeline": "sparse_dist"}, {"pipeline": "base"}
SGD = {"sparse_optimizer": "sgd", "sparse_lr": 1.0}  # row-wise Adagrad forgives any factor of its gradients
PENALISED = {**SGD, "embedding_l2": 0.5}
UNEVEN = {**SGD, "uneven": True}
PARTS = {**SGD, "max_events": 20}
MIXED = {"a": "row_wise", "d": "row_wise", "seen__age": "data_parallel", "heard__f": "row_wise"}
TWO = [(["c", "a", "seen"], [0]), (["asked", "d", "heard", "b"], [1])]
THREE = [(["b"], [0]), (["seen", "a", "c"], [0]), (["heard", "d", "asked"], [0])]
FOUR = [(["heard"], [0]), (["b"], [1]), (["a", "c", "seen"], [2]), (["d", "asked"], [3])]
DCN = TowerModuleSpec(name="dcn", dim=4, cross_layers=1)
# name -> (hosts, [(features and sequences, hosts)], module, shardings, train settings) by number of ranks
CASES = {
    1: {
        "one rank, three towers": (1, THREE, None, {}, AHEAD),
        "dcn, one host": (1, [(names, [0]) for names, _ in TWO], DCN, {}, SGD),
    },
    4: {
        "2x2": (2, TWO, None, MIXED, AHEAD),
        "2x2, not ahead": (2, TWO, None, {}, PLAIN),
        "2x2, sgd": (2, TWO, None, MIXED, SGD),
        "2x2, l2": (2, TWO, None, MIXED, PENALISED),
        "2x2, uneven": (2, TWO, None, MIXED, UNEVEN),
        "2x2, parts": (2, TWO, None, MIXED, PARTS),
        "2x2, ssd": (2, TWO, None, {"a": "row_wise"}, {"ssd": True}),
        "one tower on all": (2, [(["heard", "d", "c", "b", "asked", "a", "seen"], [0, 1])], None, MIXED, SGD),
        "4x1": (4, FOUR, None, {}, PENALISED),
        "dcn, two hosts": (2, TWO, DCN, {}, SGD),
    },
}
REFERENCES = {"plain": {}, "sgd": SGD, "l2": PENALISED, "uneven": UNEVEN}
# The cases of make test; the others, and modules and ranks without towers, are slow.
DEFAULT = [(1, "one rank, three towers"), (4, "2x2"), (4, "2x2, uneven")]
SAME = [(ranks, name) for ranks, cases in CASES.items() for name in cases if cases[name][2] is None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By number of ranks and case what ``read`` gives; 0 ranks: the flat references."""
    root = tmp_path_factory.mktemp("towers")

    def train_together(keys):
        ranks, folder = keys[0][0], root / str(keys[0][0])
        if ranks in CASES:
            spawn(with_towers, ranks, folder, {name: CASES[ranks][name] for _, name in keys})
        else:
            spawn(flat, max(ranks, 1), folder, {name: {**REFERENCES, "parts": PARTS}[name] for _, name in keys})
        return {(ranks, name): read(folder, name, max(ranks, 1)) for _, name in keys}

    flats = [(0, name) for name in REFERENCES], [(2, "parts")]
    default = [[key for key in DEFAULT if key[0] == ranks] for ranks in CASES]
    further = [[(ranks, name) for name in cases if (ranks, name) not in DEFAULT] for ranks, cases in CASES.items()]
    return Together(train_together, *flats, *default, *further)


def read(folder, name, ranks):
    """Logits of real rows by step in global order, whole tables, dense parameters of every rank, the tables' names."""
    files = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(ranks)]
    logits = [torch.cat([file[f"logits{step}"][file[f"weights{step}"] > 0] for file in files]) for step in range(STEPS)]
    tables = {}
    for file in files:
        for key, value in file.items():
            if key.startswith("rows|"):
                _, table, row, _ = key.split("|")
                tables.setdefault(table, {})[int(row)] = value
    whole = {name: torch.cat([parts[row] for row in sorted(parts)]) for name, parts in tables.items()}
    dense = [{key[6:]: value for key, value in file.items() if key.startswith("dense|")} for file in files]
    return logits, whole, dense, json.loads((folder / f"{name}-tables.json").read_text())


def assert_equal(reference, found, projected=False):
    """Logits and tables to 5e-6, dense parameters on every rank to 2e-5: logits are up to 6.

    ``projected``: the projections of embeddings are in the towers' modules and have other names.
    """
    logits, tables, dense, _ = reference
    for step in range(STEPS):
        torch.testing.assert_close(found[0][step], logits[step], rtol=0, atol=5e-6)
    assert found[1].keys() == tables.keys() == {"a", "b", "c", "d", "seen__age", "heard__f"}
    for table in tables:
        torch.testing.assert_close(found[1][table], tables[table], rtol=0, atol=5e-6)
    for each in found[2]:
        shared = each.keys() & dense[0].keys()
        assert projected or shared == each.keys() == dense[0].keys()
        assert {name.split(".")[3] for name in shared if name.startswith("head.histories.")} == {
            "seen",
            "asked",
            "heard",
        }
        for key in shared:
            torch.testing.assert_close(each[key], dense[0][key], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("ranks", "name"), with_slow(SAME, DEFAULT))
def test_pass_through_towers_equal_the_flat_single_process_model(runs, ranks, name):
    settings = CASES[ranks][name][4]
    chosen = "l2" if "embedding_l2" in settings else "uneven" if "uneven" in settings else "sgd"
    reference = chosen if "sparse_optimizer" in settings else "plain"
    assert_equal(runs[0, reference], runs[ranks, name], "uneven" in settings)
    assert runs[ranks, name][3] == ["a", "b", "c", "d", "heard__f", "seen__age"]


@pytest.mark.slow
def test_ranks_without_towers_train_the_same_model_with_few_events_at_once(runs):
    assert_equal(runs[0, "sgd"], runs[2, "parts"])


@pytest.mark.slow
def test_tower_modules_compress_sequences_the_same_on_one_host_and_on_two(runs):
    one, two = runs[1, "dcn, one host"], runs[4, "dcn, two hosts"]
    assert_equal(one, two)
    assert not torch.equal(one[1]["a"], runs[0, "sgd"][1]["a"])


def test_every_sequence_learns(runs):
    """Its block, and the table that only its events have: at every place of the flat model."""
    files = [runs[0, name][2][0] for name in ("plain", "sgd")]
    moved = [name for name in files[0] if not torch.equal(files[0][name], files[1][name])]
    assert {name.split(".")[3] for name in moved if name.startswith("head.histories.")} == {"seen", "asked", "heard"}
