"""What other tools call a setting."""

from __future__ import annotations

# Settings, and their names in other tools. Of several settings, the one in the typed group counts, else the first.
_NAMES = {
    "train.lr": "learning_rate lr dense_lr",
    "train.sparse_lr": "embedding_lr embedding_learning_rate sparse_learning_rate",
    "train.global_batch evaluate.global_batch": "batch_size global_batch_size",
    "evaluate.global_batch": "eval_batch_size",
    "train.epochs": "epochs num_epochs max_epochs n_epochs",
    "train.max_steps": "num_steps total_steps",
    "train.dense_optimizer": "optimizer optim",
    "train.sparse_optimizer": "embedding_optimizer",
    "train.schedule": "scheduler lr_scheduler lr_schedule",
    "train.warmup_steps": "num_warmup_steps",
    "train.weight_decay": "l2",
    "train.clip.dense_norm": "grad_clip gradient_clipping max_grad_norm",
    "train.precision": "dtype amp mixed_precision",
    "train.threads_per_rank": "num_threads",
    "train.prefetch_batches": "num_workers",
    "train.log_every_steps": "log_interval",
    "model.embedding_dim": "embedding_size embed_dim emb_dim",
    "model.top_mlp model.bottom_mlp": "hidden_units hidden_sizes mlp",
    "data.sparse_defaults.rows": "num_embeddings vocab_size hash_size",
    "data.split.test_share": "test_size",
    "data.path": "input file files data_dir",
    "data.label.column": "target target_column label_column",
    "hardware.ranks_per_host": "world_size num_gpus gpus nproc_per_node",
    "hardware.hosts": "nodes num_nodes nnodes",
    "checkpoint.every_steps": "save_steps save_every",
    "checkpoint.init_from": "pretrained warm_start",
    "seed": "random_seed",
    "store": "output_dir",
    "run": "run_name",
}
MEANT: dict[str, tuple[str, ...]] = {
    name: tuple(settings.split()) for settings, names in _NAMES.items() for name in names.split()
}


def meant_by(key: str) -> str | None:
    """The setting that ``key`` means in another tool; None if it is not a name there."""
    parent, _, name = key.rpartition(".")
    paths = MEANT.get(name.lower().replace("-", "_"), ())
    beside = [path for path in paths if path.rpartition(".")[0] == parent]
    return next(iter([*beside, *paths]), None)
