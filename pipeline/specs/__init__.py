"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""

from pipeline.specs.registry import Registry
from pipeline.specs.stage import Stage

STAGES: Registry[Stage] = Registry("stage", setting="stages", home="pipeline.stages")


def default_stages() -> list[str]:
    """The stages that run where ``stages`` names none."""
    return [stage.name for stage in STAGES if stage.by_default]
