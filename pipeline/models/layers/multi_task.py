"""Layers of several tasks on top of a ranker's last hidden layer: experts, gates, and a logit for each task.

All that a task's loss needs is a logit [B] for it; column 0 is the main task's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.perceptron import Logit, Ranker, mlp
from pipeline.specs.model import TaskInput


class TaskHeads(nn.Module):
    """forward(hidden [B, width]) -> logits [B, T] in float32: ``mix`` gives each task its input, its own MLP follows.

    ``mix`` maps hidden to T tensors [B, w]; None: all tasks take ``hidden``.
    """

    def __init__(self, width: int, tasks: int, task_mlp: Sequence[int], mix: nn.Module | None = None) -> None:
        super().__init__()
        self.count, self.mix = tasks, mix
        widths = [width, *task_mlp]
        self.towers = nn.ModuleList(mlp(widths, last_activation=True) for _ in range(tasks))
        self.heads = nn.ModuleList(Logit(widths[-1]) for _ in range(tasks))

    def forward(self, hidden: Tensor) -> Tensor:
        inputs = [hidden] * self.count
        if self.mix is not None:
            inputs = self.mix(hidden)
        logits = []
        for head, tower, value in zip(self.heads, self.towers, inputs, strict=True):
            logits.append(head(tower(value)))
        return self.join(logits)

    def join(self, logits: list[Tensor]) -> Tensor:
        """Return the tasks' logits, [B] each, as [B, T]."""
        return torch.stack(logits, dim=1)

    def start_at(self, logits: Sequence[float]) -> None:
        """Set the last biases, so that an untrained model's logits are near ``logits``."""
        for head, logit in zip(self.heads, logits, strict=True):
            assert isinstance(head, Logit)
            head.start_at(logit)


class ChainedHeads(TaskHeads):
    """``TaskHeads`` in which a task's own logit is conditional on another, *given* task (ESMM, section 2.3)."""

    def __init__(self, width: int, tasks: Sequence[TaskInput], task_mlp: Sequence[int]) -> None:
        super().__init__(width, len(tasks), task_mlp)
        # These are column numbers. A given task comes before those that depend on it, so its joint logit is known by
        # then.
        columns = {task.name: column for column, task in enumerate(tasks)}
        self.given: list[int | None] = []
        for task in tasks:
            self.given.append(columns[task.given] if task.given is not None else None)

    def join(self, logits: list[Tensor]) -> Tensor:
        """See ``TaskHeads.join``."""
        joint: list[Tensor] = []
        for conditional, given in zip(logits, self.given, strict=True):
            if given is None:
                joint.append(conditional)
                continue
            # P(both) = P(given) * P(own | given): with a, b the logits of these two, 1 / P - 1 = e^-a + e^-b +
            # e^-(a + b), so the logit of P is -logsumexp(-a, -b, -a - b), exact for probabilities near 0 and 1.
            a, b = joint[given], conditional
            joint.append(-torch.logsumexp(torch.stack([-a, -b, -a - b]), dim=0))
        return torch.stack(joint, dim=1)

    def start_at(self, logits: Sequence[float]) -> None:
        """See ``TaskHeads.start_at``."""
        # The heads' own logits are conditional, but the wanted ones are joint: P(own | given) = P(both) / P(given).
        rates = torch.tensor(list(logits), dtype=torch.float64).sigmoid()
        conditional = []
        for rate, given in zip(rates, self.given, strict=True):
            if given is not None:
                # A sample of rows may have as many of the task as of the given one, or none, so clamp both to finite
                # logits.
                rate = (rate / rates[given]).clamp(1e-6, 1 - 1e-6)
            conditional.append(float(torch.logit(rate)))
        super().start_at(conditional)


class GatedMixture(nn.Module):
    """forward(context [B, c], experts [B, n, w]) -> [B, w]: the experts' mean by a softmax gate on ``context``."""

    def __init__(self, context: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(context, experts, bias=False)

    def forward(self, context: Tensor, experts: Tensor) -> Tensor:
        # Autocast computes softmax in float32, but ``bmm`` needs both tensors in one dtype.
        shares = torch.softmax(self.gate(context), dim=1).to(experts.dtype)
        return torch.bmm(shares[:, None], experts).squeeze(1)


class MixtureOfExperts(nn.Module):
    """forward(hidden [B, width]) -> T tensors [B, w]: means of shared experts, by a gate of each task (MMoE, 4.2)."""

    def __init__(self, width: int, tasks: int, experts: int, expert_mlp: Sequence[int]) -> None:
        super().__init__()
        widths = [width, *expert_mlp]
        self.experts = nn.ModuleList(mlp(widths, last_activation=True) for _ in range(experts))
        self.gates = nn.ModuleList(GatedMixture(width, experts) for _ in range(tasks))
        self.width = widths[-1]

    def forward(self, hidden: Tensor) -> list[Tensor]:
        experts = torch.stack([expert(hidden) for expert in self.experts], dim=1)
        return [gate(hidden, experts) for gate in self.gates]


class ExtractionLevel(nn.Module):
    """One level of PLE: forward(inputs, T + 1 tensors [B, width]) -> T + 1 tensors [B, w]; the last are shared ones.

    A task's gate mixes its own experts and the shared ones; the shared gate mixes all experts (figure 5). The ``last``
    level has no shared output, since nothing would take it.
    """

    def __init__(
        self, width: int, tasks: int, experts: int, own_experts: int, expert_mlp: Sequence[int], *, last: bool
    ) -> None:
        super().__init__()
        widths = [width, *expert_mlp]
        # Each task's own experts come first, then the shared ones; gates likewise. Names of parameters depend on this
        # order.
        counts = [*[own_experts] * tasks, experts]
        self.experts = nn.ModuleList()
        for count in counts:
            self.experts.append(nn.ModuleList(mlp(widths, last_activation=True) for _ in range(count)))
        gate_inputs = [own_experts + experts] * tasks
        if not last:
            gate_inputs.append(sum(counts))
        self.gates = nn.ModuleList(GatedMixture(width, count) for count in gate_inputs)
        self.width = widths[-1]

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        # 1. Run the experts, each group on its own input: [B, experts of the group, w].
        outputs = []
        for experts, value in zip(self.experts, inputs, strict=True):
            outputs.append(torch.stack([expert(value) for expert in experts], dim=1))  # type: ignore[attr-defined]

        # 2. Collect what each gate may choose from: a task's own experts and the shared ones, or all of them.
        mixed = [torch.cat([task_outputs, outputs[-1]], dim=1) for task_outputs in outputs[:-1]]
        mixed.append(torch.cat(outputs, dim=1))

        # 3. Run the gates. The zip is not strict, since the last level has no gate for the shared experts.
        values = []
        for gate, value, choice in zip(self.gates, inputs, mixed, strict=False):
            values.append(gate(value, choice))
        return values


class Extraction(nn.Module):
    """forward(hidden [B, width]) -> T tensors [B, w]: levels of experts, of each task and shared (PLE, section 4.2)."""

    def __init__(
        self, width: int, tasks: int, levels: int, experts: int, own_experts: int, expert_mlp: Sequence[int]
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.levels = nn.ModuleList()
        for number in range(levels):
            level = ExtractionLevel(width, tasks, experts, own_experts, expert_mlp, last=number == levels - 1)
            self.levels.append(level)
            width = level.width
        self.width = width

    def forward(self, hidden: Tensor) -> list[Tensor]:
        # All groups of the first level take the ranker's hidden layer; later ones have their own inputs.
        values = [hidden] * (self.tasks + 1)
        for level in self.levels:
            values = level(values)
        return values


class MultiTaskRanker(Ranker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B, T] in float32: ``ranker`` up to its last hidden layer.

    ``start_at`` sets the main task's logit; ``start_all`` those of all tasks.
    """

    def __init__(self, ranker: Ranker, heads: TaskHeads) -> None:
        super().__init__()
        self.ranker, self.heads = ranker, heads

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.heads(self.ranker.last_hidden(dense, embeddings))
        return logits

    def start_at(self, logit: float) -> None:
        """See ``Ranker.start_at``; the other tasks start at even odds."""
        self.start_all([logit, *[0.0] * (self.heads.count - 1)])

    def start_all(self, logits: Sequence[float]) -> None:
        """Set the last biases, so that an untrained model's logits are near ``logits``, the main task's first."""
        self.heads.start_at(logits)
