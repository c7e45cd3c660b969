"""The fault table against a real API server: a sample of short cells in make test, all of it in make test-control."""

from __future__ import annotations

import pytest

from tests.cluster_kit import TestCluster
from tests.controlplane.faults import CELLS
from tests.controlplane.world import World

pytestmark = [pytest.mark.k8s, pytest.mark.slow]
SAMPLE = (
    "cut and halved bodies, 5 s each", "answer of the POST lost", "two launchers at once",
    "no room in a quota (indexed job)",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(cluster, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.grid) for name in CELLS]
)
def test_a_fault_of_the_control_plane_ends_as_the_table_says(world: World, name: str) -> None:
    assert CELLS[name].act(world)
