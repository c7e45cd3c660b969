"""Which artifact keys a setting belongs to: optimizer options that stages share, and settings that change no key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pipeline.config import Config
from pipeline.specs import REGISTRIES, STAGES
from pipeline.specs.stage import Use, always, use, values_at


def optimizer_options(when: Callable[[Config], bool] = always) -> tuple[Use, ...]:
    """Return the options of optimizers, if any is given, ``when`` the optimizers take part in the artifact.

    A configuration without any has the key that it had before options existed.
    """

    def sparse(config: Config) -> bool:
        return when(config) and any(value is not None for value in asdict(config.train.sparse_options).values())

    def dense(config: Config) -> bool:
        return when(config) and any(value is not None for value in asdict(config.train.dense_options).values())

    def groups(config: Config) -> bool:
        return when(config) and bool(config.train.dense_groups)

    return (
        use("train.sparse_options", "eps beta1 beta2 l1 l2 beta", when=sparse),
        use("train.dense_options", "eps beta1 beta2 momentum nesterov block_size", when=dense),
        use("train.dense_options", "factor_every root_every start_step grafting", when=dense),
        use("train.dense_groups", "*.lr *.weight_decay", when=groups),
    )


def code_of(uses: Iterable[Use], revision: int, config: Any) -> dict[str, Any]:
    """Return what a key with the settings ``uses`` covers of the code.

    Returns:
        {"code": {"revision", "packages": {kind of choice: package and version}}}, without a revision of 0 and without
            packages if everything chosen is built in; {} if there is neither, so that keys of earlier releases stay.
            Among choices that all apply at once, each that a package adds has a separate entry, under its kind and
            name.
    """
    packages: dict[str, set[str]] = {}
    for registry in REGISTRIES:
        # Packages add to a registry by its group of entry points; without a group there are only built-in choices.
        if not registry.group:
            continue
        for path in registry.paths:
            if not any(use.covers(path) and use.when(config) for use in uses):
                continue
            chosen = []
            if registry.all_apply:
                for name in registry.names():
                    chosen.append((f"{registry.kind} {name}", name))
            else:
                for _, value in values_at(config, path.split(".")):
                    if not isinstance(value, list):
                        value = [value]
                    for name in value:
                        chosen.append((registry.kind, name))
            for kind, name in chosen:
                package = registry.package(name)
                if package:
                    packages.setdefault(kind, set()).add(package)
    code: dict[str, Any] = {}
    if revision:
        code["revision"] = revision
    if packages:
        code["packages"] = {kind: ", ".join(sorted(names)) for kind, names in packages.items()}
    # An empty entry is left out, since it would change the keys of earlier releases.
    if not code:
        return {}
    return {"code": code}


# The settings that cannot change any artifact; each stage lists those that can change its own. A setting that is in no
# list fails ``tests/config/test_setting_keys.py``, so whoever adds one must decide.
NO_KEY = (
    # Where a run lies and how much of it is done.
    use("", "run store stages force"),
    use("data", "aside"),
    # How much is read at a time, and by whom, which changes no byte.
    use("ingest", "engine block_mib ray.address"),
    use("hardware", "ssd_paths cache_path cache_gib"),  # where scratch files and copies lie
    # How training runs, when it stops itself, and what it keeps on the way.
    use("train", "compile cuda_graphs pipeline hogwild.threads log_every_steps profile"),
    use("train.guard", "window_steps collapse_after_steps min_logit_std max_window_ne collapse"),
    use("checkpoint", "every_steps every_minutes policy quantise tables max_chain when_busy chunk_mib keep_last"),
    use("checkpoint", "keep_every grace_seconds compact_after"),
    use("debug", "*"),
    use("publish", "cache_mib"),
    # How and when stages are started.
    use("launch", "name inline attempts deadline_minutes logs torchrun limit_memory job context namespace queue"),
    use(
        "launch",
        "priority_class min_hosts shrink_after_minutes pending_minutes rendezvous_minutes first_step_minutes port "
        "grow grow_minutes",
    ),
    use("launch", "lease_seconds keep_hours image_minutes outage_minutes host_index first_host kueue"),
    use("launch.pods", "image pull_secrets service_account launcher_account user env secret_env env_from"),
    use("launch.pods", "node_selector tolerations patch"),
    use("launch.pods.volumes", "*.claim *.path *.sub_path *.read_only"),
    use("launch.pods.resources", "*.cpu *.memory_gib *.shm_gib *.disk_gib *.gpus"),
    use("schedule", "*"),
    use("nightly", "*"),
    use("tune", "*"),
    use("search", "*"),
    use("track", "to every_seconds mlflow.* prometheus.* opentelemetry.*"),
)


def keys_of(path: str) -> tuple[str, ...]:
    """Return the keys that setting ``path`` can belong to (``*``: any entry of a dictionary); many have none."""
    keys = []
    for stage in STAGES:
        for key, uses in stage.keys().items():
            if any(use.covers(path) for use in uses):
                keys.append(key)
    return tuple(keys)
