"""``nightjar plan-diff`` and ``widths``: their arguments, and where their results become text."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, on_store, tell
from pipeline.core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.planning.inputs import PlanInputs

PLAN_DIFF = """\
Name a plan by its run, by its key in the store (or a prefix of it), or by the path of a plan.json.

  nightjar plan-diff monday tuesday                  the plans of two runs
  nightjar plan-diff 3f9a 81c2 --store s3://models   by key
  nightjar plan-diff old/plan.json tuesday --json
"""
WIDTHS = """\
Takes the overrides of nightjar run. Reads the dataset (nightjar ingest), prints a width for each table and the override
that sets them. Tables whose rows are read often get model.embedding_dim, the others less, until all of them take
--share of the bytes. Put the widths into your configuration: they must stay the same from night to night.

  nightjar widths experiment=demo --share 0.5
"""
# Overrides that select the dataset, which are all that the ingest command of a hint needs.
DATA_KEYS = ("experiment", "data", "ingest", "seed", "store")


def _add_plan_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="the plan before")
    parser.add_argument("second", metavar="B", help="the plan after")
    on_store(parser, _plan_diff)


def _add_widths_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "nightjar widths [key=value ..] [--share SHARE] [--json] [--config-dir DIR]"
    share = "of the bytes that one width takes, at most (default: 0.5)"
    parser.add_argument("--share", type=float, default=0.5, help=share)
    parser.add_argument("--json", action="store_true", help="print the widths as JSON")
    add_config_dir(parser)
    parser.set_defaults(function=_widths)


def _widths(options: argparse.Namespace) -> int:
    from pipeline.planning.width_choice import shown, widths

    if not 0 < options.share <= 1:
        raise ConfigError(f"--share {options.share:g}, expected a share above 0 and at most 1", hint="--share 0.5")
    _, inputs = planned_for(options.overrides, options.config_dir)
    chosen = widths(inputs, options.share)
    rows = {table.name: table.rows for table in inputs.schema.tables}
    tell(options.json, {**asdict(chosen), "override": chosen.override}, lambda _: "\n".join(shown(chosen, rows)))
    return 0


def _plan_diff(options: argparse.Namespace) -> int:
    from pipeline.planning.plandiff import find_plan, plan_diff
    from pipeline.report.planning import difference
    from pipeline.store.artifacts import Store

    store = Store(options.store)
    tell(options.json, plan_diff(find_plan(store, options.first), find_plan(store, options.second)), difference)
    return 0


def planned_for(job: list[str], config_dir: str | None, *, timed: bool = False) -> tuple[Config, PlanInputs]:
    """Compose ``job``; return its configuration and what a planner takes.

    Args:
        timed: Hardware speeds matter, so measure those of this machine if they are unknown.

    Raises:
        ArtifactError: The dataset is missing; the hint is the command that makes it.
    """
    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.config.compose import compose
    from pipeline.planning.inputs import PlanInputs
    from pipeline.stages.stage_inputs import with_batch, with_former_batch
    from pipeline.stages.steps import planning_inputs
    from pipeline.store.artifacts import Store

    config = compose(job, config_dir)
    store = Store(config.store)
    try:
        schema, profile = planning_inputs(config, store)
    except ArtifactError as error:
        # Keep only the overrides that select the dataset; ingestion needs no others.
        words = ["nightjar ingest"]
        if config_dir is not None:
            words.append(f"-cd {shlex.quote(config_dir)}")
        for text in job:
            if text.lstrip("+~").partition("=")[0].partition(".")[0] in DATA_KEYS:
                # A shell would split, expand or substitute a word with one of these characters.
                words.append(f"'{text}'" if set(text) & set(" []{}$*?'\"") else text)
        raise ArtifactError(error.message, hint=" ".join(words)) from None
    config = with_batch(with_former_batch(config, store), schema.rows.get("train", 0))
    if timed:
        config = with_figures(config)
    return config, PlanInputs.of(config, schema, profile)


COMMANDS = (
    Command(
        "widths",
        "choose widths of tables by how often their rows are read",
        _add_widths_arguments,
        WIDTHS,
        composes=True,
    ),
    Command(
        "plan-diff",
        "show what moved from plan A to plan B, and why",
        _add_plan_diff_arguments,
        PLAN_DIFF,
        takes_store=True,
    ),
)
