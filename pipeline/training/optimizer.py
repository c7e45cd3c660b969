"""The optimizers of a training: parameter groups, clipping, LAMB, averages of weights, and all of them together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config.train import AverageConfig, TrainConfig
from pipeline.core.errors import ConfigError
from pipeline.embeddings.table_training import clip_table_gradients, replica_optimizer, set_sparse_lr
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.workers import Workers
from pipeline.specs.optimizers import ParameterGroup
from pipeline.towers.transform import TowerEmbeddings
from pipeline.training.lr_schedule import LRSchedule

# Keys in the optimizer's state of a parameter.
AVERAGE, COUNT = "average", "averaged"
# The number of parameter names that a message shows.
_SHOWN = 12


class DenseClip:
    """Scales the gradients of ``parameters`` so that their L2 norm is ``limit`` at most (Pascanu et al., ICML'13).

    Call it after gradients are averaged over the ranks. With ``towers``, a rank only has gradients of its own towers'
    modules, so the squares are added up over all tower hosts, and the call is collective. Nothing waits for the device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], limit: float, towers: TowerEmbeddings | None = None) -> None:
        self._limit, self._parameters = limit, list(parameters)
        # Parameters are told apart by id, because tensors compare value by value.
        self._unshared: set[int] = set()
        self._counts = True
        if towers is not None:
            self._unshared.update(map(id, towers.unshared_parameters()))
            # All ranks of a tower have its gradients; only the first of them adds them to the sum.
            self._counts = dist.get_rank() == towers.groups.tower_ranks[0]
        self._has_unshared = bool(self._unshared) and dist.get_world_size() > 1

    def __call__(self) -> None:
        shared, of_towers = list[Tensor](), list[Tensor]()
        for parameter in self._parameters:
            if parameter.grad is not None:
                gradients = of_towers if self._has_unshared and id(parameter) in self._unshared else shared
                gradients.append(parameter.grad)
        if not shared and not of_towers:
            return
        norm = get_total_norm(shared)
        if self._has_unshared:
            device = self._parameters[0].device
            # Add up squares in double precision: a norm that float32 can hold may have a square that it cannot.
            squares = get_total_norm(of_towers).to(device, torch.float64).square() * float(self._counts)
            dist.all_reduce(squares)
            norm = (norm.to(device, torch.float64).square() + squares).sqrt().float()
        clip_grads_with_norm_(self._parameters, self._limit, norm)


def dense_groups(dense: Mapping[str, nn.Parameter], train: TrainConfig) -> list[ParameterGroup]:
    """Return the groups of the ``dense`` parameters: first those without a pattern, then one for each pattern.

    Patterns (``train.dense_groups``) match names, and the first one that matches counts. Raises ConfigError for a
    pattern that gets no parameter.
    """
    members: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in train.dense_groups}
    others: list[nn.Parameter] = []
    for name, parameter in dense.items():
        for pattern, matching in members.items():
            if fnmatchcase(name, pattern):
                matching.append(parameter)
                break
        else:
            others.append(parameter)
    groups = []
    if others:
        groups.append(ParameterGroup(others, train.lr, train.weight_decay))
    for pattern, parameters in members.items():
        if not parameters:
            raise _unmatched(pattern, list(dense), next(iter(members)))
        own = train.dense_groups[pattern]
        lr = train.lr if own.lr is None else own.lr
        decay = train.weight_decay if own.weight_decay is None else own.weight_decay
        groups.append(ParameterGroup(parameters, lr, decay))
    return groups


def _unmatched(pattern: str, names: list[str], first: str) -> ConfigError:
    shown = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        shown += f", and {len(names) - _SHOWN} more"
    if any(fnmatchcase(name, pattern) for name in names):
        why, hint = "matches only parameters that a pattern before it has", f"put it before {first!r}"
    else:
        near = difflib.get_close_matches(pattern, names, 1, 0.0)[0]
        why, hint = "matches no dense parameter", f"'train.dense_groups={{\"{near}\": {{lr: 0.001}}}}'"
    return ConfigError(f"train.dense_groups: {pattern!r} {why}; the model has: {shown}", hint=hint)


def steps_before(config: AverageConfig, total: int) -> int:
    """Return the steps of a training of ``total`` steps before the one after which the average first takes weights."""
    return min(math.ceil(config.start * total), max(total - 1, 0))


class Average:
    """The average of ``parameters`` over the steps, a moving one or the plain mean (SWA: Izmailov et al., UAI'18).

    The average and the number of weights in a mean are part of the state of ``optimizer``, so checkpoints keep both: a
    resumed training continues with the same bits, and one that goes back to its best weights gets their average back.

    Running statistics of batch norms, which have no gradient, are averaged too, since the last step's would belong to
    other weights. PyTorch's ``AveragedModel(use_buffers=True)`` does the same. The paper's extra pass over the rows
    would be needed wherever averaged weights are validated. ``total`` is the number of steps planned.
    """

    def __init__(
        self, config: AverageConfig, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], total: int
    ) -> None:
        self._config, self._optimizer, self._parameters = config, optimizer, list(parameters)
        self._first = steps_before(config, total)

    @property
    def first(self) -> int:
        """Return the training step (from 1) after which the average takes in weights for the first time."""
        return self._first + 1

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Take in the weights after training step ``step`` (from 0), if the average counts this step."""
        past = step - self._first
        if past < 0 or past % self._config.every:
            return
        # Group by the share of the current weights. In a mean it is larger for parameters that began to learn later.
        by_share: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter in self._parameters:
            if parameter.grad is None and parameter.requires_grad:
                continue
            state = self._optimizer.state[parameter]
            # Start anew at the average's first step: a training that was planned shorter began its average too early.
            if AVERAGE not in state or not past:
                state[AVERAGE], state[COUNT] = parameter.detach().clone(), 0
            # Averages of older checkpoints have no number; this is the number of a training that never went back.
            state[COUNT] = state.get(COUNT, past // self._config.every) + 1
            share = 1.0 - self._config.decay
            if self._config.kind == "swa":
                share = 1.0 / state[COUNT]
            averages, weights = by_share.setdefault(share, ([], []))
            averages.append(state[AVERAGE])
            weights.append(parameter.detach())
        for share, (averages, weights) in by_share.items():
            torch._foreach_lerp_(averages, weights, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their averages, where there are any; a second call undoes it."""
        for parameter in self._parameters:
            average = self._optimizer.state[parameter].get(AVERAGE)
            if average is not None:
                former = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(former)


def drop_averages(optimizer: torch.optim.Optimizer) -> None:
    """Forget the averages in the state of ``optimizer``, which belong to another training."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(COUNT, None)


class LambSteps(torch.optim.Optimizer):
    """LAMB: r = corrected m / (sqrt(corrected v) + eps) + decay * w; w -= lr * |w| / |r| * r, by parameter.

    You et al., ICLR'20, algorithm 2. The ratio |w| / |r| is 1 where either norm is 0, as for a new bias. Vectors
    (biases, scales of norms) are layers too.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            # The state has the names of PyTorch's Adam, since snapshots look up the direction of the last steps by
            # these names.
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            parameters, gradients, means, squares = (list[Tensor]() for _ in range(4))
            corrections1, corrections2 = list[float](), list[float]()
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "step" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["step"] = torch.zeros(())
                state["step"] += 1
                taken = state["step"].item()
                parameters.append(parameter)
                gradients.append(parameter.grad)
                means.append(state["exp_avg"])
                squares.append(state["exp_avg_sq"])
                corrections1.append(1 - beta1**taken)
                corrections2.append(1 - beta2**taken)
            if not parameters:
                continue
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            spreads = torch._foreach_div(squares, corrections2)
            torch._foreach_sqrt_(spreads)
            torch._foreach_add_(spreads, group["eps"])
            moves = torch._foreach_div(means, corrections1)
            torch._foreach_div_(moves, spreads)
            if decay:
                torch._foreach_add_(moves, parameters, alpha=decay)
            ratios = []
            for weight, move in zip(torch._foreach_norm(parameters), torch._foreach_norm(moves), strict=True):
                ratios.append(torch.where((weight > 0) & (move > 0), weight / move, 1.0))
            torch._foreach_mul_(moves, ratios)
            torch._foreach_add_(parameters, moves, alpha=-group["lr"])


class Optimizers:
    """What TorchRec's pipelines call: ``zero_grad`` before the backward pass, ``step`` after it.

    Tables learn inside the backward pass. Only data-parallel tables learn in ``step``, by ``tables`` (None without
    any), as the dense part does by ``dense``. ``schedule`` has the learning rates of the ``total`` planned steps. With
    ``towers``, the gradients of their modules differ between the ranks. ``workers`` are the ranks with samples (None:
    all). ``before`` is called before each step.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        config: TrainConfig,
        total: int,
        towers: TowerEmbeddings | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._dmp, self._config = dmp, config
        named, clip = dense_parameters(dmp), config.clip
        parameters, groups = list(named.values()), dense_groups(named, config)
        own: Sequence[nn.Parameter] = ()
        if towers is not None:
            own = towers.unshared_parameters()
        if workers is not None and workers.remote:
            # With embedding hosts, only workers have gradients of the dense part.
            own = parameters
        self.dense = config.dense_spec.build(groups, own)
        self._rates = [group.lr for group in groups]
        self._clip = DenseClip(parameters, clip.dense_norm, towers) if clip.dense_norm is not None else None
        if clip.table_value is not None:
            clip_table_gradients(dmp, clip.table_value)
        # None: the kernels have the rates that they were built with, whatever the first step's factor is, 0 included.
        self._factor: float | None = None
        self._step = 0
        self.schedule = LRSchedule(config, total)
        self.before: Callable[[], None] | None = None
        self.average = Average(config.average, self.dense, parameters, total) if config.average.active else None
        self.replicas = replica_optimizer(dmp)
        self._parts = [self.dense]
        if self.replicas is not None:
            self._parts.append(self.replicas)

    def set_step(self, step: int) -> float:
        """Set the learning rates for training step ``step`` (from 0) and return ``train.lr`` times its factor."""
        self._step, factor = step, self.schedule.factor(step)
        for group, rate in zip(self.dense.param_groups, self.rates(step), strict=True):
            group["lr"] = rate
        # Setting the tables' rate walks over all kernels, so do it only when the factor changes. Kernels keep their
        # rate, since a restored checkpoint leaves it alone.
        if factor != self._factor:
            self._factor = factor
            set_sparse_lr(self._dmp, self._config.sparse_lr, factor)
        return self._config.lr * factor

    def rates(self, step: int) -> list[float]:
        """Return the learning rates of the dense part's parameter groups in training step ``step``."""
        factor = self.schedule.factor(step)
        return [rate * factor for rate in self._rates]

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply the gradients of the last backward pass."""
        # In shared memory the mean over the ranks is taken only now, and it must be taken before gradients are clipped.
        if self.before is not None:
            self.before()
        if self._clip is not None:
            self._clip()
        for part in self._parts:
            part.step()
        if self.average is not None:
            self.average.take(self._step)

    def gather(self) -> None:
        """Bring the dense optimizer's whole state to rank 0, where the ranks share it. Collective."""
        # Only Shampoo's optimizer has this method; with others, every rank has the state of all parameters.
        gather = getattr(self.dense, "gather", None)
        if gather is not None:
            gather()
