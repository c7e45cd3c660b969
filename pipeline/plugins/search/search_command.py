"""``nightjar search``: its arguments, and where its result becomes text."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pipeline.cli.commands.command import Command, add_config_dir, complain, progress, show, tell
from pipeline.core.errors import ConfigError, exit_code_of
from pipeline.core.logs import add_level

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.plugins.search.learning import SearchStore
    from pipeline.records.search import SearchRecord
    from pipeline.store.artifacts import Store

SEARCH = """\
Takes the overrides of nightjar run. The model that they describe is the largest one; the search leaves out of it what
the clicks do not need: columns of tables, pairs of features, layers and their widths. It writes searches/<name> into
the store: best.yaml (an experiment with the model found), search.json and report.html. A search that was stopped or
killed goes on where it was: run the same command again.

  nightjar search experiment=demo search=first
  nightjar search experiment=demo search=small search.cost=0.03 search.memory=0.03
  nightjar search experiment=demo search.parts=[widths]
"""
_KEY = "search="
SEARCHING = "searching"  # folder of running searches: lock and state of each
log = logging.getLogger(__name__)


def add_search(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = SEARCH, argparse.RawDescriptionHelpFormatter
    parser.usage = "nightjar search [search=NAME] [key=value ..] [--json] [--config-dir DIR]"
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_config_dir(parser)
    add_level(parser)
    parser.set_defaults(function=_search)


def _search(options: argparse.Namespace) -> int:
    from pipeline.config.compose import compose
    from pipeline.config.fields import check_name
    from pipeline.core.package_versions import require_triple
    from pipeline.launch.locks import folder_lock
    from pipeline.launch.signals import Interrupted, handled
    from pipeline.plugins.search.search_page import search_text
    from pipeline.records.search import search_directory
    from pipeline.store.artifacts import Store

    # Hydra would take ``search=first`` for an option of the group ``search``; here it is short for search.name=first.
    given = []
    for text in options.overrides:
        given.append(f"search.name={text.removeprefix(_KEY)}" if text.startswith(_KEY) else text)
    config = compose(given, options.config_dir)
    name = config.search.name or str(config.run)
    check_name("search", name, "first")
    config = replace(config, search=replace(config.search, name=name))
    require_triple()
    store = Store(config.store)
    store.answers()
    # This imports torch, which takes seconds, so all quick checks come first.
    from pipeline.plugins.search.learning import SearchStore

    kept = SearchStore(store, f"{SEARCHING}/{name}", _key(config))
    hint = "run the same command again once that one has ended, or search=<another name>"
    try:
        with handled(), folder_lock(store, kept.folder, f"search {name!r}", config.launch.lease_seconds, hint=hint):
            # Look it up under the lock, so that a search that has just ended is found and not run again.
            record = _found(config, store) or _searched(config, store, given, options, kept)
            # Remove the state only after the result is committed: after a kill before this line both exist, and the
            # result is found.
            kept.remove()
    except Interrupted as stop:
        return complain(f"{stop}: the same command goes on with the search", exit_code_of(stop))
    tell(options.json, record, search_text)
    if not options.json:
        show(f"\nlook at {store.url_of(search_directory(name))}: best.yaml, report.html")
    return 0


def _key(config: Config) -> str:
    """Return a key that equal searches share."""
    from pipeline.config.compose import config_hash
    from pipeline.store.manifest import artifact_key

    settings = {**asdict(config.search), "config": config_hash(config), "parts": list(config.search.parts)}
    return artifact_key("search", settings, {})


def _found(config: Config, store: Store) -> SearchRecord | None:
    """Return the record of an equal search; ConfigError if another search has the name."""
    from pipeline.records.record import read
    from pipeline.records.search import SearchRecord, search_directory

    name = str(config.search.name)
    done = store.find(search_directory(name))
    if done is None or config.force:
        return None
    if done.key != _key(config):
        raise ConfigError(
            f"search {name!r} is in the store already, with other settings", hint="search=<another name>, or force=true"
        )
    log.info("search %s is done already; force=true searches again", name)
    return read(SearchRecord, store, f"{done.path}/{SearchRecord.FILE}")


def _searched(
    config: Config, store: Store, overrides: list[str], options: argparse.Namespace, kept: SearchStore
) -> SearchRecord:
    """Ingest if the dataset is missing, search, and write the result."""
    import torch

    from pipeline.calibration.hardware_cache import with_figures
    from pipeline.plugins.search.architecture_space import ArchitectureSpace
    from pipeline.plugins.search.loop import search, warning
    from pipeline.plugins.search.search_page import best_experiment, write_search
    from pipeline.specs.stage import StageIO
    from pipeline.stages.execution import run_stage, with_resolved_batch
    from pipeline.stages.stage_inputs import read_dataset
    from pipeline.stages.steps import steps

    step = steps(config, store, last="ingest")[0]
    if store.find(step.path) is None:
        run_stage(step, config, store, StageIO())
    dataset = store.get(step.path, step.name)
    if config.train.threads_per_rank:
        torch.set_num_threads(config.train.threads_per_rank)
    # Prices need the resolved batch, which may be a share of the rows, and the hardware's figures, which may be
    # measured.
    resolved = with_figures(with_resolved_batch(config, store, dataset))
    space = ArchitectureSpace.of(resolved, *read_dataset(store, dataset))
    log.info("search %s: %d decisions", config.search.name, len(space.decisions))
    record = search(space, store, dataset, progress(options.json, "searching"), kept)
    if message := warning(record, config.search):
        log.warning("%s", message)
    found = space.configured({name: each.chosen for name, each in record.decisions.items()})
    best = best_experiment(record, space.config, found, overrides, options.config_dir)
    write_search(store, record, best, _key(config))
    return record


COMMANDS = (
    Command(
        name="search",
        after="runs",
        help="find widths, layers and interactions that a model can do without",
        add_arguments=add_search,
        composes=True,
    ),
)
