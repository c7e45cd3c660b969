"""The protocols of a ranking model and its parts: blocks for sequences, architectures for tasks.

A module that defines one of them must not import torch at its top.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.core.registry import Registry
from pipeline.records.dataset import TaskColumn
from pipeline.specs.label_kind import MAIN_TASK

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TaskInput:
    """A task of a model: its ``name``, and the task ``given`` without which it cannot happen."""

    name: str
    given: str | None = None


def all_tasks(further: Sequence[TaskInput]) -> tuple[TaskInput, ...]:
    """Return the tasks of a model: the main one, then the ``further`` ones."""
    return (TaskInput(name=MAIN_TASK), *further)


def task_inputs(columns: Sequence[TaskColumn]) -> tuple[TaskInput, ...]:
    """Return the further tasks of a dataset's schema as a model's inputs name them."""
    return tuple(TaskInput(name=column.name, given=column.given) for column in columns)


class TaskArchitecture(Protocol):
    """What several tasks share behind a ranking model's last hidden layer, of ``models/task_architectures.py``.

    A spec is a frozen dataclass, whose fields are the options of ``model.task_options`` that it uses.

    ``chained``: it needs tasks that are ``given`` others.
    """

    name: str
    chained: bool

    @abstractmethod
    def build(self, width: int, tasks: Sequence[TaskInput]) -> nn.Module:
        """Build the layers on ``hidden`` [B, width]: a ``layers.TaskHeads`` for ``tasks``, the main one first."""


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """``dim``: width of the events' vectors, and of what comes out. ``max_length``: events of a sample at most.

    ``ages``: width of the embeddings of the events' ages; 0 where times are not known.
    """

    dim: int
    max_length: int
    ages: int = 0


class SequenceBlock(Protocol):
    """What makes one vector a sample of its events, of ``models/sequences.py``.

    A spec is a frozen dataclass, whose fields are the options of ``model.sequences.<name>.options`` that it uses.

    ``doc``: one sentence. ``targeted``: it compares the events with the sequence's target. ``ages``: it wants the
    embeddings of the events' ages beside the events.
    """

    name: str
    doc: str
    targeted: bool
    ages: bool = False

    @abstractmethod
    def build(self, inputs: BlockInputs) -> nn.Module:
        """Build the module: forward(events [n, D], ``layers.Jagged``, target [B, D] or None) -> vectors [B, D].

        With ``ages`` it takes one more tensor: [n, ``inputs.ages``].

        Its values are float32 or, in products under autocast, bf16. It must run under ``torch.export``, where
        ``Jagged`` has the places of a padded grid. The report shows what passes through its ``layers.EventWeights``.
        """


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
        """Number of values of all inputs side by side."""
        return len(self.dense) + len(self.vectors) * self.dim


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The cost of a model, forward and backward.

    Attributes:
        flop: Of matrix products, per sample.
        parameters: Their number.
        activations: Values that the backward pass needs, per sample.
        moved: Values that all other operations read and write, per sample.
        operations: Calls of a step, whatever its samples; a matrix product counts as five.
    """

    flop: float
    parameters: int
    activations: int
    moved: float = 0.0
    operations: float = 0.0

    def plus(self, other: ModelCosts) -> ModelCosts:
        """Return the costs of both, one after the other."""
        return ModelCosts(
            flop=self.flop + other.flop,
            parameters=self.parameters + other.parameters,
            activations=self.activations + other.activations,
            moved=self.moved + other.moved,
            operations=self.operations + other.operations,
        )


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
        """Build the module: forward(dense [B, n], embeddings [B, V, D]) -> logits [B] float32, and ``start_at(logit)``.

        The logits are float32 under bf16 autocast too. The module must run on the meta device, where the planner counts
        its FLOP, and under ``torch.export``, which publishes it.
        """
        ...


def model_problem(spec: Any) -> str:
    """Return why ``spec`` cannot be a choice of ``model``, in words; "" if it can."""
    if isinstance(spec, type):
        return "which is a class, expected an instance of it"
    # Do not use ``isinstance``: a model is a protocol, so packages need not inherit from a class.
    config = getattr(spec, "config", None)
    if not (isinstance(config, type) and is_dataclass(config)):
        return f"whose config is {config!r}, expected a dataclass derived from ModelConfig"
    defaults = {each.name: each.default for each in fields(config)}
    if "embedding_dim" not in defaults:
        return f"whose config is {config.__name__}, expected a dataclass derived from ModelConfig"
    # Without this check, model=<name> would compose and train the model of that other name.
    if defaults["name"] != spec.name:
        return f"whose config {config.__name__} has the default name {defaults['name']!r}, expected {spec.name!r}"
    if not callable(getattr(spec, "build", None)):
        return "which has no method build"
    return ""


MODELS: Registry[Model[Any]] = Registry(
    "model", setting="model.name", home="pipeline.models", group="nightjar.models", problem=model_problem
)
TASK_ARCHITECTURES: Registry[TaskArchitecture] = Registry(
    "task architecture",
    setting="model.tasks",
    home="pipeline.models.task_architectures",
    group="nightjar.task_architectures",
)
SEQUENCE_BLOCKS: Registry[SequenceBlock] = Registry(
    "sequence block",
    setting="model.sequences.<name>.block",
    home="pipeline.models.sequences",
    group="nightjar.sequence_blocks",
)
