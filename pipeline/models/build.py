"""Builds any registered ranking model."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pipeline.config.model import ModelConfig
from pipeline.specs.model import MODELS, ModelInputs, all_tasks

if TYPE_CHECKING:
    from pipeline.models.layers.perceptron import Ranker


def build_model(config: ModelConfig, inputs: ModelInputs) -> Ranker:
    """Build the model that ``config`` (checked) names, for ``inputs``.

    With ``inputs.tasks`` its logits are [B, T], the main task's first (``layers.multi_task.MultiTaskRanker``).

    Its initial weights depend on ``inputs.seed`` alone. The CPU's global random state stays as it is.

    Raises:
        ConfigError: The name is unknown, or there are several tasks and the model has no last layer to replace.
    """
    import torch

    from pipeline.models.layers.perceptron import initialise

    spec = MODELS.get(config.name)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(inputs.seed)
        ranker = cast("Ranker", spec.build(config, inputs))
        if not inputs.tasks:
            return ranker
        from pipeline.models.layers.multi_task import MultiTaskRanker, TaskHeads

        # The layers of several tasks replace the last one.
        heads = config.task_architecture.build(ranker.drop_head(), all_tasks(inputs.tasks))
        return MultiTaskRanker(ranker, cast(TaskHeads, initialise(heads, inputs.seed + 1)))
