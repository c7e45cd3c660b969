"""The options of optimizers in keys: a configuration without any has the key that it had before there were options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from pipeline.config import Config
from pipeline.config.train import DenseOptions, SparseOptions
from pipeline.specs.stage import Use, always, use


def optimizer_options(when: Callable[[Config], bool] = always) -> tuple[Use, ...]:
    """The options, as far as some are given, ``when`` the optimizers have a part in the artifact."""

    def sparse(config: Config) -> bool:
        return when(config) and _given(config.train.sparse_options)

    def dense(config: Config) -> bool:
        return when(config) and _given(config.train.dense_options)

    def groups(config: Config) -> bool:
        return when(config) and bool(config.train.dense_groups)

    return (
        use("train.sparse_options", "eps beta1 beta2 l1 l2 beta", when=sparse),
        use("train.dense_options", "eps beta1 beta2 momentum nesterov block_size", when=dense),
        use("train.dense_options", "factor_every root_every start_step grafting", when=dense),
        use("train.dense_groups", "*.lr *.weight_decay", when=groups),
    )


def _given(options: SparseOptions | DenseOptions) -> bool:
    return any(value is not None for value in asdict(options).values())
