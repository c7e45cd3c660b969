"""``torchx run -s local_cwd components/ingest.py:ingest -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def ingest(*overrides: str) -> AppDef:
    """Raw click logs to a training dataset.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage_component("ingest", overrides)
