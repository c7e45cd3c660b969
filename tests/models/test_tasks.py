"""Architectures of several tasks: shapes, formulas, gradients by finite differences, over every ranker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config import TaskOptions
from pipeline.core.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.models.costs import model_costs
from pipeline.models.layers import Ranker
from pipeline.models.layers.multi_task import ChainedHeads, ExtractionLevel, MixtureOfExperts, MultiTaskRanker
from pipeline.specs import LABEL_KINDS, TASK_ARCHITECTURES, TaskInput
from tests.models.variants import DIM, FORMS, VECTORS, inputs_of
from tests.publishing.made import archived
from tests.tiers import with_slow

TASKS = (TaskInput(name="conversion", given="click"), TaskInput(name="minutes"))
SMALL = {"shared_bottom": {}, "esmm": {}, "mmoe": {"experts": 2}, "ple": {"experts": 1, "own_experts": 1}}
OPTIONS = {
    name: TaskOptions(task_mlp=[3], **({"expert_mlp": [4]} if more else {}), **more) for name, more in SMALL.items()
}


def built(form: str, architecture: str, seed: int = 0) -> Ranker:
    config = replace(FORMS[form], tasks=architecture, task_options=OPTIONS[architecture])
    return build_model(config, replace(inputs_of(seed=seed), tasks=TASKS))


def made_inputs(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 2, generator=generator), torch.randn(rows, len(VECTORS), DIM, generator=generator)


@pytest.mark.parametrize("form", FORMS)
def test_every_ranker_gives_a_logit_for_each_task_and_every_weight_learns(form: str) -> None:
    model = built(form, "mmoe")
    logits = model(*made_inputs())
    assert logits.shape == (5, 3)
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []


@pytest.mark.parametrize("along", with_slow(("random directions", "every axis"), ("random directions",)))
@pytest.mark.parametrize("architecture", TASK_ARCHITECTURES.names())
def test_gradients_are_those_of_finite_differences(architecture: str, along: str) -> None:
    model = built("mlp", architecture).double()
    dense, embeddings = (each.double() for each in made_inputs(3))
    labels = torch.tensor([[1.0, 0.0, 2.0], [0.0, torch.nan, 0.5], [1.0, 1.0, torch.nan]], dtype=torch.float64)
    kinds = [LABEL_KINDS.get(name) for name in ("binary", "binary", "value")]

    def loss(embeddings: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(model.named_parameters()), weights, strict=True))
        logits = torch.func.functional_call(model, named, (dense, embeddings))
        parts = []
        for kind, x, y in zip(kinds, logits.unbind(1), labels.unbind(1), strict=True):
            there = ~torch.isnan(y)
            parts.append(kind.loss(x[there], y[there]).sum())
        return torch.stack(parts).sum()

    weights = [value.detach().clone().requires_grad_() for value in model.parameters()]
    inputs, fast = (embeddings.requires_grad_(), *weights), along == "random directions"
    assert torch.autograd.gradcheck(loss, inputs, atol=1e-7, fast_mode=fast)


@pytest.mark.parametrize("architecture", TASK_ARCHITECTURES.names())
def test_no_architecture_has_an_operator_that_is_refused_in_the_archive_of_an_earlier_release(
    architecture: str, tmp_path: Path
) -> None:
    model, given = built("mlp", architecture).eval(), made_inputs()
    with torch.no_grad():
        program = archived(tmp_path, model, 2, (len(VECTORS), DIM))
        torch.testing.assert_close(program(*given), model(*given))


@pytest.mark.parametrize("kind", LABEL_KINDS.names())
def test_losses_have_the_gradient_of_prediction_minus_label(kind: str) -> None:
    spec = LABEL_KINDS.get(kind)
    logits = torch.tensor([-2.0, 0.3, 1.5], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    spec.loss(logits, labels).sum().backward()
    # All three are the canonical link of their distribution.
    torch.testing.assert_close(logits.grad, spec.prediction(logits.detach()) - labels)
    assert torch.autograd.gradcheck(lambda x: spec.loss(x, labels), (logits,))
    numpy = spec.predicted(logits.detach().numpy())
    torch.testing.assert_close(torch.from_numpy(numpy), spec.prediction(logits.detach()))


def test_esmm_multiplies_the_probability_of_the_task_it_is_given() -> None:
    tasks = (TaskInput(name="click"), TaskInput(name="conversion", given="click"), TaskInput(name="other"))
    heads = ChainedHeads(4, tasks, [3]).double()
    a, b, c = torch.tensor([0.3, -40.0]), torch.tensor([-1.2, -50.0]), torch.tensor([2.0, 1.0])
    joined = heads.join([a.double(), b.double(), c.double()])
    expected = a.double().sigmoid() * b.double().sigmoid()
    torch.testing.assert_close(joined[:, 1].sigmoid(), expected)
    torch.testing.assert_close(joined[:, [0, 2]], torch.stack([a, c], 1).double())
    sure = heads.join([torch.full((1,), 60.0)] * 3)[0, 1]
    assert float(sure) == pytest.approx(60.0 - 0.6931, abs=1e-3)  # where 1 - P is nothing in float32


def test_esmm_starts_at_the_rates_of_both() -> None:
    model = built("mlp", "esmm")
    assert isinstance(model, MultiTaskRanker)
    rates = torch.tensor([0.25, 0.02])
    model.start_all([*torch.logit(rates).tolist(), 4.0])
    for head in model.heads.heads:
        head.weight.data.zero_()  # type: ignore[union-attr, operator]
    logits = model(*made_inputs(1))[0]
    torch.testing.assert_close(logits[:2].sigmoid(), rates)
    assert float(logits[2].detach()) == pytest.approx(4.0)


def test_a_gate_mixes_experts_by_shares_that_add_up() -> None:
    mix = MixtureOfExperts(3, tasks=2, experts=4, expert_mlp=[5])
    for gate in mix.gates:
        torch.nn.init.zeros_(gate.gate.weight)  # type: ignore[union-attr, arg-type]
    hidden = torch.randn(6, 3)
    mean = torch.stack([expert(hidden) for expert in mix.experts]).mean(0)
    for each in mix(hidden):
        torch.testing.assert_close(each, mean)


def test_ple_keeps_a_tasks_own_experts_from_the_others() -> None:
    level = ExtractionLevel(3, 2, experts=1, own_experts=2, expert_mlp=[4], last=True)
    inputs = [torch.randn(5, 3) for _ in range(3)]
    level(inputs)[0].sum().backward()
    learnt = [any(p.grad is not None and p.grad.abs().sum() > 0 for p in each.parameters()) for each in level.experts]
    assert learnt == [True, False, True]
    assert len(level.gates) == 2


def test_a_model_of_tasks_costs_more_and_is_drawn_from_its_seed_alone() -> None:
    config = replace(FORMS["dlrm"], tasks="ple", task_options=OPTIONS["ple"])
    one, several = (model_costs(config, replace(inputs_of(), tasks=tasks)) for tasks in ((), TASKS))
    assert several.parameters > one.parameters
    assert several.flop > one.flop
    torch.manual_seed(5)
    first = built("dlrm", "ple").state_dict()
    again = built("dlrm", "ple").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_a_model_without_hidden_layer_is_refused_by_name() -> None:
    class Own(Ranker):
        def start_at(self, logit: float) -> None:
            """Nothing."""

    with pytest.raises(ConfigError, match="model Own has no hidden layer for several tasks"):
        Own().drop_head()
