"""``torchx run -s local_cwd components/partition.py:partition -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def partition(*overrides: str) -> AppDef:
    """Towers of features (flat: none).

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage_component("partition", overrides)
