"""``torchx run -s local_cwd components/plan.py:plan -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def plan(*overrides: str) -> AppDef:
    """A sharding plan for the dataset on the hardware.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage_component("plan", overrides)
