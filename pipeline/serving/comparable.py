"""Compares records of ``transforms.json`` to tell whether a dataset's rows show what another model would see of them.

They do not if features come from another column: one with another name or, in a log without a header, at another
position. They do not if the events of a sequence were chosen in another way or have other ages, if text was read in
another way, or if rows that the model would score are in quarantine. The data cannot tell a column that the log renamed
from another column. The operator can, by ``checkpoint.allow``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pipeline.config.checkpoint import is_allowed
from pipeline.config.renamed import parse_recorded
from pipeline.config.sequences import event_feature
from pipeline.ingest.schema import CRITEO_COLUMNS, QUOTE
from pipeline.store.artifacts import Store

# Settings that apply to all values first, with the defaults for records that lack them.
_READING: dict[str, Any] = {"missing": [], "strip": False, "decimal": "."}
# Settings of reading that another log may need although its ids are the same.
_OF_LOGS = ("strip", "quote")
_CLOCK = {"row_time": "timestamp", "time_zone": "time_zone", "time_format": "time_format"}
# Settings of a history, and whether they name a column.
_HISTORY = {"by": True, "days": False, "where": True, "lag_minutes": False}
_ALLOW_COLUMNS = "checkpoint.allow=[data.columns]"
_QUALITY = "quality.json"
# Settings that make ingestion refuse rows.
_LIMITS = {"dense": ("min", "max", "required"), "sparse": ("required",)}
_SAME_LABEL = "the label is the same"


def differences(
    store: Store, dataset: str, version: str, now: Mapping[str, Any], then: Mapping[str, Any], allow: Collection[str]
) -> Iterator[str]:
    """Yield the reasons why the version cannot be judged on the dataset's rows.

    Args:
        store: Where both are.
        dataset: Path of the dataset that has the rows.
        version: Path of the version.
        now: ``transforms.json`` of the dataset.
        then: That of the version, which needs no feature and no sequence that the dataset lacks.
        allow: ``checkpoint.allow``: settings that differ because the log changed, not what is read from it.
    """
    # The columns of a cross and of a sequence are compared elsewhere.
    for group in ("dense", "sparse"):
        for name, record in then[group].items():
            current = now[group][name]
            if current.get("cross") or record.get("cross") or record.get("sequence"):
                continue
            columns = current.get("column"), record.get("column")
            if None not in columns:
                what = f"feature {name!r} is read from column"
                yield from _compare(f"data.{group}.{name}.column", what, *columns, allow)

    now_data, then_data = _data_settings(store, dataset), _data_settings(store, version)
    now_tasks, then_tasks = now_data.get("tasks") or {}, then_data.get("tasks") or {}
    if now_data and then_data and not is_allowed("data.columns", allow):
        yield from _compare_places(_columns_by_place(now_data), _columns_by_place(then_data), then, then_tasks)

    now_sequences, then_sequences = now.get("sequences", {}), then.get("sequences", {})
    for name, group in then_sequences.get("groups", {}).items():
        current = now_sequences["groups"][name]
        histories = _history(now_data, name, current), _history(then_data, name, group)
        yield from _compare_sequence(name, current, group, *histories, allow)
    yield from _compare_clock(now_sequences, then_sequences, allow)

    texts = []
    for name, default in _READING.items():
        texts.append((name, now.get(name, default), then.get(name, default)))
    texts.append(("quote", _quote(now_data, now), _quote(then_data, then)))
    for name, current, former in texts:
        if current == former or (name == "missing" and set(current) == set(former)):
            continue
        if name in _OF_LOGS:
            yield from _compare(f"data.{name}", f"data.{name} is", current, former, allow, "the ids are the same")
        else:
            yield f"data.{name} is {current!r} in the dataset, {former!r} in the model"

    now_label, then_label = now.get("label", {}), then.get("label", {})
    for name in ("column", "positive", "negative"):
        setting = f"data.label.{name}"
        if name in now_label and name in then_label:
            yield from _compare(setting, f"{setting} is", now_label[name], then_label[name], allow, _SAME_LABEL)
    for task in sorted(then_tasks.keys() & now_tasks.keys()):
        defaults = {"column": task, "kind": "binary", "given": None, "positive": "1", "negative": "0"}
        for name, default in defaults.items():
            setting = f"data.tasks.{task}.{name}"
            current, former = now_tasks[task].get(name) or default, then_tasks[task].get(name) or default
            yield from _compare(setting, f"{setting} is", current, former, allow, _SAME_LABEL)
    yield from _refused_rows(store, dataset, now, then)


def _compare(
    setting: str, what: str, now: Any, then: Any, allow: Collection[str], same: str = "the log renamed it"
) -> Iterator[str]:
    if now != then and not is_allowed(setting, allow):
        yield f"{what} {now!r} in the dataset, {then!r} in the model; if {same}, checkpoint.allow=[{setting}] says so"


def _data_settings(store: Store, path: str) -> Mapping[str, Any]:
    # Returns group ``data`` of a version's or dataset's settings: records of earlier releases do not say everything.
    if store.exists(f"{path}/config.yaml"):
        with store.open(f"{path}/config.yaml") as source:
            config: Mapping[str, Any] = parse_recorded(source.read().decode())
    else:
        artifact, config = store.find(path), {}
        if artifact is not None:
            config = artifact.config
    data: Mapping[str, Any] = config.get("data", {})
    return data


def _columns_by_place(data: Mapping[str, Any]) -> list[str]:
    # Returns the names that the settings give the columns of a log without a header; [] for any other log.
    if data.get("format") == "criteo":
        return data.get("columns") or CRITEO_COLUMNS
    if data.get("messages") != "csv" and data.get("header", True):
        return []
    return data.get("columns") or []


def _compare_places(
    now: Sequence[str], then: Sequence[str], record: Mapping[str, Any], tasks: Mapping[str, Any]
) -> Iterator[str]:
    # Yields the columns that features or labels of the model are read from and that have moved within a line. If
    # only one of the logs has a header, nobody can tell.
    if bool(now) != bool(then):
        ways = ("by their names", "by their places")
        what = f"columns are told apart {ways[bool(now)]} in the dataset, {ways[bool(then)]} in the model"
        yield f"{what}; if they are the same, {_ALLOW_COLUMNS} says so"
        return
    read = {record.get("label", {}).get("column")}
    for name, task in tasks.items():
        read.add(task.get("column") or name)
    for feature in (*record["dense"].values(), *record["sparse"].values()):
        read |= {feature.get("column"), feature.get("weights"), *(feature.get("cross") or ())}
    for group in record.get("sequences", {}).get("groups", {}).values():
        history = group.get("history") or {}
        read |= {history.get("by"), history.get("where"), *history.get("of", {}).values()}
        for source in (*group["columns"].values(), group["time"]):
            # The time is None where the events have none.
            if source:
                read.add(source["column"])
    for column in then:
        if column in read and column in now and now.index(column) != then.index(column):
            today = f"column {1 + now.index(column)} of the lines in the dataset"
            what = f"{column!r} is {today}, {1 + then.index(column)} in the model"
            yield f"{what}; if the log has other columns or another order now, {_ALLOW_COLUMNS} says so"


def _compare_sequence(
    name: str,
    now: Mapping[str, Any],
    then: Mapping[str, Any],
    now_history: Mapping[str, Any],
    then_history: Mapping[str, Any],
    allow: Collection[str],
) -> Iterator[str]:
    path = f"data.sequences.{name}"
    if now["max_length"] < then["max_length"]:
        events = f"{now['max_length']} events in the dataset, {then['max_length']} in the model"
        yield f"sequence {name!r} has up to {events}"
    for key, names_column in _HISTORY.items():
        current, former = now_history.get(key), then_history.get(key)
        what = f"history.{key} of sequence {name!r} is"
        if names_column and None not in (current, former):
            yield from _compare(f"{path}.history.{key}", what, current, former, allow)
        elif current != former:
            yield f"{what} {current!r} in the dataset, {former!r} in the model"
    # Records of earlier releases do not say which columns of the log a history is of.
    now_of, then_of = now_history.get("of") or {}, then_history.get("of") or {}
    if not (now_of and then_of):
        now_of = then_of = {}
    now_sources, then_sources = _event_sources(name, now, now_of), _event_sources(name, then, then_of)
    for key, column in then_sources.items():
        yield from _compare(f"{path}.{key}", f"{path}.{key} is", now_sources.get(key, column), column, allow)


def _event_sources(name: str, group: Mapping[str, Any], of_log: Mapping[str, str]) -> dict[str, str]:
    # Returns the columns of the events, by the setting below data.sequences.<name> that names them.
    prefix = event_feature(name, "")
    given = {}
    for feature, source in group["columns"].items():
        given[f"features.{feature.removeprefix(prefix)}.column"] = source
    if group["time"] is not None:
        given["time"] = group["time"]
    sources = {}
    for key, source in given.items():
        sources[key] = str(source["column"])
        # In a list of structs, the field says where in the struct the value is.
        if source.get("field"):
            sources[key] = f"{source['column']}.{source['field']}"
    for feature, column in of_log.items():
        sources[f"features.{feature}.column"] = column
    return sources


def _history(data: Mapping[str, Any], name: str, group: Mapping[str, Any]) -> Mapping[str, Any]:
    # Returns how a sequence was built from the log; {} if the log had the sequence itself.
    if "history" in group:
        recorded: Mapping[str, Any] = group["history"] or {}
        return recorded
    history: Mapping[str, Any] = data.get("sequences", {}).get(name, {}).get("history") or {}
    return history if history.get("by") else {}


def _quote(data: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    # Returns the character that may surround fields. Records of earlier releases lack it; for CSV, the settings say it.
    quote: str | None = QUOTE
    if "quote" in record:
        quote = record["quote"]
    elif "csv" in (data.get("format"), data.get("messages")):
        quote = data.get("quote", QUOTE)
    return quote


def _compare_clock(now: Mapping[str, Any], then: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    # Compares the settings by which the ages of events are counted, if the model's events have times.
    if all(group["time"] is None for group in then.get("groups", {}).values()):
        return
    for name, key in _CLOCK.items():
        # Records of earlier releases lack some names. One without ``time_format`` simply had no format.
        if name == "time_format" or (name in now and name in then):
            what = f"data.{key}, by which the ages of events are counted, is"
            yield from _compare(f"data.{key}", what, now.get(name), then.get(name), allow, "the times are the same")


def _refused_rows(store: Store, dataset: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    # Yields the limits and new features that put rows in quarantine although the model would score them.
    limits, added = [*_narrower_limits(now, then)], [*_added_columns(now, then)]
    quarantine = {}
    if (limits or added) and store.exists(f"{dataset}/{_QUALITY}"):
        quarantine = store.read_json(f"{dataset}/{_QUALITY}")["quarantine"]
    columns = quarantine.get("columns")
    rows = "rows that the model would score are in quarantine"
    for setting, column, current, former in limits:
        if columns is None or columns.get(column):
            yield f"{setting} is {current} in the dataset, {former} in the model: {rows}"
    for setting, column in added:
        # Earlier releases did not record the columns, so any row in quarantine counts.
        refused = columns.get(column) if columns is not None else quarantine.get("rows")
        if refused:
            yield f"{setting}, which the model does not have, is read from column {column!r}: {rows}"


def _added_columns(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # Yields new features, each with a column whose values they may refuse and the model does not.
    for group in ("dense", "sparse"):
        for name in sorted(now[group].keys() - then[group].keys()):
            added = now[group][name]
            read = {added.get("column"), added.get("weights"), *(added.get("cross") or ())} - {None, ""}
            for former in then[group].values():
                if not _refuses_other_values(group, added, former):
                    read.discard(former.get("column"))
            for column in sorted(read):
                yield f"data.{group}.{name}", column
    then_groups = then.get("sequences", {}).get("groups", {})
    for name, group in now.get("sequences", {}).get("groups", {}).items():
        former = then_groups.get(name, {"columns": {}, "time": None})
        sources = set()
        for feature, source in group["columns"].items():
            if feature not in former["columns"] and source:
                sources.add(source["column"])
        if group["time"] != former["time"] and group["time"]:
            sources.add(group["time"]["column"])
        for column in sorted(sources):
            yield f"data.sequences.{name}", column


def _refuses_other_values(group: str, added: Mapping[str, Any], former: Mapping[str, Any]) -> bool:
    # Whether feature ``added`` may refuse values of a column that ``former``, read from the same one, accepts.
    for limit in (*_LIMITS[group], "integer"):
        if _refuses_more(limit, added.get(limit), former.get(limit)):
            return True
    numbers = "bounds" in added and "bounds" not in former
    return numbers or bool(added.get("cross_bins")) or added.get("width", 1) != former.get("width", 1)


def _narrower_limits(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    # Yields the settings that may refuse more rows today, with their column and their values now and then.
    for group, limits in _LIMITS.items():
        for name, former in then[group].items():
            current = now[group][name]
            names = [*limits]
            # Only for bins is ``integer`` a limit. For other ids it changes what they are.
            if group == "sparse" and "bounds" in current:
                names.append("integer")
            for limit in names:
                values = current.get(limit), former.get(limit)
                if _refuses_more(limit, *values):
                    yield f"data.{group}.{name}.{limit}", current.get("column", ""), *values
    now_groups = now.get("sequences", {}).get("groups", {})
    for name, former in then.get("sequences", {}).get("groups", {}).items():
        current = now_groups[name]
        if current["time"] and former["time"] and former.get("drop_leaks") and not current.get("drop_leaks"):
            yield f"data.sequences.{name}.leaks", current["time"]["column"], "quarantine", "drop"


def _refuses_more(limit: str, now: Any, then: Any) -> bool:
    # Whether the limit ``now`` refuses values that ``then`` lets through; None refuses none.
    if limit in ("required", "integer"):
        return bool(now) and not then
    if now is None or now == then:
        return False
    if then is None:
        return True
    return bool(now > then if limit == "min" else now < then)
