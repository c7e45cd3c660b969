"""The costs of a model for the planner, counted on the built module: FLOP, activations, parameters.

The module runs forward and backward once on the meta device, which computes nothing. Importing torch for that takes two
seconds of CPU time, so a process counts a model once, and only if it makes a plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.config.model import ModelConfig
from pipeline.config.tasks import TaskOptions
from pipeline.core.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.specs.model import MODELS, ModelCosts, ModelInputs

if TYPE_CHECKING:
    from torch import Tensor

# The samples of the counted pass; a power of two, so that a sample's share of a product is exact.
SAMPLES = 1024


def model_costs(config: ModelConfig, inputs: ModelInputs) -> ModelCosts:
    """Return the costs of the model that ``config`` names, built for ``inputs``.

    Returns:
        ``flop`` of matrix products, forward and backward, without the gradient of the dense features, as
            ``torch.utils.flop_counter`` counts them. ``activations``: values that the forward pass writes and the
            backward pass reads, which are the outputs of all operations but views, without inputs and parameters. An
            element-wise operation whose input no gradient needs counts as working in place. ``moved`` and
            ``operations``: as ``OperationCounter`` counts them.

    Raises:
        ConfigError: The model cannot be counted.
    """
    # Tables and sequences are not part of the module, and the seed does not change its costs. The key is text, because
    # configurations are not hashable.
    key = json.dumps(asdict(replace(config, tables={}, sequences={})), sort_keys=True)
    return _counted(key, replace(inputs, seed=0))


@lru_cache(maxsize=256)
def _counted(key: str, inputs: ModelInputs) -> ModelCosts:
    record = json.loads(key)
    record["task_options"] = TaskOptions(**record["task_options"])
    config = MODELS.get(record["name"]).config(**record)
    import torch

    # 1,000 tables make a top layer of gigabytes, which a plan does not need: the meta device stores nothing. A model
    # whose constructor works with values is built on the CPU first.
    try:
        with torch.device("meta"):
            module = build_model(config, inputs).to("meta")
    except (RuntimeError, NotImplementedError, ValueError):
        module = build_model(config, inputs).to("meta")
    dense = torch.zeros(SAMPLES, len(inputs.dense), device="meta")
    embeddings = torch.zeros(SAMPLES, len(inputs.vectors), inputs.dim, device="meta", requires_grad=True)
    try:
        return module_costs(module, dense, embeddings)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"model {config.name!r} does not run on the meta device, where its FLOP are counted: {error}",
            hint="its forward must not depend on values, and every tensor it makes must be on the device of its inputs",
        ) from error


def module_costs(module: Any, *inputs: Tensor) -> ModelCosts:
    """Return the costs of a sample in a pass of ``module`` on the meta device; ``inputs`` have ``SAMPLES`` rows."""
    from torch.utils.flop_counter import FlopCounterMode

    from pipeline.models.operation_counter import OperationCounter

    with FlopCounterMode(display=False) as products, OperationCounter() as counted:
        output, activations = _forward(module, *inputs)
        output.sum().backward()
    return ModelCosts(
        flop=products.get_total_flops() / SAMPLES,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        activations=round(activations / SAMPLES),
        moved=counted.moved / SAMPLES,
        operations=counted.operations,
    )


def _forward(module: Any, *inputs: Tensor) -> tuple[Tensor, int]:
    # Returns the output, and the number of activations that the forward pass writes.
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def storages(values: Any) -> dict[int, int]:
        # Count the values by storage and not by tensor, because a view shares its base's storage and writes nothing.
        found: dict[int, int] = {}
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                found.setdefault(value.untyped_storage()._cdata, value.numel())
        return found

    known = set(storages([*inputs, *module.parameters(), *module.buffers()]))
    written: dict[int, int] = {}
    # The inputs of each element-wise operation, and the number of values of its output.
    pointwise: list[tuple[list[int], int]] = []
    # Keep tensors alive, so that no storage's address is used twice.
    alive: list[Tensor] = []
    saved: set[int] = set()

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            alive.extend(v for v in tree_leaves(result) if isinstance(v, torch.Tensor))
            for storage, values in storages(result).items():
                if storage in known or storage in written:
                    continue
                written[storage] = values
                if torch.Tag.pointwise in func.tags:
                    pointwise.append((list(storages(args)), values))
            return result

    def save(value: Tensor) -> Tensor:
        saved.add(value.untyped_storage()._cdata)
        return value

    with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value), Writes():
        output = module(*inputs)

    # An element-wise operation overwrites an input of its size that nothing needs any more.
    free = {storage: values for storage, values in written.items() if storage not in saved}
    overwritten = 0
    for operands, values in pointwise:
        for storage in operands:
            if free.get(storage) == values:
                overwritten += free.pop(storage)
                break
    return output, sum(written.values()) - overwritten
