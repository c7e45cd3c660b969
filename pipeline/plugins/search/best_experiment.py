"""What a search leaves: ``best.yaml``, an experiment with the model found; ``search.json``; and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from pipeline.config import Config
from pipeline.config.compose.experiment import experiment_file
from pipeline.plugins.search.search_page import search_page
from pipeline.records.search import SearchRecord, search_directory
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

BEST, PAGE = "best.yaml", "report.html"


def write_search(store: Store, record: SearchRecord, best: str, key: str) -> Artifact:
    """Commit the record, the page and ``best``, the text of the experiment, in the place of an earlier search.

    ``key``: what equal searches have in common.
    """
    path = search_directory(record.name)
    inputs = {"ingest": record.dataset.rpartition("/")[2]}
    with store.draft(path, kind="search", key=key, config={}, inputs=inputs) as draft:
        draft.write_json(SearchRecord.FILE, record.to_json())
        for name, text in ((BEST, best), (PAGE, search_page(record))):
            with draft.open(name) as sink:
                sink.write(text.encode())
        return draft.commit({"before_ms": record.before.step_ms, "after_ms": record.after.step_ms})


def best_experiment(
    record: SearchRecord, config: Config, found: Config, overrides: Sequence[str], config_dir: str | None
) -> str:
    """The text of an experiment: ``overrides``, which compose to ``config``, with what is different in ``found``."""
    about = [
        f"Found by nightjar search (search={record.name}); put it into my/experiment/<name>.yaml:",
        "  nightjar run experiment=<name>",
        f"Predicted: {record.after.step_ms:.3f} ms a step, before {record.before.step_ms:.3f}; tables of "
        f"{record.after.total:,} bytes, before {record.before.total:,}.",
    ]
    head, _, body = experiment_file(overrides, config_dir, about).partition("\n\n")
    settings = _merged(yaml.safe_load(body) or {}, _changes(config, found))
    return f"{head.rstrip()}\n\n{yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)}"


def _changes(before: Any, after: Any) -> dict[str, Any]:
    """What ``after`` has that ``before`` has not, as nested settings; both are groups, or dictionaries of them."""
    changes: dict[str, Any] = {}
    for name, value in _entries(after).items():
        former = _entries(before).get(name)
        if isinstance(value, Mapping) or is_dataclass(value):
            inner = _changes(_new(value) if former is None else former, value)
            changes |= {name: inner} if inner else {}
        elif value != former:
            changes[name] = value
    return changes


def _new(like: Any) -> Any:
    """An entry at its defaults."""
    return type(like)()


def _entries(of: Any) -> Mapping[str, Any]:
    return of if isinstance(of, Mapping) else {each.name: getattr(of, each.name) for each in fields(of)}


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in changes.items():
        former = merged.get(name)
        merged[name] = _merged(former, value) if isinstance(value, Mapping) and isinstance(former, Mapping) else value
    return merged
