"""The optimizers of the dense part: ``train.dense_optimizer``. A new one is a file here and a line in ``SPECS``."""

from __future__ import annotations

from pipeline.specs.dense_optimizer import DenseOptimizer
from pipeline.training.optimizers import adagrad, adam, adamw, lamb, sgd, shampoo

SPECS: tuple[DenseOptimizer, ...] = (adam.SPEC, adagrad.SPEC, adamw.SPEC, sgd.SPEC, lamb.SPEC, shampoo.SPEC)
