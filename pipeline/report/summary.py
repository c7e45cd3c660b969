"""``result.json`` as text: the table at the end of a run, and a small one that compares runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.specs import STAGES

WIDTH = 80
RULE = "-" * WIDTH
NAME = 12


def summary(result: Mapping[str, Any], where: str = "", files: Sequence[str] = ()) -> str:
    """The table at the end of a run, at most 80 columns (``where`` apart, which is never cut); absent parts stay out.

    ``result``: content of ``result.json``. ``where``: URL of the run's directory, ``files``: what to look at there.
    """
    lines = [_title(result), RULE, *_stage_lines(result.get("stages", {})), RULE]
    for stage in STAGES:
        for name, texts in stage.lines(result).items():
            lines += _block(name, texts)
    if result.get("shrunk"):
        lines += _wrapped("hosts", "; ".join(shrunk_lines(result)))
    if "error" in result:
        lines += _wrapped("error", _error_text(result["error"]))
        if hint := result["error"].get("hint"):
            lines += _wrapped("hint", hint)
    if where:
        lines += [RULE, f"{'look at':<{NAME}}{where}/", *_wrapped("", "  ".join(files))]
    return "\n".join(line.rstrip() for line in lines)


def reachable_gain(figures: Mapping[str, Any]) -> float | None:
    """(1 - NE) / (1 - Bayes NE): how much of what could be learned was learned; None where that is not known."""
    ne, bayes = figures.get("ne"), figures.get("bayes_ne")
    if not units.known(ne) or not units.known(bayes) or bayes >= 1:
        return None
    return (1 - ne) / (1 - bayes)


def total_seconds(result: Mapping[str, Any]) -> float:
    """Wall seconds of all stages this run did."""
    return sum(stage.get("seconds") or 0.0 for stage in result.get("stages", {}).values())


def compare(results: Sequence[Mapping[str, Any]], notes: Sequence[str] | None = None) -> str:
    """A table of runs, for a sweep: figures of each, the best NE marked ``*``.

    ``results``: contents of ``result.json`` in the order to show; ``notes``: what is special about each (its
    overrides), shown last. At most 80 columns where there are no notes.
    """
    if not results:
        return "no runs to compare"
    if notes is not None and len(notes) != len(results):
        raise ValueError(f"{len(notes)} notes for {len(results)} results")
    names = [str(result.get("run", units.ABSENT)) for result in results]
    width = min(max(len(name) for name in ["run", *names]), 22)
    best = min((ne for result in results if (ne := _figure(result, "eval", "ne")) is not None), default=None)
    heading = f"{'run':<{width}}  {'status':<8} {'NE':>9} {'AUC':>8} {'log loss':>8} {'samples/s':>10} {'seconds':>8}"
    lines = [heading, "-" * len(heading)]
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        line = _compared(name if len(name) <= width else f"{name[: width - 2]}..", width, result, best)
        lines.append(f"{line}  {notes[index]}" if notes is not None else line)
    return "\n".join(line.rstrip() for line in lines)


def _compared(name: str, width: int, result: Mapping[str, Any], best: float | None) -> str:
    ne = _figure(result, "eval", "ne")
    mark = "*" if ne is not None and ne == best else " "
    return (
        f"{name:<{width}}  {result.get('status', units.ABSENT):<8} {units.decimal(ne, 5):>8}{mark} "
        f"{units.decimal(_figure(result, 'eval', 'auc'), 5):>8} {units.decimal(_figure(result, 'eval', 'logloss')):>8} "
        f"{units.count(_figure(result, 'train', 'samples_per_s')):>10} {total_seconds(result):>8.1f}"
    )


def _figure(result: Mapping[str, Any], part: str, key: str) -> float | None:
    value = result.get(part, {}).get(key)
    return value if units.known(value) else None


def _title(result: Mapping[str, Any]) -> str:
    status, held = result.get("status", "unknown"), result.get("gate", {}).get("verdict") == "HOLD"
    ended = {"failed": "held by the gate after" if held else "failed after"}.get(status, f"{status} in")
    return f"run {result.get('run', units.ABSENT)}: {ended} {units.duration(total_seconds(result))}"


def _stage_lines(stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not stages:
        return ["no stage ran"]
    lines = [f"{'stage':<{NAME}}{'status':<9}{'seconds':>9}  artifact"]
    for name, stage in stages.items():
        seconds = units.decimal(stage.get("seconds"), 1) if stage.get("status") != "skipped" else units.ABSENT
        path = short_path(stage.get("artifact") or units.ABSENT, 20)
        lines.append(f"{name:<{NAME}}{stage.get('status', units.ABSENT):<9}{seconds:>9}  {path}")
    return lines


def short_path(path: str, beside: int) -> str:
    """``path`` in what ``beside`` columns leave of a line: the key shortened first, then the front."""
    width = WIDTH - NAME - beside
    if len(path) <= width:
        return path
    head, _, key = path.rpartition("/")
    path = f"{head}/{key[:10]}.." if len(key) > 12 else path
    return path if len(path) <= width else f"..{path[2 - width :]}"


def shrunk_lines(result: Mapping[str, Any]) -> list[str]:
    """A line for every time that the run went on with fewer hosts."""
    return [
        f"{each['stage']} went on with {each['hosts']} of {units.plural(each['from_hosts'], 'host')}: {each['why']}"
        for each in result.get("shrunk", ())
    ]


def _error_text(error: Mapping[str, Any]) -> str:
    return f"{error.get('message', '')} (exit code {error.get('exit_code', units.ABSENT)})"


def _block(name: str, texts: list[str]) -> list[str]:
    return [line for index, text in enumerate(texts) for line in _wrapped("" if index else name, text)]


def _wrapped(name: str, text: str) -> list[str]:
    """``text`` beside ``name``, on as many lines as 80 columns ask for."""
    lines = textwrap.wrap(text, WIDTH - NAME, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{'' if index else name:<{NAME}}{line}" for index, line in enumerate(lines)]
