"""Whether rows of a dataset show what another model would see of them, by the records of ``transforms.json``.

They do not where features come from another column, be it one of another name or, in a log without a header, at
another place. They do not where the events of a sequence were chosen in another way or have other ages, where text was
read in another way, or where rows are in quarantine that the model would score. The data cannot tell a column that the
log renamed from another column. The operator can, by ``checkpoint.allow``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from pipeline.config.checkpoint import is_allowed
from pipeline.config.sequences import event_feature
from pipeline.ingest.schema import CRITEO_COLUMNS, QUOTE
from pipeline.store.artifacts import Store

# What all values go through before they are looked at, and what stands for a setting that a record does not have.
_READING: dict[str, Any] = {"missing": [], "strip": False, "decimal": "."}
_OF_LOGS = ("strip", "quote")  # settings of reading that another log may ask for whose ids are the same
_CLOCK = {"row_time": "timestamp", "time_zone": "time_zone", "time_format": "time_format"}
_HISTORY = {"by": True, "days": False, "where": True, "lag_minutes": False}  # whether it names a column
_ALLOW_COLUMNS = "checkpoint.allow=[data.columns]"
_QUALITY = "quality.json"
_LIMITS = {"dense": ("min", "max", "required"), "sparse": ("required",)}  # settings by which rows are refused


def differences(
    store: Store, dataset: str, version: str, now: Mapping[str, Any], then: Mapping[str, Any], allow: Collection[str]
) -> Iterator[str]:
    """Yield why the version cannot be judged on the dataset's rows.

    Args:
        store: Where both are.
        dataset: Path of the dataset that has the rows.
        version: Path of the version.
        now: ``transforms.json`` of the dataset.
        then: That of the version, which needs no feature and no sequence that the dataset lacks.
        allow: ``checkpoint.allow``: settings that differ because the log changed, not what is read from it.
    """
    yield from _columns(now, then, allow)
    settings, others = _data(store, dataset), _data(store, version)
    if settings and others and not is_allowed("data.columns", allow):
        places = _columns_by_place(settings), _columns_by_place(others)
        yield from _places(*places, then, others.get("tasks") or {})
    groups = now.get("sequences", {}).get("groups", {})
    for name, own in then.get("sequences", {}).get("groups", {}).items():
        built = (_history(store, dataset, name, groups[name]), _history(store, version, name, own))
        yield from _sequence(name, groups[name], own, built, allow)
    yield from _clock(now.get("sequences", {}), then.get("sequences", {}), allow)
    texts = [(name, now.get(name, default), then.get(name, default)) for name, default in _READING.items()]
    texts.append(("quote", _quote(store, dataset, now), _quote(store, version, then)))
    for setting, today, other in texts:
        if today == other or (setting == "missing" and set(today) == set(other)):
            continue
        if setting not in _OF_LOGS:
            yield f"data.{setting} is {today!r} in the dataset, {other!r} in the model"
        elif not is_allowed(f"data.{setting}", allow):
            yield _unless(f"data.{setting}", f"data.{setting} is {today!r}", other, "the ids are the same")
    yield from _label(now.get("label", {}), then.get("label", {}), allow)
    yield from _tasks(settings.get("tasks") or {}, others.get("tasks") or {}, allow)
    yield from _refused(store, dataset, now, then)


def _unless(setting: str, today: str, other: Any, same: str = "the log renamed it") -> str:
    return f"{today} in the dataset, {other!r} in the model; if {same}, checkpoint.allow=[{setting}] says so"


def _columns(now: Mapping[str, Any], then: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    """Features that are read from another column. The columns of a cross and of a sequence are compared elsewhere."""
    for group in ("dense", "sparse"):
        for name, record in then[group].items():
            own = now[group][name]
            if own.get("cross") or record.get("cross") or record.get("sequence"):
                continue
            today, other, setting = own.get("column"), record.get("column"), f"data.{group}.{name}.column"
            if None not in (today, other) and today != other and not is_allowed(setting, allow):
                yield _unless(setting, f"feature {name!r} is read from column {today!r}", other)


def _columns_by_place(data: Mapping[str, Any]) -> list[str]:
    """The names that the settings give the columns of a log without a header; [] of any other log."""
    if data.get("format") == "criteo":
        return data.get("columns") or CRITEO_COLUMNS
    by_place = data.get("messages") == "csv" or not data.get("header", True)
    return data.get("columns") or [] if by_place else []


def _read_columns(then: Mapping[str, Any], tasks: Mapping[str, Any]) -> set[str | None]:
    """The columns of a log that a model and its labels are read from."""
    read = {then.get("label", {}).get("column")} | {task.get("column") or name for name, task in tasks.items()}
    for record in (*then["dense"].values(), *then["sparse"].values()):
        read |= {record.get("column"), record.get("weights"), *(record.get("cross") or ())}
    for group in then.get("sequences", {}).get("groups", {}).values():
        history = group.get("history") or {}
        read |= {history.get("by"), history.get("where"), *history.get("of", {}).values()}
        read |= {source["column"] for source in (*group["columns"].values(), group["time"]) if source}
    return read


def _places(
    today: Sequence[str], other: Sequence[str], then: Mapping[str, Any], tasks: Mapping[str, Any]
) -> Iterator[str]:
    """Columns that the model or a label, such as those of its ``tasks``, is read from at another place of a line.

    Nobody can tell where a log has a header and the other one has none.
    """
    if bool(today) != bool(other):
        ways = ("by their names", "by their places")
        what = f"columns are told apart {ways[bool(today)]} in the dataset, {ways[bool(other)]} in the model"
        yield f"{what}; if they are the same, {_ALLOW_COLUMNS} says so"
        return
    read = _read_columns(then, tasks)
    for column in other:
        if column in read and column in today and today.index(column) != other.index(column):
            places = (
                f"column {1 + today.index(column)} of the lines in the dataset, {1 + other.index(column)} in the model"
            )
            yield f"{column!r} is {places}; if the log has other columns or another order now, {_ALLOW_COLUMNS} says so"


def _sequence(
    name: str,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    built: tuple[Mapping[str, Any], Mapping[str, Any]],
    allow: Collection[str],
) -> Iterator[str]:
    """How a row's events of sequence ``name`` differ; ``built``: how each of the two was built from the log."""
    path, (today, other) = f"data.sequences.{name}", built
    if given["max_length"] < own["max_length"]:
        events = f"{given['max_length']} events in the dataset, {own['max_length']} in the model"
        yield f"sequence {name!r} has up to {events}"
    for each, names_column in _HISTORY.items():
        ours, theirs, setting = today.get(each), other.get(each), f"{path}.history.{each}"
        if ours == theirs or (names_column and None not in (ours, theirs) and is_allowed(setting, allow)):
            continue
        what = f"history.{each} of sequence {name!r} is {ours!r}"
        if names_column and None not in (ours, theirs):
            yield _unless(setting, what, theirs)
        else:
            yield f"{what} in the dataset, {theirs!r} in the model"
    of_log = bool(today.get("of") and other.get("of"))  # records of earlier releases do not say
    there, wanted = (
        _sources(name, group, history["of"] if of_log else {}) for group, history in ((given, today), (own, other))
    )
    for setting, column in wanted.items():
        if there.get(setting, column) != column and not is_allowed(f"{path}.{setting}", allow):
            yield _unless(f"{path}.{setting}", f"{path}.{setting} is {there[setting]!r}", column)


def _sources(name: str, group: Mapping[str, Any], of_log: Mapping[str, str]) -> dict[str, str]:
    """Where the events are, by the setting below ``data.sequences.<name>`` that says so."""
    own = event_feature(name, "")
    places = {f"features.{each.removeprefix(own)}.column": _place(source) for each, source in group["columns"].items()}
    if group["time"] is not None:
        places["time"] = _place(group["time"])
    return places | {f"features.{each}.column": column for each, column in of_log.items()}


def _place(source: Mapping[str, Any]) -> str:
    return f"{source['column']}.{source['field']}" if source.get("field") else str(source["column"])


def _history(store: Store, path: str, name: str, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a sequence was built from the log; {} where the log had it."""
    if "history" in group:
        recorded: Mapping[str, Any] = group["history"] or {}
        return recorded
    history: Mapping[str, Any] = _data(store, path).get("sequences", {}).get(name, {}).get("history") or {}
    return history if history.get("by") else {}


def _quote(store: Store, path: str, record: Mapping[str, Any]) -> str | None:
    """What may surround a field of the logs."""
    data = record if "quote" in record else _data(store, path)
    read = "quote" in record or "csv" in (data.get("format"), data.get("messages"))
    quote: str | None = data.get("quote", QUOTE) if read else QUOTE
    return quote


def _data(store: Store, path: str) -> Mapping[str, Any]:
    """The settings ``data`` of a version or a dataset whose record, of an earlier release, does not say everything."""
    if store.exists(f"{path}/config.yaml"):
        with store.open(f"{path}/config.yaml") as source:
            config: Mapping[str, Any] = yaml.safe_load(source.read())
    else:
        artifact = store.find(path)
        config = {} if artifact is None else artifact.config
    data: Mapping[str, Any] = config.get("data", {})
    return data


def _clock(today: Mapping[str, Any], other: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    """Settings by which the ages of events, where the model has some, are other ones."""
    if all(group["time"] is None for group in other.get("groups", {}).values()):
        return
    for name, setting in _CLOCK.items():
        if name != "time_format" and not (name in today and name in other):
            continue  # a record of an earlier release; without a format there is none in any record
        if today.get(name) != other.get(name) and not is_allowed(f"data.{setting}", allow):
            what = f"data.{setting}, by which the ages of events are counted, is {today.get(name)!r}"
            yield _unless(f"data.{setting}", what, other.get(name), "the times are the same")


def _label(today: Mapping[str, Any], other: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    for name in ("column", "positive", "negative"):
        setting = f"data.label.{name}"
        if name in today and name in other and today[name] != other[name] and not is_allowed(setting, allow):
            yield _unless(setting, f"{setting} is {today[name]!r}", other[name], "the label is the same")


def _tasks(today: Mapping[str, Any], other: Mapping[str, Any], allow: Collection[str]) -> Iterator[str]:
    """Further labels, by the settings of both, that say something else than those that the model learned."""
    for name in sorted(other.keys() & today.keys()):
        defaults = {"column": name, "kind": "binary", "given": None, "positive": "1", "negative": "0"}
        for each, default in defaults.items():
            ours, theirs = (tasks[name].get(each) or default for tasks in (today, other))
            setting = f"data.tasks.{name}.{each}"
            if ours != theirs and not is_allowed(setting, allow):
                yield _unless(setting, f"{setting} is {ours!r}", theirs, "the label is the same")


def _refused(store: Store, dataset: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[str]:
    """Limits and new features by which rows are in quarantine that the model would score."""
    limits, added = [*_narrower_limits(now, then)], [*_added_columns(now, then)]
    known = bool(limits or added) and store.exists(f"{dataset}/{_QUALITY}")
    quarantine = store.read_json(f"{dataset}/{_QUALITY}")["quarantine"] if known else {}
    columns = quarantine.get("columns")
    rows = "rows that the model would score are in quarantine"
    for setting, column, today, other in limits:
        if columns is None or columns.get(column):
            yield f"{setting} is {today} in the dataset, {other} in the model: {rows}"
    for setting, column in added:
        if quarantine.get("rows") if columns is None else columns.get(column):
            yield f"{setting}, which the model does not have, is read from column {column!r}: {rows}"


def _added_columns(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Features that the model does not have, each with a column whose values they may refuse and the model does not."""
    for group in ("dense", "sparse"):
        for name in sorted(now[group].keys() - then[group].keys()):
            own = now[group][name]
            read = {own.get("column"), own.get("weights"), *(own.get("cross") or ())} - {None, ""}
            alike = (each for each in then[group].values() if not _refuses_otherwise(group, own, each))
            for column in sorted(read - {each.get("column") for each in alike}):
                yield f"data.{group}.{name}", column
    others = then.get("sequences", {}).get("groups", {})
    for name, group in now.get("sequences", {}).get("groups", {}).items():
        known = others.get(name, {"columns": {}, "time": None})
        sources = [source for each, source in group["columns"].items() if each not in known["columns"]]
        if group["time"] != known["time"]:
            sources.append(group["time"])
        for column in sorted({source["column"] for source in sources if source}):
            yield f"data.sequences.{name}", column


def _refuses_otherwise(group: str, own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether feature ``own`` may refuse values of a column that ``other``, read from the same one, takes."""
    limits = (*_LIMITS[group], "integer")
    if any(_refuses_more(each, own.get(each), other.get(each)) for each in limits):
        return True
    numbers = "bounds" in own and "bounds" not in other
    return numbers or bool(own.get("cross_bins")) or own.get("width", 1) != other.get("width", 1)


def _narrower_limits(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """The settings that may refuse more rows today, the column by which they do, and their values now and then."""
    for group, settings in _LIMITS.items():
        for name, record in then[group].items():
            own = now[group][name]
            binned = group == "sparse" and "bounds" in own  # of other ids ``integer`` changes what they are
            for each in (*settings, "integer") if binned else settings:
                if _refuses_more(each, own.get(each), record.get(each)):
                    yield f"data.{group}.{name}.{each}", own.get("column", ""), own.get(each), record.get(each)
    groups = now.get("sequences", {}).get("groups", {})
    for name, record in then.get("sequences", {}).get("groups", {}).items():
        own = groups[name]
        if own["time"] and record["time"] and record.get("drop_leaks") and not own.get("drop_leaks"):
            yield f"data.sequences.{name}.leaks", own["time"]["column"], "quarantine", "drop"


def _refuses_more(setting: str, today: Any, other: Any) -> bool:
    """Whether the limit ``today`` refuses values that ``other`` lets through; None refuses none."""
    if setting in ("required", "integer"):
        return bool(today) and not other
    if today is None or today == other:
        return False
    return other is None or bool(today > other if setting == "min" else today < other)
