"""``make bench-compile``: what torch.compile does to the forward and backward pass of every ranker on this machine.

The passes are timed as ``train.compile=auto`` times them, compiled and not in turn. ``ratio``: the largest quotient of
the two; ``steps``: after how many steps compiling has paid for itself (null: never).
"""

from __future__ import annotations

import warnings

import torch

from benchmarks.harness import finish, options, show
from benchmarks.models_and_rows import TABLES, schema_of
from pipeline.models.build import build_model
from pipeline.specs import MODELS, ModelInputs
from pipeline.training.compiling import device_name, trial
from pipeline.training.linear import use_cpu_kernels
from pipeline.training.model import DensePart, compute_dtype


def main() -> None:
    given = options(
        __doc__,
        models=(list(MODELS.names()), None, {"choices": MODELS.names()}),
        batch=4096,
        dim=16,
        precision=("auto", None, {"choices": ("auto", "bf16", "fp32")}),
        device=("cpu", None, {"choices": ("cpu", "cuda")}),
    )
    warnings.simplefilter("ignore")
    device = torch.device(given.device)
    figures = {}
    for name in given.models:
        timed = trial(_part(name, given.dim, given.precision, device), given.batch)
        if timed is None:
            continue
        saved = (timed.eager_ms - timed.compiled_ms) / 1000
        figures[name] = {
            "eager_ms": timed.eager_ms,
            "compiled_ms": timed.compiled_ms,
            "compile_seconds": timed.seconds,
            "quotient": timed.eager_ms / timed.compiled_ms,
            "steps": round(timed.seconds / saved) if saved > 0 else None,
        }
        show(name, figures[name], ".2f")
    best = max((each["quotient"] or 0.0 for each in figures.values()), default=None)
    finish("compile", best, models=figures, machine=device_name(device), threads=torch.get_num_threads())


def _part(name: str, dim: int, precision: str, device: torch.device) -> DensePart:
    """The dense part as training has it: a ranker with its default settings."""
    schema = schema_of(TABLES, 1)
    vectors = tuple(column.name for column in schema.sparse)
    inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=dim, seed=1)
    ranking = build_model(MODELS.get(name).config(embedding_dim=dim), inputs).to(device)
    if device.type == "cpu":
        use_cpu_kernels(ranking)
    part = DensePart(ranking, schema, compute_dtype(precision, device))
    part.inputs = inputs
    return part


if __name__ == "__main__":
    main()
