"""The part of a checkpoint that is not tables: position, schedule, random state, dense optimizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.container import unreadable
from pipeline.core.errors import ArtifactError
from pipeline.specs.optimizers import DENSE_OPTIMIZERS

# Settings of how a step is computed, not of what it computes; the running process decides them.
_EXECUTION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(kw_only=True)
class TrainState:
    """The state of training. Its position is (``epoch``, ``next_batch``: the next global batch of that epoch).

    ``schedule``: JSON data, the settings of the learning rates for people, and how the weights that are saved differ
    from those that train (``training/checkpoints.py``); the rates themselves follow from ``step`` and ``validation``;
    ``windows``: JSON data of the metric windows;
    ``towers``: {start of a tower module's parameter names: its features, in order}, without what would mean nothing for
    other features; ``tower_module``: their module, a ``TowerModuleSpec``, where ``partition.auto`` chose it (else the
    configuration tells); ``order``: the features by group of ``data``, in the order in which the model takes them,
    which no record of a configuration tells (the order of rows is ``lanes`` and ``shuffle_key``); ``validation``: looks
    at validation rows, {} without any; ``rng``: every rank's ``torch.get_rng_state()``, uint8 [world size, bytes], None
    where it does not matter; ``compiled``: whether ``train.compile=auto`` compiles the dense part, None before it is
    decided; ``lanes``: the number of lanes of the rows, 1 if a checkpoint does not record it; ``shuffle_key``: the key
    of their order besides the seed, "" for the dataset's own key, as in checkpoints of earlier releases.
    """

    step: int = 0
    epoch: int = 0
    next_batch: int = 0
    samples: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    windows: list[list[float]] = field(default_factory=list)
    towers: dict[str, list[str]] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    rng: Tensor | None = None
    compiled: bool | None = None
    lanes: int = 1
    shuffle_key: str = ""
    tower_module: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return everything but ``rng``, which is a tensor, as plain data."""
        record = dict(vars(self))
        del record["rng"]
        # Older checkpoints do not have these keys, so values at their defaults are left out.
        defaults: dict[str, Any] = {"validation": {}, "order": {}, "compiled": None, "lanes": 1, "shuffle_key": ""}
        defaults["tower_module"] = {}
        for name, default in defaults.items():
            if record[name] == default:
                del record[name]
        return record


def _parameter_names(optimizer: torch.optim.Optimizer, dense: dict[str, Tensor]) -> list[str]:
    # Names are in the optimizer's own order, by which its state_dict numbers them.
    name_of = {id(parameter): name for name, parameter in dense.items()}
    names: list[str] = []
    for group in optimizer.param_groups:
        names += [name_of[id(parameter)] for parameter in group["params"]]
    return names


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, dense: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Flatten an optimizer to tensors by ``<parameter>/<state>`` and JSON data (class, scalars, parameter groups).

    Works for any torch optimizer whose parameters are all in ``dense`` (KeyError otherwise).
    """
    names = _parameter_names(optimizer, dense)
    record = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, state in record["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{names[index]}/{key}"] = value
            else:
                scalars.setdefault(names[index], {})[key] = value
    groups = []
    for group in record["param_groups"]:
        settings = {}
        for key, value in group.items():
            if isinstance(value, Tensor):
                value = value.item()
            if key not in _EXECUTION:
                settings[key] = value
        settings["params"] = [names[index] for index in group["params"]]
        groups.append(settings)
    return tensors, {"class": type(optimizer).__name__, "scalars": scalars, "groups": groups}


def dense_part(
    dense: dict[str, Tensor], optimizer: torch.optim.Optimizer | None, state: TrainState
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copy the dense parameters, their optimizer and the random state to host memory; also returns the JSON part."""
    tensors: dict[str, Tensor] = {}
    for name, value in dense.items():
        tensors[f"param/{name}"] = value
    record: dict[str, Any] = {"train": state.to_json(), "optimizer": None}
    if optimizer is not None:
        states, record["optimizer"] = flatten_optimizer(optimizer, dense)
        for name, value in states.items():
            tensors[f"optimizer/{name}"] = value
    if state.rng is not None:
        tensors["rng"] = state.rng
    copies: dict[str, Tensor] = {}
    for name, value in tensors.items():
        # Host tensors are copied as well: training changes them while the checkpoint is written.
        copies[name] = value.detach().to("cpu", copy=True).contiguous()
    return copies, record


def load_optimizer(
    optimizer: torch.optim.Optimizer, dense: dict[str, Tensor], tensors: dict[str, Tensor], record: dict[str, Any]
) -> None:
    """Put what ``flatten_optimizer`` returned back into ``optimizer``; ArtifactError if class or parameters differ."""
    kind = type(optimizer).__name__
    if record["class"] != kind:
        # The hint has the settings that make the optimizer that was saved.
        hint = "an installation that knows it, or force=true"
        for spec in DENSE_OPTIMIZERS:
            if record["class"] in spec.classes:
                hint = f"train.dense_optimizer={spec.name} train.weight_decay={record['groups'][0]['weight_decay']}"
                break
        raise ArtifactError(
            f"the checkpoint's dense optimizer is {record['class']}, but the run's is {kind}", hint=hint
        )
    names = _parameter_names(optimizer, dense)
    saved: list[str] = []
    for group in record["groups"]:
        saved += group["params"]
    if sorted(saved) != sorted(names) or len(record["groups"]) != len(optimizer.param_groups):
        odd = sorted(set(saved) ^ set(names))
        raise ArtifactError(
            f"the checkpoint's dense optimizer has {len(saved)} parameters in {len(record['groups'])} groups, "
            f"the run's {len(names)} in {len(optimizer.param_groups)}; not in both: {', '.join(odd) or 'none'}",
            hint="the model settings the checkpoint was written with, or force=true",
        )
    # torch numbers parameters by their order in the optimizer, but the checkpoint has their names.
    index = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for name, scalars in record["scalars"].items():
        state[index[name]] = dict(scalars)
    for key, tensor in tensors.items():
        name, part = key.rsplit("/", 1)
        state.setdefault(index[name], {})[part] = tensor
    groups = []
    order: list[int] = []
    for current, former in zip(optimizer.state_dict()["param_groups"], record["groups"], strict=True):
        group = dict(current)
        for key, value in former.items():
            # JSON has neither tuples nor tensors: values get the types that the run's optimizer has. The learning rate
            # among them has no effect, since ``Optimizers.set_step`` sets it before each step.
            own = current.get(key)
            if isinstance(own, tuple):
                value = tuple(value)
            elif isinstance(own, Tensor):
                value = torch.tensor(value, dtype=own.dtype, device=own.device)
            group[key] = value
        group["params"] = [index[name] for name in former["params"]]
        order += group["params"]
        groups.append(group)
    # torch loads state by position, so parameters in another order would get each other's.
    if order != list(range(len(names))):
        raise ArtifactError("the checkpoint's dense parameters are in another order", hint="force=true")
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def parse_state(data: bytes | bytearray, where: str) -> dict[str, Any]:
    """Parse the state record in ``data``, its ``train`` a TrainState's.

    Raises:
        DamagedError: It is anything else; names ``where``.
    """
    try:
        record: dict[str, Any] = json.loads(data)
        missing = {"train", "optimizer"} - record.keys()
        if missing:
            raise ValueError(f"it has no {', '.join(map(repr, sorted(missing)))}")
        TrainState(**record["train"])
        if record["optimizer"] is not None and not isinstance(record["optimizer"]["class"], str):
            raise ValueError(f"class is {record['optimizer']['class']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(where, "a checkpoint's state", error) from None
    return record
