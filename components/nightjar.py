"""``torchx run -s local_cwd components/nightjar.py:chain -- <overrides>``."""

from torchx.specs import AppDef


def chain(*overrides: str, name: str = "nightjar") -> AppDef:
    """The whole run: the launcher, which starts the stages one after another.

    Args:
        overrides: Hydra overrides, behind ``--``
        name: name of the TorchX app
    """
    from pipeline.launch.appdefs import chain_app

    return chain_app(name, list(overrides))
