"""The protocol of a ranking model: its settings, its checks, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.specs.task_architecture import TaskInput

if TYPE_CHECKING:
    from torch import nn

C = TypeVar("C", contravariant=True)  # a subclass of ``ModelConfig``


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The inputs of a model.

    ``dense``: names of the dense features, in the order of their columns. ``vectors``: names of the embedding vectors,
    in order: sparse features or outputs of towers. ``dim``: width of every vector; with towers it may differ from
    ``model.embedding_dim``. ``seed``: of the initial weights. ``tasks``: those besides the main one.
    """

    dense: tuple[str, ...]
    vectors: tuple[str, ...]
    dim: int
    seed: int = 0
    tasks: tuple[TaskInput, ...] = ()

    @property
    def width(self) -> int:
        """Values of all inputs side by side."""
        return len(self.dense) + len(self.vectors) * self.dim


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The cost of a model: ``parameters``, and per sample ``flop`` (forward and backward) and ``activations``."""

    flop: float
    parameters: int
    activations: int


class Model(Protocol[C]):
    """A ranking model. The module that defines it must not import torch at its top.

    ``name``: the option of group ``model``, and ``model.name`` in a configuration. ``config``: its settings, a
    keyword-only subclass of ``ModelConfig`` whose ``name`` has this default. The ``check`` method of the settings
    refuses invalid ones before anything starts.
    """

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...

    @property
    def config(self) -> type[Any]:
        """The dataclass of its settings."""
        ...

    def build(self, config: C, inputs: ModelInputs) -> nn.Module:
        """The module: forward(dense [B, n], embeddings [B, V, D]) -> logits [B] float32, and ``start_at(logit)``.

        The logits are float32 under bf16 autocast too. The module must run on the meta device, where the planner counts
        its FLOP, and under ``torch.export``, which publishes it.
        """
        ...


def model_problem(spec: Any) -> str:
    """Why ``spec`` cannot be a choice of ``model``, in words; "" if it can."""
    if isinstance(spec, type):
        return "which is a class, expected an instance of it"
    config = getattr(spec, "config", None)
    if not (isinstance(config, type) and is_dataclass(config)):
        return f"whose config is {config!r}, expected a dataclass derived from ModelConfig"
    defaults = {each.name: each.default for each in fields(config)}
    if "embedding_dim" not in defaults:
        return f"whose config is {config.__name__}, expected a dataclass derived from ModelConfig"
    if defaults["name"] != spec.name:  # else model=<name> would compose, and train, the model of that other name
        return f"whose config {config.__name__} has the default name {defaults['name']!r}, expected {spec.name!r}"
    return "" if callable(getattr(spec, "build", None)) else "which has no method build"
