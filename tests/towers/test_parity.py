"""Pass-through towers on real ranks are the flat model of one process: outputs, tables and dense part."""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import ClipConfig
from pipeline.config.train import AverageConfig, RankLossConfig
from pipeline.records import TowerModuleSpec
from tests.embeddings.ranks import spawn
from tests.tiers import Together, with_slow
from tests.towers.cases import COLUMNS, DIM, STEPS, flat, with_towers, with_towers_on_ssd

MIXED = {"a": "row_wise", "b": "column_wise", "c": "data_parallel", "e": "row_wise"}
AHEAD, PLAIN = {"pipeline": "sparse_dist"}, {"pipeline": "base"}
# Limits that some gradients of every step pass; the momentum-free optimizers show every factor.
CLIPPED = {"sparse_optimizer": "sgd", "sparse_lr": 2.0, "clip": ClipConfig(dense_norm=0.05, table_value=0.0005)}
SGD = {"sparse_optimizer": "sgd", "sparse_lr": 2.0}  # row-wise Adagrad forgives any factor of its gradients
PENALISED = {**SGD, "embedding_l2": 0.5}
RANKED = {**SGD, "rank_loss": RankLossConfig(kind="pairwise")}
# name -> (hosts, [(features, hosts)], module, shardings, train settings) by number of ranks
CASES = {
    1: {"one rank, three towers": (1, [("db", [0]), ("a", [0]), ("ec", [0])], None, {}, AHEAD)},
    4: {
        "2x2 uneven": (2, [("cab", [0]), ("ed", [1])], None, MIXED, AHEAD),
        "2x2 uneven, not ahead": (2, [("e", [0]), ("bcad", [1])], None, MIXED, PLAIN),
        "2x2 uneven, sgd": (2, [("cab", [0]), ("ed", [1])], None, MIXED, SGD),
        "2x2 uneven, l2": (2, [("cab", [0]), ("ed", [1])], None, MIXED, PENALISED),
        "two hosts a tower, l2": (4, [("ace", [0, 1]), ("bd", [2, 3])], None, MIXED, PENALISED),
        "2x2 uneven, ranked": (2, [("cab", [0]), ("ed", [1])], None, MIXED, RANKED),
        "2x2 uneven, clipped": (2, [("cab", [0]), ("ed", [1])], None, MIXED, CLIPPED),
        "4x1": (4, [("a", [0]), ("bd", [1]), ("c", [2]), ("e", [3])], None, {}, AHEAD),
        "two hosts a tower": (4, [("ace", [0, 1]), ("bd", [2, 3])], None, MIXED, AHEAD),
        "two towers a host": (2, [("e", [1]), ("ad", [0]), ("b", [0]), ("c", [1])], None, MIXED, AHEAD),
        "one tower on all": (2, [("edcba", [0, 1])], None, MIXED, AHEAD),
    },
}
DLRM = TowerModuleSpec(name="dlrm", c=2, p=1, dim=4)
DCN = TowerModuleSpec(name="dcn", dim=4, cross_layers=2)
LOW_RANK = TowerModuleSpec(name="low_rank", dim=4, rank=6, cross_layers=2)
DCN_LOW_RANK = TowerModuleSpec(name="dcn_low_rank", dim=4, rank=6)
ALIKE = TowerModuleSpec(name="dlrm", c=1, p=0, dim=DIM)
ON_ONE = [("ace", [0]), ("bd", [0])]
ON_TWO = [("ace", [0]), ("bd", [1])]
# Tower modules on one rank and on four: name -> module.
MODULES = {"dlrm": DLRM, "dcn": DCN, "low rank": LOW_RANK, "low-rank cross": DCN_LOW_RANK}
MODULES["one vector a feature"] = ALIKE
CASES[1] |= {f"{name}, one host": (1, ON_ONE, module, {}, PLAIN) for name, module in MODULES.items()}
CASES[4] |= {f"{name}, two hosts": (2, ON_TWO, module, {}, AHEAD) for name, module in MODULES.items()}
CASES[1] |= {f"{name}, clipped, one host": (1, ON_ONE, module, {}, CLIPPED) for name, module in MODULES.items()}
CASES[4] |= {f"{name}, clipped, two hosts": (2, ON_TWO, module, {}, CLIPPED) for name, module in MODULES.items()}
AVERAGES = {kind: {"average": AverageConfig(kind=kind, decay=0.7, start=0.3)} for kind in ("ema", "swa")}
AVERAGES["swa of shampoo"] = {**AVERAGES["swa"], "dense_optimizer": "shampoo"}
CASES[1] |= {f"{name}, one host": (1, ON_ONE, DLRM, {}, each) for name, each in AVERAGES.items()}
CASES[4] |= {f"{name}, two hosts": (2, ON_TWO, DLRM, {}, each) for name, each in AVERAGES.items()}
NAMES = [(ranks, name) for ranks, cases in CASES.items() for name in cases if cases[name][2] is None]
# The cases of make test; the others are slow.
PASSED_THROUGH = [
    (1, "one rank, three towers"),
    (4, "2x2 uneven"),
    (4, "two hosts a tower"),
    (4, "2x2 uneven, clipped"),
]
COMPARED = ("dlrm", "low rank", "dlrm, clipped", "swa")  # on one host and on two
DEFAULT = {
    1: [name for ranks, name in PASSED_THROUGH if ranks == 1] + [f"{name}, one host" for name in COMPARED],
    4: [name for ranks, name in PASSED_THROUGH if ranks == 4] + [f"{name}, two hosts" for name in COMPARED],
}


class Trained(NamedTuple):
    """Logits of real rows by step in global order, whole tables, dense parameters of every rank, tables' names."""

    logits: list[torch.Tensor]
    rows: dict[str, torch.Tensor]
    dense: list[dict[str, torch.Tensor]]
    tables: list[str]


def read(folder, name, ranks):
    """What the ranks of case ``name`` left in ``folder``."""
    files = [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(ranks)]
    logits = []
    for step in range(STEPS):
        real = [file[f"logits{step}"][file[f"weights{step}"] > 0] for file in files]
        logits.append(torch.cat(real))
    tables = {c.name: torch.full((c.rows, DIM), float("nan")) for c in COLUMNS}
    for file in files:
        for key, value in file.items():
            if key.startswith("rows|"):
                _, table, row, column = key.split("|")
                tables[table][int(row) : int(row) + len(value), int(column) : int(column) + value.shape[1]] = value
    dense = [{key[6:]: value for key, value in file.items() if key.startswith("dense|")} for file in files]
    return Trained(logits, tables, dense, json.loads((folder / f"{name}-tables.json").read_text()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By number of ranks and case what ``read`` gives and the names of the tables; 0 ranks: the flat references."""
    root = tmp_path_factory.mktemp("towers")
    references = {"whole": ({}, {}), "cut": ({"b": "column_wise"}, {}), "sgd": ({}, SGD), "clipped": ({}, CLIPPED)}
    references |= {"l2": ({}, PENALISED), "ranked": ({}, RANKED)}

    def train_together(keys):
        ranks, folder = keys[0][0], root / str(keys[0][0])
        if ranks == 0:
            spawn(flat, 1, folder, references)
        else:
            spawn(with_towers, ranks, folder, {name: CASES[ranks][name] for _, name in keys})
        return {(ranks, name): read(folder, name, max(ranks, 1)) for _, name in keys}

    default = [[(ranks, name) for name in names] for ranks, names in DEFAULT.items()]
    further = [[(ranks, name) for name in CASES[ranks] if name not in names] for ranks, names in DEFAULT.items()]
    return Together(train_together, [(0, name) for name in references], *default, *further)


@pytest.mark.parametrize(("ranks", "name"), with_slow(NAMES, PASSED_THROUGH))
def test_pass_through_towers_equal_the_flat_single_process_model(runs, ranks, name):
    *_, kinds, settings = CASES[ranks][name]
    own = (("clipped", CLIPPED), ("sgd", SGD), ("l2", PENALISED), ("ranked", RANKED))
    named = next((each for each, changes in own if changes is settings), "")
    reference = named or ("cut" if kinds else "whole")
    found = runs[ranks, name]
    assert_equal(runs[0, reference], found)
    assert found.tables == [c.name for c in COLUMNS]


@pytest.mark.slow
def test_towers_with_their_tables_on_ssd_equal_the_flat_model_in_memory(runs, tmp_path):
    spawn(with_towers_on_ssd, 4, tmp_path, 2, [("cab", [0]), ("ed", [1])], {"a": "row_wise", "e": "row_wise"})
    assert_equal(runs[0, "whole"], read(tmp_path, "ssd", 4))


@pytest.mark.parametrize("name", with_slow(MODULES, ["dlrm", "low rank"]))
def test_tower_modules_train_the_same_on_one_host_and_on_two(runs, name):
    one, two = runs[1, f"{name}, one host"], runs[4, f"{name}, two hosts"]
    assert_equal(one, two)
    assert any(key.startswith("towers.tower.1.") for key in one.dense[0])
    assert one.rows["a"].std() > 0 and not torch.equal(one.rows["a"], runs[0, "whole"].rows["a"])


@pytest.mark.parametrize("name", with_slow(AVERAGES, ["swa"]))
def test_averages_of_tower_modules_are_the_same_on_one_host_and_on_two(runs, name):
    assert_equal(runs[1, f"{name}, one host"], runs[4, f"{name}, two hosts"])


@pytest.mark.parametrize("name", with_slow(MODULES, ["dlrm"]))
def test_clipped_tower_modules_train_the_same_on_one_host_and_on_two(runs, name):
    assert_equal(runs[1, f"{name}, clipped, one host"], runs[4, f"{name}, clipped, two hosts"])


def test_the_limits_of_these_tests_are_felt(runs):
    free, clipped = runs[0, "sgd"], runs[0, "clipped"]
    assert all(not torch.allclose(free.rows[name], clipped.rows[name], atol=1e-3) for name in free.rows)
    assert any(not torch.allclose(free.dense[0][name], clipped.dense[0][name], atol=1e-3) for name in free.dense[0])


def assert_equal(reference, found):
    """Logits to 1e-6 of their size (of 1 for smaller ones), tables to 1e-6, dense parameters on every rank to 1e-5."""
    for step in range(STEPS):
        # Logits go up to 2, where five float32 units in the last place, as sums in another order differ, are 1.2e-6.
        torch.testing.assert_close(found.logits[step], reference.logits[step], rtol=1e-6, atol=1e-6)
    for table, rows in reference.rows.items():
        assert not torch.isnan(found.rows[table]).any()
        torch.testing.assert_close(found.rows[table], rows, rtol=0, atol=1e-6)
    for each in found.dense:
        assert each.keys() == reference.dense[0].keys()
        for key, value in each.items():
            torch.testing.assert_close(value, reference.dense[0][key], rtol=0, atol=1e-5)
