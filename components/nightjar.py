"""TorchX components: ``torchx run -s local_cwd components/nightjar.py:train --nproc 2 -- <overrides>``.

``chain`` is the whole run, ``stage`` any registered stage by its name. The stages of Nightjar itself have a component
each, because TorchX reads names, arguments and help from the source of this file.
"""

import sys

from torchx.specs import AppDef


def chain(*overrides: str, name: str = "nightjar") -> AppDef:
    """The whole run: the launcher, which starts the stages one after another.

    Args:
        overrides: Hydra overrides, behind ``--``
        name: name of the TorchX app
    """
    from pipeline.launch.appdefs import chain_app

    return chain_app(name, list(overrides))


def stage(*overrides: str, name: str, nproc: int = 0) -> AppDef:
    """One stage of a run, whose input artifacts are committed.

    Args:
        overrides: Hydra overrides, behind ``--``
        name: the stage
        nproc: ranks on this host; 0: what the hardware group says
    """
    from pipeline.compose import compose
    from pipeline.errors import NightjarError
    from pipeline.launch.appdefs import stage_app
    from pipeline.launch.status import clear_report
    from pipeline.records.step import run_directory
    from pipeline.stages.steps import prepare
    from pipeline.store import Store

    ranks = [f"hardware.ranks_per_host={nproc}"] if nproc else []
    try:
        config = compose([*overrides, *ranks, f"stages=[{name}]"])
        store = Store(config.store)
        step = next(step for step in prepare(config, store) if step.name == name)
        for input_stage, path in step.inputs.items():
            store.get(path, input_stage)
        clear_report(store, str(config.run), name)
    except NightjarError as error:
        sys.stderr.write(f"nightjar: {error}\n")
        sys.exit(error.exit_code)
    return stage_app(name, config, store.url_of(f"{run_directory(str(config.run))}/config.yaml"))


def ingest(*overrides: str) -> AppDef:
    """Raw click logs to a training dataset.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage(*overrides, name="ingest")


def plan(*overrides: str) -> AppDef:
    """A sharding plan for a committed dataset on the hardware.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage(*overrides, name="plan")


def partition(*overrides: str) -> AppDef:
    """Towers of features and the plan on their hosts.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage(*overrides, name="partition")


def train(*overrides: str, nproc: int = 0) -> AppDef:
    """Trains the model on a committed dataset, by its committed plan.

    Args:
        overrides: Hydra overrides, behind ``--``
        nproc: ranks on this host; 0: what the hardware group says
    """
    return stage(*overrides, name="train", nproc=nproc)


def evaluate(*overrides: str, nproc: int = 0) -> AppDef:
    """Figures of the trained model on held-out rows.

    Args:
        overrides: Hydra overrides, behind ``--``
        nproc: ranks on this host; 0: what the hardware group says
    """
    return stage(*overrides, name="evaluate", nproc=nproc)


def publish(*overrides: str) -> AppDef:
    """The gate's verdict, and the published version.

    Args:
        overrides: Hydra overrides, behind ``--``
    """
    return stage(*overrides, name="publish")
