"""The fault table against a real API server: make test-all has all cells, make test-control their table."""

from __future__ import annotations

import pytest

from tests.cluster_kit import TestCluster
from tests.controlplane.faults import CELLS
from tests.controlplane.world import World

pytestmark = [pytest.mark.k8s, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(cluster, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", CELLS)
def test_a_fault_of_the_control_plane_ends_as_the_table_says(world: World, name: str) -> None:
    assert CELLS[name].act(world)
