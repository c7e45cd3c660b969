"""Histograms of rows' norms: of any sharding the same as of whole tables, from a sample where the rows are many."""

import json

import pytest
import torch

from pipeline.embeddings import norms
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.norms import histograms, sampled, squared_norms
from pipeline.embeddings.tables import TableSpec
from pipeline.training.distributed import add_up
from tests.embeddings.cases import make
from tests.embeddings.ranks import plan_for, spawn


def on_two_ranks(folder):
    _, access = make(plan_for(["row_wise", "data_parallel", "column_wise"], 2))
    access.initialise(7)
    norms.MOST_ROWS = 30
    seen = histograms(access.tables, add_up(squared_norms(access)))
    for name, table in access.tables.items():
        rows = initial_rows(7, table, 0, table.rows)[sampled(table)]
        expected = rows.double().norm(dim=1)
        assert seen[name]["rows"] == sum(seen[name]["counts"]) == min(30, table.rows)
        assert seen[name]["mean"] == pytest.approx(expected.mean().item(), rel=1e-6)
        assert seen[name]["largest"] == pytest.approx(expected.max().item(), rel=1e-6)


def test_they_are_those_of_whole_tables_on_any_sharding(tmp_path):
    spawn(on_two_ranks, 2, tmp_path)


def test_bins_are_half_octaves():
    squares = torch.tensor([0.0, 1.0, 1.99, 2.0, 16.0], dtype=torch.float64)
    seen = histograms({"t": TableSpec("t", 5, 1)}, squares)["t"]
    assert seen["low"] == norms.LOWEST
    places = {seen["low"] + place: count for place, count in enumerate(seen["counts"]) if count}
    assert places == {norms.LOWEST: 1, 0: 2, 1: 1, 4: 1}
    assert seen["mean_square"] == pytest.approx(20.99 / 5)


def test_rows_that_are_not_finite_are_left_out_of_a_record():
    tables = {"spoilt": TableSpec("spoilt", 3, 1), "lost": TableSpec("lost", 1, 1)}
    seen = histograms(tables, torch.tensor([torch.nan, 4.0, torch.inf, torch.nan], dtype=torch.float64))
    assert seen.keys() == {"spoilt"} and (seen["spoilt"]["rows"], seen["spoilt"]["largest"]) == (1, 2.0)
    json.dumps(seen, allow_nan=False)


def test_a_sample_reaches_from_the_first_row_to_the_last():
    rows = sampled(TableSpec("t", 1_000_003, 4))
    assert (len(rows), rows[0], rows[-1]) == (norms.MOST_ROWS, 0, 1_000_002)
    assert len(rows.unique()) == len(rows)
