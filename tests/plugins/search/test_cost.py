"""The cost term: tables over the choices, in the planner's units, and its gradients."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pipeline.core.errors import ConfigError
from pipeline.planning import PlanInputs, make_plan
from pipeline.plugins.search.architecture import Choices, LossWeights, tabulate
from pipeline.plugins.search.architecture_space import ArchitectureSpace
from pipeline.records import Price
from pipeline.specs import Decision
from tests.planning.plan_cases import configure, cpu, dataset, preset

DECISIONS = (
    Decision(name="width", choices=(4, 2, 1)),
    Decision(name="first", choices=(True, False), like="pair"),
    Decision(name="second", choices=(True, False), like="pair"),
)


def price(chosen: Mapping[str, Any]) -> Price:
    """A step of 10 ms and 1 ms a pair; 100 bytes a column."""
    return Price(step_ms=10.0 + chosen["first"] + chosen["second"], bytes={"ddr": 100 * chosen["width"]})


WEIGHTS = LossWeights(ms=0.12, bytes=0.2)


def costs(at: dict[str, Any] | None = None):  # type: ignore[no-untyped-def]
    whole = {"width": 4, "first": True, "second": True}
    return tabulate(DECISIONS, at or whole, price, WEIGHTS, price(whole))


def test_the_table_has_what_each_choice_saves_of_the_original_model() -> None:
    assert costs().start == pytest.approx(0.12 + 0.2)
    assert torch.allclose(
        costs().table, torch.tensor([[0.0, -0.1, -0.15], [0.0, -0.01, 0.0], [0.0, -0.01, 0.0]]), atol=1e-6
    )
    around = costs({"width": 1, "first": False, "second": True})
    assert around.start == pytest.approx(0.12 * 11 / 12 + 0.2 / 4)
    assert around.table[0].tolist() == pytest.approx([0.15, 0.05, 0.0])
    assert around.table[1].tolist()[:2] == pytest.approx([0.01, 0.0])


def test_decisions_that_cost_the_same_are_priced_once() -> None:
    asked = []

    def counted(chosen: Mapping[str, Any]) -> Price:
        asked.append(chosen)
        return price(chosen)

    whole = {"width": 4, "first": True, "second": True}
    tabulate(DECISIONS, whole, counted, WEIGHTS, price(whole))
    assert len(asked) == 1 + 2 + 1  # around, the other widths, one of the pairs


def test_the_cost_has_the_gradients_of_its_table_and_prefers_what_is_cheap() -> None:
    choices = Choices(DECISIONS, seed=1)
    expected = costs()
    expected.expected(choices.probabilities()).backward()
    p = torch.tensor([1 / 3] * 3)
    saved = torch.tensor([0.0, -0.1, -0.15])
    assert choices.logits.grad is not None
    assert torch.allclose(choices.logits.grad[0], p * (saved - (p * saved).sum()), atol=1e-6)
    for _ in range(100):
        choices.zero_grad()
        expected.expected(choices.probabilities()).backward()
        with torch.no_grad():
            choices.logits -= 5 * choices.logits.grad
    assert choices.best() == {"width": 1, "first": False, "second": False}


@pytest.mark.parametrize("hardware", ["laptop", "h100x8"])
def test_a_space_prices_as_the_planner_does(hardware: str) -> None:
    config = configure(preset(hardware))
    space = ArchitectureSpace.of(config, *dataset({"a": 100_000, "b": 200, "c": 3_000}))
    original = space.price(space.original)
    plan = make_plan(PlanInputs.of(config, space.schema, space.profile))
    assert original.step_ms == pytest.approx(plan.predicted_step_ms, rel=1e-5)
    assert original.total == sum(table.bytes for table in plan.tables.values())
    narrow = space.price({**space.original, "width of a": 4, "a x b": False, "top_mlp layers": 1})
    assert narrow.step_ms < original.step_ms
    assert original.total - narrow.total == 100_000 * 12 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "dcnv2"}, "model is dcnv2, but the search has a super-net of dlrm alone"),
        ({"partition": "strided"}, "partition is strided, but the search has no super-net with towers"),
        ({"parts": []}, "there is nothing to decide"),
    ],
)
def test_what_the_search_cannot_do_is_refused(change: dict[str, Any], said: str) -> None:
    config = configure(cpu(1, 1))
    config.model.name = change.get("model", "dlrm")
    config.partition.name = change.get("partition", "flat")
    config.search.parts = change.get("parts", ["widths"])
    with pytest.raises(ConfigError, match=said):
        ArchitectureSpace.of(config, *dataset({"a": 10, "b": 20}))
