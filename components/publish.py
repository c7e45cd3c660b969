"""``torchx run -s local_cwd components/publish.py:publish -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def publish(*overrides: str) -> AppDef:
    """The gate's verdict, and the published version.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage_component("publish", overrides, 1)
