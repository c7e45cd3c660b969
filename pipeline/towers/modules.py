"""The modules of towers, which compress embeddings before they cross the network (DMT, MLSys'24, section 3.2).

Every module: forward(embeddings [B, F, N]) -> [B, vectors, dim].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.core.kernels import load_kernels
from pipeline.embeddings.widths import Projections
from pipeline.models.layers.interaction import CrossNet, concat_parts
from pipeline.records.towers import TowerModuleSpec


class PassThrough(nn.Module):
    """The embeddings unchanged, which trains the flat model."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.vectors, self.dim = features, width

    def forward(self, embeddings: Tensor) -> Tensor:
        return embeddings


class DlrmTower(nn.Module):
    """``p`` vectors from the flattened tower and ``c`` from each feature: [B, p + c * F, dim]."""

    def __init__(self, features: int, width: int, spec: TowerModuleSpec) -> None:
        super().__init__()
        self.dim = spec.dim
        self.vectors = spec.vectors(features)
        self.whole = nn.Linear(features * width, spec.p * spec.dim) if spec.p else None
        self.each = nn.Linear(width, spec.c * spec.dim) if spec.c else None

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map [B, F, N] to [B, p + c * F, dim]."""
        parts = []
        if self.whole is not None:
            parts.append(self.whole(embeddings.flatten(1)))
        if self.each is not None:
            parts.append(self.each(embeddings).flatten(1))
        return concat_parts(parts).unflatten(1, (self.vectors, self.dim))


class DcnTower(nn.Module):
    """Cross layers x <- x0 * (W x + b) + x over the flattened tower (DCN-V2), then a projection: [B, F, dim]."""

    def __init__(self, features: int, width: int, spec: TowerModuleSpec) -> None:
        super().__init__()
        self.dim, self.vectors = spec.dim, features
        size = features * width
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(spec.cross_layers))
        self.project = nn.Linear(size, features * spec.dim)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map [B, F, N] to [B, F, dim]."""
        first = value = embeddings.flatten(1)
        for layer in self.cross:
            value = first * layer(value) + value
        return self.project(value).unflatten(1, (self.vectors, self.dim))


class LowRankTower(nn.Module):
    """``rank`` mixtures of the whole tower cross each other, and every feature's vector gets its part: [B, F, dim].

    A shared projection gives ``dim`` values for each embedding, and a third as many besides for the mixtures alone. It
    alone reads the embeddings; everything else is as narrow as what the tower sends. Per sample it multiplies about 4/3
    F N dim + 7/3 F dim rank + layers rank^2 times, where whole matrices take layers (F N)^2 + F^2 N dim.
    """

    def __init__(self, features: int, width: int, spec: TowerModuleSpec) -> None:
        super().__init__()
        self.dim, self.vectors = spec.dim, features
        inner = spec.dim + -(-spec.dim // 3)
        self.each = nn.Linear(width, inner)
        self.mix = nn.Linear(features * inner, spec.rank)
        self.cross = CrossNet("full", spec.cross_layers, spec.rank, spec.rank, 1)
        self.add = nn.Linear(spec.rank, features * spec.dim)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map [B, F, N] to [B, F, dim]."""
        inner = self.each(embeddings)
        seen = self.cross(self.mix(inner.flatten(1)))
        return self.add(seen).unflatten(1, (self.vectors, self.dim)) + inner[..., : self.dim]


class LowRankDcnTower(nn.Module):
    """A low-rank cross of the whole tower, then a shared projection and mixtures: [B, F, dim].

    The cross is c = x * (U V x + b) + x over the flattened tower, as in DCN-V2 with ``rank`` (2008.13535, section 3.4).
    Every feature's part of c is projected to ``dim`` values, to which ``rank`` mixtures of c are added. Features cross
    at full width before anything is narrowed, at about 3 F N rank products a sample instead of (F N)^2.
    """

    def __init__(self, features: int, width: int, spec: TowerModuleSpec) -> None:
        super().__init__()
        self.dim, self.vectors = spec.dim, features
        size = features * width
        self.down = nn.Linear(size, spec.rank, bias=False)
        self.up = nn.Linear(spec.rank, size)
        self.each = nn.Linear(width, spec.dim)
        self.mix = nn.Linear(size, spec.rank)
        self.add = nn.Linear(spec.rank, features * spec.dim)

    def begin_without_cross(self, generator: torch.Generator) -> None:
        """Draw initial values with which the cross changes nothing and the projection keeps lengths and angles.

        Training then departs from the embeddings as they are. With random values in both, test NE is 0.1 % higher on
        the flights log (docs/measurements/towers.md).
        """
        nn.init.zeros_(self.up.weight)
        nn.init.orthogonal_(self.each.weight, generator=generator)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map [B, F, N] to [B, F, dim]."""
        device = embeddings.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            # The cross multiplies what its products read, and so what was exchanged in bf16.
            embeddings = embeddings.to(torch.get_autocast_dtype(device))
        kernels = load_kernels("crosses")
        layers = (self.down, self.up, self.each, self.mix, self.add)
        parameters = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
        if kernels is not None and kernels.able and _fits(embeddings, parameters):
            return cast(Tensor, _CompiledCross.apply(kernels, embeddings, *parameters))
        value = embeddings.flatten(1)
        crossed = value * self.up(self.down(value)) + value
        added = self.add(self.mix(crossed)).unflatten(1, (self.vectors, self.dim))
        return self.each(crossed.view_as(embeddings)) + added


def _fits(embeddings: Tensor, parameters: Sequence[Tensor]) -> bool:
    # Whether the compiled cross takes these tensors: it reads pairs of bf16, each sample's side by side, and parameters
    # as float32 without checking them. What traces or exports a module wants PyTorch's operations.
    width = embeddings.shape[2]
    if embeddings.dtype != torch.bfloat16 or width % 2 or embeddings.stride()[1:] != (width, 1):
        return False
    if torch.compiler.is_compiling() or embeddings.device.type != "cpu":
        return False
    return all(value.dtype == torch.float32 and value.device.type == "cpu" for value in parameters)


class _CompiledCross(torch.autograd.Function):
    # Computes ``LowRankDcnTower``; ``parameters`` are those of its layers, in the order of the kernels' ``Weights``.

    @staticmethod
    def forward(ctx: Any, kernels: Any, embeddings: Tensor, *parameters: Tensor) -> Tensor:
        weights = kernels.weights(parameters)
        out, down, mixed = kernels.forward(embeddings, weights)
        ctx.kernels = kernels
        ctx.save_for_backward(embeddings, down, mixed, *parameters)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        embeddings, down, mixed, *parameters = ctx.saved_tensors
        weights = ctx.kernels.weights(parameters)
        for_embeddings, gradients = ctx.kernels.backward(embeddings, weights, down, mixed, grads[0].contiguous())
        return None, for_embeddings, *gradients


class ProjectedTower(nn.Module):
    """Projects embeddings of several widths, [B, sum of widths], to one width before a tower's ``module``."""

    def __init__(self, project: Projections, module: EvenModule) -> None:
        super().__init__()
        self.project, self.module = project, module
        self.vectors, self.dim = module.vectors, module.dim

    def forward(self, embeddings: Tensor) -> Tensor:
        # Project in float32, as in a flat model.
        with torch.autocast(embeddings.device.type, enabled=False):
            vectors = self.project(embeddings.float())
        outputs: Tensor = self.module(vectors)
        return outputs


EvenModule: TypeAlias = PassThrough | DlrmTower | DcnTower | LowRankTower | LowRankDcnTower
TowerModule: TypeAlias = EvenModule | ProjectedTower


def projected_tower(
    spec: TowerModuleSpec, widths: Mapping[str, int], dim: int, seed: int, number: int, *, even: bool
) -> TowerModule:
    """Build the module of tower ``number`` for features of these ``widths``, by name, in a model of width ``dim``.

    ``even`` says that every feature of the model has that width, and embeddings come as [B, F, ``dim``].
    """
    module = build_tower(spec, len(widths), dim, seed, number)
    if even:
        return module
    return ProjectedTower(Projections(widths, dim, seed), module)


def tower_module(spec: TowerModuleSpec, features: int, width: int) -> EvenModule:
    """Build the module of a tower with ``features`` embeddings of ``width``, with PyTorch's initial values."""
    if spec.name == "pass_through":
        return PassThrough(features, width)
    if spec.name == "dlrm":
        return DlrmTower(features, width, spec)
    if spec.name == "low_rank":
        return LowRankTower(features, width, spec)
    if spec.name == "dcn_low_rank":
        return LowRankDcnTower(features, width, spec)
    return DcnTower(features, width, spec)


def build_tower(spec: TowerModuleSpec, features: int, width: int, seed: int, number: int) -> EvenModule:
    """Build the module of tower ``number`` with ``features`` embeddings of ``width``, drawn from (seed, number)."""
    module = tower_module(spec, features, width)
    # Use a separate generator, so that values depend neither on what was drawn before nor on the rank.
    generator = torch.Generator().manual_seed((seed + 7919 * (number + 1)) % 2**63)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    if isinstance(module, LowRankDcnTower):
        module.begin_without_cross(generator)
    return module
