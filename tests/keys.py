"""Which settings every key covers, by the lists of the stages."""

from typing import Any

from pipeline.config import Config
from pipeline.specs import STAGES
from pipeline.specs.stage import Use
from pipeline.stages.train import CHECKPOINTS, CONTINUATION, continuation_settings

INPUTS = {stage.name: stage.inputs for stage in STAGES}
LISTS: dict[str, tuple[Use, ...]] = {**{stage.name: stage.settings for stage in STAGES}, CHECKPOINTS: CONTINUATION}
KEYS = tuple(LISTS)


def key_config(key: str, config: Config) -> dict[str, Any]:
    """The part of ``config`` that ``key`` covers: of a stage's artifact, or of a training's checkpoints."""
    return continuation_settings(config) if key == CHECKPOINTS else STAGES.get(key).key_settings(config)


def covers(use: Use, path: str) -> bool:
    """Whether the setting at ``path`` is one of those of ``use``."""
    parts = path.split(".")

    def fits(pattern: list[str]) -> bool:
        whole = len(pattern) == len(parts) or (len(pattern) < len(parts) and pattern[-1] == "*")
        return whole and all(one in ("*", other) for one, other in zip(pattern, parts, strict=False))

    return any(fits(each.split(".")) for each in use.paths)


def uses(key: str, config: Config) -> list[Use]:
    """The lines that hold for ``key`` under ``config``."""
    return [use for use in LISTS[key] if use.when(config)]
