"""``result.json`` as text: the table at the end of a run, and a small one that compares runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.report.phases import phase_lines

WIDTH = 80
RULE = "-" * WIDTH
NAME = 12
TIERS = ("hbm", "ddr", "ssd")
MOST_WARNINGS = 5


def summary(result: Mapping[str, Any], where: str = "", files: Sequence[str] = ()) -> str:
    """The table at the end of a run, at most 80 columns (``where`` apart, which is never cut); absent parts stay out.

    ``result``: content of ``result.json``. ``where``: URL of the run's directory, ``files``: what to look at there.
    """
    lines = [_title(result), RULE, *_stage_lines(result.get("stages", {})), RULE]
    for name, lines_of in _PARTS.items():
        if result.get(name):
            lines += _block(name, lines_of(result[name]))
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
        path = _short_path(stage.get("artifact") or units.ABSENT, WIDTH - NAME - 20)
        lines.append(f"{name:<{NAME}}{stage.get('status', units.ABSENT):<9}{seconds:>9}  {path}")
    return lines


def _short_path(path: str, width: int) -> str:
    """``path`` in at most ``width`` columns: the key shortened first, then the front."""
    if len(path) <= width:
        return path
    head, _, key = path.rpartition("/")
    path = f"{head}/{key[:10]}.." if len(key) > 12 else path
    return path if len(path) <= width else f"..{path[2 - width :]}"


def _ingest(part: Mapping[str, Any]) -> list[str]:
    reasons = ", ".join(f"{kind} ({units.count(count)})" for kind, count in part.get("reasons", {}).items())
    lines = [
        f"{units.count(part.get('rows'))} rows, {units.count(part.get('rows_quarantined'))} of them in quarantine",
        f"{units.size(part.get('bytes_in'))} read, {units.count(part.get('rows_per_s'))} rows/s",
        f"quarantined: {reasons}" if reasons else "",
        f"in the place of {_short_path(part['replaces'], WIDTH - NAME - 16)}" if part.get("replaces") else "",
        *(f"warning: {line}" for line in part.get("warnings", [])[:MOST_WARNINGS]),
    ]
    more = len(part.get("warnings", [])) - MOST_WARNINGS
    return [line for line in lines if line] + [f"and {more} more warnings"] * (more > 0)


def _plan(part: Mapping[str, Any]) -> list[str]:
    tables = part.get("tables", {})
    tiers = part.get("tiers", {})
    sizes = [f"{tier.upper()} {units.size(tiers[key])}" for tier in TIERS if tiers.get(key := f"{tier}_bytes")]
    kinds: dict[str, int] = {}
    for table in tables.values():
        kind = f"{table.get('sharding', units.ABSENT)} in {table.get('tier', units.ABSENT)}"
        kinds[kind] = kinds.get(kind, 0) + 1
    shares = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items(), key=lambda item: -item[1]))
    step = units.decimal(part.get("predicted_step_ms"), 3)
    return [
        f"{units.plural(len(tables), 'table')}: {shares}" if shares else "no tables",
        f"{', '.join(sizes) or 'no memory'}; step {step} ms (predicted)",
    ]


def _towers(part: Mapping[str, Any]) -> list[str]:
    sizes = part.get("features", [])
    span = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{max(sizes, default=0)}"
    where = f"{units.plural(part.get('towers', 0), 'tower')} on {units.plural(part.get('hosts', 0), 'host')}"
    return [f"{where}, {span} features each; {part.get('strategy')}, module {part.get('module')}"]


def _train(part: Mapping[str, Any]) -> list[str]:
    return [
        *_trained(part),
        f"{units.count(part.get('samples_per_s'))} samples/s, {units.percent(part.get('data_wait_share'))} of the time "
        "waiting for data",
        f"peak memory {units.size(part.get('peak_rss_bytes'))}",
        *sent_per_sample(part),
        *phase_lines(part),
    ]


def shrunk_lines(result: Mapping[str, Any]) -> list[str]:
    """A line for every time that the run went on with fewer hosts."""
    return [
        f"{each['stage']} went on with {each['hosts']} of {units.plural(each['from_hosts'], 'host')}: {each['why']}"
        for each in result.get("shrunk", ())
    ]


def _trained(part: Mapping[str, Any]) -> list[str]:
    """Samples and steps of the whole training; after a resume also of this session, whose rates follow."""
    samples, steps, resumed = part.get("samples"), part.get("steps"), part.get("resumed")
    time = f"{units.duration(part.get('seconds'))} on {units.plural(part.get('world_size'), 'rank')}"
    whole = f"{units.count(samples)} samples in {units.plural(steps, 'step')}"
    if not resumed or not units.known(samples) or not units.known(steps):
        return [f"{whole}, {time}"]
    session = units.plural(steps - resumed["step"], "step")
    return [
        f"{whole} in all, resumed after step {units.count(resumed['step'])}",
        f"this session: {units.count(samples - resumed['samples'])} samples in {session}, {time}",
    ]


def sent_per_sample(train: Mapping[str, Any]) -> list[str]:
    """A line about the bytes that embeddings cost a sample, by class of link; none where one rank trained."""
    sent = train.get("bytes_per_sample", {})
    within, between = sent.get("intra_host"), sent.get("inter_host")
    if not units.known(within) or not units.known(between) or not within + between:
        return []
    return [f"embeddings sent per sample: {units.size(between)} between hosts, {units.size(within)} within"]


def _checkpoint(part: Mapping[str, Any]) -> list[str]:
    written, full = part.get("bytes_written"), part.get("bytes_full_equivalent")
    saved = f" of {units.size(full)} for full ones" if units.known(full) and full != written else ""
    lines = [
        f"{units.count(part.get('count'))} written, {units.size(written)}{saved}, "
        f"training stalled {units.percent(part.get('stall_share'))}"
    ]
    if skipped := part.get("skipped"):
        lines.append(f"{units.count(skipped)} skipped, for the one before was still being written")
    if failed := part.get("failed"):
        lines.append(f"{units.count(failed)} failed, their rows went into the next")
    return lines


def _eval(part: Mapping[str, Any]) -> list[str]:
    lines = [
        f"NE {units.decimal(part.get('ne'), 5)}   AUC {units.decimal(part.get('auc'), 5)}   "
        f"log loss {units.decimal(part.get('logloss'), 5)}   calibration {units.decimal(part.get('calibration'))}",
        f"on {units.count(part.get('samples'))} held-out rows",
    ]
    if units.known(part.get("bayes_ne")):
        best = f"best reachable NE {units.decimal(part['bayes_ne'], 5)}"
        gain = reachable_gain(part)
        lines.append(best if gain is None else f"{best}: {units.percent(gain)} of the reachable gain")
    return lines


def _gate(part: Mapping[str, Any]) -> list[str]:
    warnings = (f"warning: {words}" for words in part.get("warnings", []))
    return [f"{part.get('verdict', units.ABSENT)}", *(str(reason) for reason in part.get("reasons", [])), *warnings]


def _model(part: Mapping[str, Any]) -> list[str]:
    return [f"version {part.get('version', units.ABSENT)} at {part.get('uri', units.ABSENT)}"]


_PARTS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "ingest": _ingest, "plan": _plan, "towers": _towers, "train": _train, "checkpoint": _checkpoint, "eval": _eval,
    "gate": _gate, "model": _model,
}  # fmt: skip


def _error_text(error: Mapping[str, Any]) -> str:
    return f"{error.get('message', '')} (exit code {error.get('exit_code', units.ABSENT)})"


def _block(name: str, texts: list[str]) -> list[str]:
    return [line for index, text in enumerate(texts) for line in _wrapped("" if index else name, text)]


def _wrapped(name: str, text: str) -> list[str]:
    """``text`` beside ``name``, on as many lines as 80 columns ask for."""
    lines = textwrap.wrap(text, WIDTH - NAME, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{'' if index else name:<{NAME}}{line}" for index, line in enumerate(lines)]
