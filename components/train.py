"""``torchx run -s local_cwd components/train.py:train --nproc 2 -- <overrides>``."""

from torchx.specs import AppDef

from components.shared import stage_component


def train(*overrides: str, nproc: int = 0) -> AppDef:
    """Trains the model on a committed dataset, by its committed plan.

    Args:
        overrides: Hydra overrides, behind ``--``
        nproc: ranks on this host; 0: what the hardware group says
    """
    return stage_component("train", overrides, nproc)
