"""``torchx run -s local_cwd components/evaluate.py:evaluate --nproc 2 -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def evaluate(*overrides: str, nproc: int = 0) -> AppDef:
    """Figures of the trained model on the held-out rows.

    Args:
        overrides: Hydra overrides, behind ``--``
        nproc: ranks on this host; 0: what the hardware group says
    """
    return stage_component("evaluate", overrides, nproc)
