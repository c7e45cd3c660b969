"""Chains of deltas restore bit for bit into other world sizes and shardings; a damaged one falls back."""

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.index import committed
from pipeline.store import Store
from tests.checkpoint.chain_runs import compact_behind, resume, skip_while_busy, write
from tests.embeddings.cases import DIM, ROWS
from tests.embeddings.ranks import spawn

# Which parents a policy gives a delta is proved without a training (test_policy); the first one has a chain of them.
POLICIES = [
    "consecutive",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("intermittent", "one_shot", "full")),
]
MIXED = ["row_wise", "data_parallel", "table_wise"]


def tables(folder, stem, world):
    """Whole tables and sums from all ranks' shards."""
    weights = {name: torch.full((rows, DIM), float("nan")) for name, rows in ROWS.items()}
    sums = {name: torch.full((rows,), float("nan")) for name, rows in ROWS.items()}
    for rank in range(world):
        for key, tensor in load_file(folder / f"{stem}-{rank}.safetensors").items():
            table, row, column, what = key.split("|")
            part = slice(int(row), int(row) + tensor.shape[0])
            if what == "weight":
                weights[table][part, int(column) : int(column) + tensor.shape[1]] = tensor
            else:
                sums[table][part] = tensor
    return weights, sums


def same(one, two, **close):
    for name in ROWS:
        for a, b in zip(one, two, strict=True):
            if close:
                torch.testing.assert_close(a[name], b[name], **close)
            else:
                assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_restores_bit_for_bit_on_one_rank(tmp_path, policy):
    settings = {"policy": policy}
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 2, 3, 4], settings)
    spawn(resume, 1, tmp_path, "row_wise", "b", settings, 4)
    same(tables(tmp_path, "a-saved", 1), tables(tmp_path, "b-restored", 1))
    same(tables(tmp_path, "a-end", 1), tables(tmp_path, "b-again", 1))


@pytest.mark.parametrize(
    ("world", "kinds"),
    [(2, MIXED), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "table_wise"), (3, "row_wise")))],
)
def test_two_ranks_restore_into_other_world_sizes(tmp_path, world, kinds):
    settings = {"policy": "one_shot"}
    spawn(write, 2, tmp_path, MIXED, "a", [2, 3, 4], settings)
    spawn(resume, world, tmp_path, kinds, "b", settings, 4)
    same(tables(tmp_path, "a-saved", 2), tables(tmp_path, "b-restored", world))
    if world == 2:
        same(tables(tmp_path, "a-end", 2), tables(tmp_path, "b-again", 2))
    else:
        same(tables(tmp_path, "a-end", 2), tables(tmp_path, "b-again", world), rtol=0, atol=1e-6)


def test_a_damaged_delta_falls_back_to_the_one_before_it_and_says_so(tmp_path):
    settings = {"policy": "one_shot"}
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 2, 3], settings)
    file = sorted((tmp_path / "store/ck/step-00000003/rows/a").iterdir())[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    spawn(resume, 1, tmp_path, "table_wise", "b", settings, 2)
    said = (tmp_path / "b-said.txt").read_text()
    assert "step-00000003 cannot be used, going back to the one before it" in said
    assert "is corrupt" in said
    same(tables(tmp_path, "a-end", 1), tables(tmp_path, "b-again", 1))


def test_quantised_deltas_hold_only_touched_rows_and_stay_close(tmp_path):
    settings = {"policy": "one_shot", "quantise": "8", "state": "bf16"}
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 2], settings)
    base, delta = committed(Store(str(tmp_path / "store")), "ck")
    assert (base.summary["type"], delta.summary["type"]) == ("baseline", "difference")
    assert delta.summary["parents"] == ["step-00000001"]
    assert delta.summary["rows"] < base.summary["rows"] == sum(ROWS.values())
    store = Store(str(tmp_path / "store"))
    assert all(store.read_json("ck/step-00000002/index.json")["tables"][n]["rows"] == r for n, r in ROWS.items())


def test_the_final_checkpoint_is_in_final_quantise_whatever_single_tables_are_kept_in(tmp_path):
    settings = {"quantise": "8", "tables": {"a": "fp16"}}
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 6], settings)
    first, final = committed(Store(str(tmp_path / "store")), "ck")
    assert {"fp16", "q8"} == set(first.summary["codings"])
    assert final.summary["codings"] == ["fp32"]


def test_compaction_behind_training_changes_no_bit_and_later_deltas_rest_on_its_baseline(tmp_path):
    spawn(compact_behind, 2, tmp_path)
    for policy in ("one_shot", "consecutive"):
        place = tmp_path / policy
        same(tables(place, "a-saved", 2), tables(place, "b-restored", 2))
        same(tables(place, "a-end", 2), tables(place, "b-again", 2))
        # Steps 3 and 5 were the second delta on their baseline.
        left = committed(Store(str(place / "store")), "ck")
        types = {each.summary["step"]: each.summary["type"] for each in left}
        assert types[5] == "baseline"
        assert next(each for each in left if each.summary["step"] == 5).summary["compacted"][0] == "step-00000003"
        assert (place / "b-said.txt").read_text() == ""


def test_a_checkpoint_skipped_while_one_is_written_is_told_and_its_rows_are_in_the_next(tmp_path):
    spawn(skip_while_busy, 2, tmp_path)
    spawn(resume, 2, tmp_path, "row_wise", "b", {"policy": "one_shot"}, 3)
    same(tables(tmp_path, "a-end", 2), tables(tmp_path, "b-restored", 2))
    assert {each.summary["step"] for each in committed(Store(str(tmp_path / "store")), "ck")} == {1, 3, 6}
