"""What other tools call a setting: names of the field, and the settings here that they mean."""

from __future__ import annotations

# Where a name may mean several settings, the one of the group it was typed in, else the first.
MEANT: dict[str, tuple[str, ...]] = {
    "learning_rate": ("train.lr",),
    "lr": ("train.lr",),
    "dense_lr": ("train.lr",),
    "embedding_lr": ("train.sparse_lr",),
    "embedding_learning_rate": ("train.sparse_lr",),
    "sparse_learning_rate": ("train.sparse_lr",),
    "batch_size": ("train.global_batch", "evaluate.global_batch"),
    "global_batch_size": ("train.global_batch", "evaluate.global_batch"),
    "eval_batch_size": ("evaluate.global_batch",),
    "num_epochs": ("train.epochs",),
    "max_epochs": ("train.epochs",),
    "n_epochs": ("train.epochs",),
    "num_steps": ("train.max_steps",),
    "total_steps": ("train.max_steps",),
    "optimizer": ("train.dense_optimizer",),
    "optim": ("train.dense_optimizer",),
    "embedding_optimizer": ("train.sparse_optimizer",),
    "scheduler": ("train.schedule",),
    "lr_scheduler": ("train.schedule",),
    "lr_schedule": ("train.schedule",),
    "num_warmup_steps": ("train.warmup_steps",),
    "l2": ("train.weight_decay",),
    "grad_clip": ("train.clip.dense_norm",),
    "gradient_clipping": ("train.clip.dense_norm",),
    "max_grad_norm": ("train.clip.dense_norm",),
    "dtype": ("train.precision",),
    "amp": ("train.precision",),
    "mixed_precision": ("train.precision",),
    "num_threads": ("train.threads_per_rank",),
    "num_workers": ("train.prefetch_batches",),
    "log_interval": ("train.log_every_steps",),
    "embedding_size": ("model.embedding_dim",),
    "embed_dim": ("model.embedding_dim",),
    "emb_dim": ("model.embedding_dim",),
    "hidden_units": ("model.top_mlp", "model.bottom_mlp"),
    "hidden_sizes": ("model.top_mlp", "model.bottom_mlp"),
    "mlp": ("model.top_mlp", "model.bottom_mlp"),
    "num_embeddings": ("data.sparse_defaults.rows",),
    "vocab_size": ("data.sparse_defaults.rows",),
    "hash_size": ("data.sparse_defaults.rows",),
    "test_size": ("data.split.test_share",),
    "input": ("data.path",),
    "file": ("data.path",),
    "files": ("data.path",),
    "target": ("data.label.column",),
    "target_column": ("data.label.column",),
    "label_column": ("data.label.column",),
    "data_dir": ("data.path",),
    "world_size": ("hardware.ranks_per_host",),
    "num_gpus": ("hardware.ranks_per_host",),
    "gpus": ("hardware.ranks_per_host",),
    "nproc_per_node": ("hardware.ranks_per_host",),
    "nodes": ("hardware.hosts",),
    "num_nodes": ("hardware.hosts",),
    "nnodes": ("hardware.hosts",),
    "save_steps": ("checkpoint.every_steps",),
    "save_every": ("checkpoint.every_steps",),
    "pretrained": ("checkpoint.init_from",),
    "warm_start": ("checkpoint.init_from",),
    "random_seed": ("seed",),
    "output_dir": ("store",),
    "run_name": ("run",),
}


def meant_by(key: str) -> str | None:
    """The setting that ``key`` means in the language of other tools; None where it is not one of their words."""
    parent, _, name = key.rpartition(".")
    paths = MEANT.get(name.lower().replace("-", "_"), ())
    beside = [path for path in paths if path.rpartition(".")[0] == parent]
    return next(iter([*beside, *paths]), None)
