"""What the planner charges for a model, against the built module run for real on a CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import ModelConfig
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.models.costs import model_costs
from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.operation_counter import PRODUCT_CALLS, OperationCounter
from pipeline.models.settings import DlrmConfig
from pipeline.planning import PlanInputs
from pipeline.planning.cost import FLOAT, dense_costs
from pipeline.planning.problem import PER_PARAMETER, dense_bytes
from pipeline.records import DatasetSchema, FeatureProfile, Profile, SparseColumn
from pipeline.specs import DENSE_OPTIMIZERS, MODELS, ORDINARY_STATE, ModelInputs
from tests.tiers import with_slow

SHAPES = [(13, 26, 16), (0, 5, 8), (2, 1, 4), (1, 40, 32)]  # dense features, vectors, their width
ROWS = 6


def inputs(dense: int, vectors: int, dim: int) -> ModelInputs:
    return ModelInputs(
        dense=tuple(f"I{i}" for i in range(dense)), vectors=tuple(f"C{i}" for i in range(vectors)), dim=dim
    )


def counted(model: nn.Module, dense: int, vectors: int, dim: int) -> int:
    """FLOP of ``ROWS`` samples forward and backward, really computed."""
    with FlopCounterMode(display=False) as products:
        model(torch.randn(ROWS, dense), torch.randn(ROWS, vectors, dim, requires_grad=True)).sum().backward()
    return products.get_total_flops()


@pytest.mark.parametrize("name", MODELS.names())
@pytest.mark.parametrize(("dense", "vectors", "dim"), with_slow(SHAPES, [(0, 5, 8), (2, 1, 4)]))
def test_the_planner_charges_what_the_built_model_computes(name: str, dense: int, vectors: int, dim: int) -> None:
    config = compose([f"model={name}", f"model.embedding_dim={dim}", "train.global_batch=64"])
    sparse = tuple(SparseColumn(name=f"C{i}", rows=9) for i in range(vectors))
    schema = DatasetSchema(
        dense=tuple(f"I{i}" for i in range(dense)), sparse=sparse, rows={"train": 100}, files={}, groups={}
    )
    built = build_model(config.model, inputs(dense, vectors, dim))
    parameters = sum(parameter.numel() for parameter in built.parameters())
    charged = dense_costs(config.model, schema)
    assert charged.flop * ROWS == counted(built, dense, vectors, dim)
    assert charged.parameters == parameters
    feature = FeatureProfile(rows=9, distinct=9, missing_share=0.0, pooling=1.0, hot_rows=[9], hot_share=[1.0])
    profile = Profile(
        rows={"train": 100}, label_rate={"train": 0.2}, dense={}, sparse={c.name: feature for c in sparse}
    )
    for config.train.dense_optimizer in DENSE_OPTIMIZERS.names():
        state = max(ORDINARY_STATE, DENSE_OPTIMIZERS.get(config.train.dense_optimizer).state_values)
        kept = dense_bytes(PlanInputs.of(config, schema, profile))
        assert kept["dense"] == int((PER_PARAMETER + state) * FLOAT * parameters)


def test_what_a_dlrm_is_charged_with_by_hand() -> None:
    """Linear layers 3 products each, the first of the bottom MLP 2; the symmetric interaction 2."""
    found = model_costs(DlrmConfig(bottom_mlp=[6], top_mlp=[5]), inputs(3, 4, 8))
    bottom, top = 3 * 6 + 6 * 8, (8 + 10) * 5 + 5
    assert found.flop == 2 * (3 * (bottom + top) - 3 * 6) + 2 * 2 * 5**2 * 8
    assert found.parameters == bottom + top + 6 + 8 + 5 + 1
    # Outputs of the linear layers, the vectors side by side, their products, what the top MLP takes of these.
    assert found.activations == (6 + 8 + 5 + 1) + 5 * 8 + 5**2 + (8 + 10)


def test_operations_are_counted_by_what_they_read_and_write() -> None:
    x, weight = torch.zeros(5, 3, requires_grad=True), torch.zeros(4, 3)
    with OperationCounter() as counter:
        # A product and a view of it, then ReLU, which reads and writes each value.
        torch.mm(x, weight.t()).view(20).relu()
    assert (counter.operations, counter.moved) == (PRODUCT_CALLS + 1, 2 * 20)
    with OperationCounter() as counter:
        torch.empty(7).zero_()
    assert (counter.operations, counter.moved) == (1, 2 * 7), "room alone is no work"
    rows = torch.zeros(4, 6)
    with OperationCounter() as counter:
        torch.layer_norm(rows, [6])
    # Values, means and deviations, three times: a norm takes longer per value than other operations.
    assert (counter.operations, counter.moved) == (1, 3 * (2 * 4 * 6 + 2 * 4))


def test_an_interaction_counts_as_the_compiled_kernel_that_computes_it() -> None:
    vectors = torch.zeros(5, 4, 8, requires_grad=True)
    layer = DotInteraction(4, 8)
    with OperationCounter() as counter:
        out = layer(vectors)
    maps = layer.pairs.numel() + layer.cells.numel()
    assert (counter.operations, counter.moved) == (1, vectors.numel() + maps + out.numel())
    gradient = torch.zeros_like(out)
    with OperationCounter() as counter:
        out.backward(gradient)
    assert (counter.operations, counter.moved) == (1, out.numel() + vectors.numel())
    assert OperationCounter.running is None


def test_what_a_model_calls_does_not_grow_with_the_samples_and_what_it_moves_does() -> None:
    few = model_costs(DlrmConfig(bottom_mlp=[6], top_mlp=[5]), inputs(3, 4, 8))
    deep = model_costs(DlrmConfig(bottom_mlp=[6], top_mlp=[5, 5, 5]), inputs(3, 4, 8))
    # Each layer more: a product forward and two backward, its bias' gradient, ReLU and what that does backward.
    assert deep.operations - few.operations == 2 * (3 * PRODUCT_CALLS + 3)
    assert few.moved > few.activations
    with OperationCounter() as outer:
        with OperationCounter() as inner:
            torch.zeros(3).relu()
        assert OperationCounter.running is outer
    assert inner.operations == 2 and OperationCounter.running is None


class Gelu(nn.Module):
    """A layer whose input its gradient needs, before one whose input is kept as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 10), nn.Linear(10, 1)

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        hidden = self.first(dense)
        return self.head(self.activation(hidden)).squeeze(1) + embeddings.sum((1, 2))

    def activation(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(hidden)


class Relu(Gelu):
    """One that its own output does for, and so works in place."""

    def activation(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.relu()


class Asking(Gelu):
    """One that looks at values."""

    def activation(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.max() > 0 else -hidden


@pytest.fixture
def register(monkeypatch):
    def add(module: type[nn.Module]) -> None:
        class Spec:
            name, config = "asked", ModelConfig
            build = staticmethod(lambda config, inputs: module())

        monkeypatch.setattr(MODELS, "_specs", {**{spec.name: spec for spec in MODELS}, "asked": Spec()})

    from pipeline.models import costs

    costs._counted.cache_clear()
    yield add
    costs._counted.cache_clear()


def test_an_elementwise_output_takes_the_place_of_an_input_that_no_gradient_needs(register) -> None:
    found = {}
    for module in (Relu, Gelu):
        register(module)
        found[module] = model_costs(
            ModelConfig(name="asked", embedding_dim=4 * len(found) + 4), inputs(2, 1, 4)
        ).activations
    assert found[Gelu] - found[Relu] == 10


def test_a_model_that_looks_at_values_is_refused_with_the_reason(register) -> None:
    register(Asking)
    with pytest.raises(ConfigError, match="'asked' does not run on the meta device, where its FLOP are counted"):
        model_costs(ModelConfig(name="asked"), inputs(2, 1, 4))


@pytest.mark.parametrize("name", MODELS.names())
def test_counting_a_model_takes_no_memory_for_its_weights(name: str) -> None:
    config = compose([f"model={name}"]).model
    with torch.device("meta"):
        built = build_model(config, inputs(2, 5, config.embedding_dim))
    assert all(parameter.is_meta for parameter in built.parameters())


def test_names_and_seeds_cost_nothing_and_settings_do() -> None:
    here, config = inputs(3, 4, 8), DlrmConfig()
    assert model_costs(config, replace(here, seed=9)) == model_costs(config, here)
    assert model_costs(DlrmConfig(top_mlp=[7]), here) != model_costs(config, here)


def test_naming_and_composing_models_loads_no_torch() -> None:
    code = (
        "import sys; from pipeline.config.compose import compose; import pipeline.models.costs; "
        "from pipeline.specs import MODELS; compose([]); list(MODELS); "
        "print([name for name in ('torch', 'torchrec', 'polars', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
