"""Distributed Shampoo, ``train.dense_optimizer=shampoo``."""
