"""What the stage components share: compose the configuration, write the run's records, return the AppDef."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.errors import NightjarError

if TYPE_CHECKING:
    from torchx.specs import AppDef


def stage_component(stage: str, overrides: Sequence[str], nproc: int = 0) -> AppDef:
    """The AppDef of ``stage`` for ``overrides``; ``nproc`` ranks per host, 0 for what the hardware says.

    Ends the process with the error's exit code and message for a wrong override or missing input.
    """
    from pipeline.compose import compose
    from pipeline.launch.appdefs import stage_app
    from pipeline.launch.status import clear_report
    from pipeline.records.step import run_directory
    from pipeline.stages.steps import prepare
    from pipeline.store import Store

    ranks = [f"hardware.ranks_per_host={nproc}"] if nproc else []
    try:
        config = compose([*overrides, *ranks, f"stages=[{stage}]"])
        store = Store(config.store)
        step = next(step for step in prepare(config, store) if step.name == stage)
        for name, path in step.inputs.items():
            store.get(path, name)
        clear_report(store, str(config.run), stage)
    except NightjarError as error:
        sys.stderr.write(f"nightjar: {error}\n")
        sys.exit(error.exit_code)
    return stage_app(stage, config, store.url_of(f"{run_directory(str(config.run))}/config.yaml"))
