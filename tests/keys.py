"""Which settings every key covers, by the lists of the stages."""

from typing import Any

from pipeline.config import Config
from pipeline.config.renamed import with_first_names
from pipeline.specs import STAGES
from pipeline.specs.stage import Use
from pipeline.stages.train import CHECKPOINTS, continuation_settings

INPUTS = {stage.name: stage.inputs for stage in STAGES}
LISTS: dict[str, tuple[Use, ...]] = {
    name: stage.settings if name == stage.name else uses for stage in STAGES for name, uses in stage.keys().items()
}
KEYS = tuple(LISTS)


def key_config(key: str, config: Config) -> dict[str, Any]:
    """The part of ``config`` that ``key`` covers: of a stage's artifact, or of a training's checkpoints."""
    if key == CHECKPOINTS:
        return continuation_settings(config)
    return with_first_names(STAGES.get(key).key_settings(config))


def uses(key: str, config: Config) -> list[Use]:
    """The lines that hold for ``key`` under ``config``."""
    return [use for use in LISTS[key] if use.when(config)]
