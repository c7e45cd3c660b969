"""Stages as TorchX AppDefs: one role, ``python -m torch.distributed.run`` around ``nightjar worker``."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING

from pipeline.config import Config

if TYPE_CHECKING:
    from torchx.specs import AppDef

DISTRIBUTED = ("train", "evaluate")
MARGIN_SECONDS = 5  # over what a stage needs to end by itself


def ranks_of(stage: str, config: Config) -> int:
    """Ranks that ``stage`` runs on here: those of all hosts, which this machine acts as, or one."""
    return config.world_size if stage in DISTRIBUTED else 1


def stage_app(stage: str, config: Config, config_url: str, *, columns: int = 0, launcher: int = 0) -> AppDef:
    """The AppDef of one stage of the run whose resolved configuration lies at ``config_url``.

    ``columns``: width of the launcher's terminal, 0 where its output is none; ``launcher``: the process whose end
    ends the ranks, 0 for none. Single-rank stages go through torchrun too, so that all stages start alike.
    """
    worker = ["-m", "pipeline.cli", "worker", stage, config_url, "--columns", str(columns), "--launcher", str(launcher)]
    return _app(f"{config.run}-{stage}", stage, [*_torchrun(stage, config), *worker], _threads(stage, config))


def seconds_to_end(stage: str, config: Config) -> int:
    """How long ranks told to end may take: training ranks write a checkpoint first."""
    return math.ceil(config.checkpoint.grace_seconds if stage == "train" else 0) + MARGIN_SECONDS


def chain_app(name: str, overrides: list[str]) -> AppDef:
    """The AppDef of a whole run: the launcher itself, which starts the stages."""
    return _app(name, "nightjar", ["-m", "pipeline.cli", "run", *overrides], {})


def _app(name: str, role: str, args: list[str], env: dict[str, str]) -> AppDef:
    from torchx.specs import AppDef, Role

    # TorchX substitutes ${macros} in arguments; a literal dollar is written twice.
    arguments = [argument.replace("$", "$$") for argument in args]
    return AppDef(name=name, roles=[Role(name=role, image="", entrypoint=sys.executable, args=arguments, env=env)])


def _torchrun(stage: str, config: Config) -> list[str]:
    """Arguments of torchrun on this machine. Output of ranks other than 0 goes to files, not to the terminal."""
    ranks = ranks_of(stage, config)
    redirects = ["--redirects", ",".join(f"{rank}:3" for rank in range(1, ranks))] if ranks > 1 else []
    return [
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--shutdown-timeout", str(seconds_to_end(stage, config)), "--nproc-per-node", str(ranks), *redirects,
    ]  # fmt: skip


def _threads(stage: str, config: Config) -> dict[str, str]:
    """Threads of the native libraries: all cores shared among the ranks, or what ``train.threads_per_rank`` says."""
    ranks = ranks_of(stage, config)
    own = config.train.threads_per_rank if stage in DISTRIBUTED else None
    return {"OMP_NUM_THREADS": str(own or max(1, (os.cpu_count() or 1) // ranks))}
