"""``result.json`` as text: the table at the end of a run, and a table that compares runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from pipeline.core import units
from pipeline.records.gate import HOLD
from pipeline.records.result import ErrorPart, Evaluation, Grown, PredictionPart, Result, Shrunk
from pipeline.specs import STAGES

WIDTH = 80
RULE = "-" * WIDTH
NAME = 12


def summary(result: Result, where: str = "", files: Sequence[str] = ()) -> str:
    """Return the table at the end of a run, at most 80 columns wide except for ``where``.

    ``where``: URL of the run's folder. ``files``: files in it that are worth a look.
    """
    ended = f"{result.status} in"
    if result.status == "failed":
        ended = "failed after"
        # A run that the gate held has status "failed", though nothing went wrong.
        if result.gate is not None and result.gate.verdict == HOLD:
            ended = "held by the gate after"
    lines = [f"run {result.run}: {ended} {units.duration(result.seconds)}", RULE]
    if result.stages:
        lines.append(f"{'stage':<{NAME}}{'status':<9}{'seconds':>9}  artifact")
    else:
        lines.append("no stage ran")
    for name, outcome in result.stages.items():
        seconds = units.ABSENT
        # 0.0 would look as if a skipped stage had run.
        if outcome.status != "skipped":
            seconds = units.decimal(outcome.seconds, 1)
        path = short_path(outcome.artifact or units.ABSENT, 20)
        lines.append(f"{name:<{NAME}}{outcome.status:<9}{seconds:>9}  {path}")
    lines.append(RULE)
    for stage in STAGES:
        for name, texts in stage.lines(result).items():
            lines += wrapped(name, *texts)
    if changes := hosts_lines(result.shrunk, result.grown):
        lines += wrapped("hosts", "; ".join(changes))
    if (sealed := result.prediction) is not None:
        lines += wrapped("prediction", *prediction_lines(sealed))
    if error := result.error:
        lines += wrapped("error", error_text(error))
        if error.hint:
            lines += wrapped("hint", error.hint)
    if where:
        lines += [RULE, f"{'look at':<{NAME}}{where}/", *wrapped("", "  ".join(files))]
    return "\n".join(map(str.rstrip, lines))


def reachable_gain(figures: Evaluation) -> float | None:
    """Return (1 - NE) / (1 - Bayes NE), the share of the learnable that was learned; None if unknown."""
    ne, bayes = figures.ne, figures.bayes_ne
    if not units.known(ne) or not units.known(bayes) or bayes >= 1:
        return None
    return (1 - ne) / (1 - bayes)


def doubts(figures: Evaluation) -> list[str]:
    """Say why the test rows cannot tell how good the model is; nothing if they can."""
    # Records of an earlier release lack some of these figures.
    if figures.clicks is None or figures.samples is None or figures.ne is None:
        return []
    hint = "hold out more rows, by data.split.test_share, or by test_days or test_hours where the split is by these"
    if figures.ne_interval is None:
        without = units.count(figures.samples - figures.clicks)
        rows = f"{units.plural(figures.clicks, 'test row')} with a click and {without} without"
        return [f"{rows} are too few, or lie too close together, to tell how good the model is; {hint}"]
    if figures.ne <= 1 <= figures.ne_interval[1]:
        high = units.decimal(figures.ne_interval[1], 3)
        return [f"NE may be as high as {high}; 1 is that of the click rate, predicted for every row: {hint}"]
    return []


def compare(results: Sequence[Result], notes: Sequence[str] | None = None) -> str:
    """Return a table of runs, for a sweep; ``*`` marks the best NE.

    ``notes``: the overrides of each run, shown last.
    """
    if not results:
        return "no runs to compare"
    if notes is not None and len(notes) != len(results):
        raise ValueError(f"{len(notes)} notes for {len(results)} results")
    width = min(max(len("run"), *(len(result.run) for result in results)), 22)
    all_scores = [result.eval or Evaluation() for result in results]
    # Runs that were not evaluated have no NE, and the NE of a diverged training may not be finite.
    best = min((scores.ne for scores in all_scores if units.known(scores.ne)), default=None)
    heading = f"{'run':<{width}}  {'status':<8} {'NE':>9} {'AUC':>8} {'log loss':>8} {'samples/s':>10} {'seconds':>8}"
    lines = [heading, "-" * len(heading)]
    for index, (result, scores) in enumerate(zip(results, all_scores, strict=True)):
        name, speed = result.run, None
        if len(name) > width:
            name = f"{name[: width - 2]}.."
        if result.train is not None:
            speed = result.train.samples_per_s
        mark = "*" if scores.ne is not None and scores.ne == best else " "
        line = (
            f"{name:<{width}}  {result.status:<8} {units.decimal(scores.ne, 5):>8}{mark} "
            f"{units.decimal(scores.auc, 5):>8} {units.decimal(scores.logloss):>8} "
            f"{units.count(speed):>10} {result.seconds:>8.1f}"
        )
        if notes is not None:
            line += f"  {notes[index]}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def short_path(path: str, columns: int) -> str:
    """Shorten ``path`` to fit beside ``columns`` columns: first the key, then the front."""
    width = WIDTH - NAME - columns
    if len(path) <= width:
        return path
    head, _, key = path.rpartition("/")
    if len(key) > 12:
        path = f"{head}/{key[:10]}.."
    if len(path) > width:
        path = f"..{path[2 - width :]}"
    return path


def hosts_lines(shrunk: Sequence[Shrunk] | None, grown: Sequence[Grown] | None = None) -> list[str]:
    """Return a line for each time that a stage lost hosts and continued, then for each time that it took some back."""
    lines = []
    for loss in shrunk or ():
        hosts = units.plural(loss.from_hosts, "host")
        lines.append(f"{loss.stage} continued with {loss.hosts} of {hosts}: {loss.why}")
    for gain in grown or ():
        lines.append(f"{gain.stage} went back from {gain.from_hosts} to {gain.hosts} hosts")
    return lines


def prediction_lines(part: PredictionPart) -> list[str]:
    """Say how far off the sealed prediction of a run was, in all and by stage."""
    seal = f"{part.sealed}, SHA-256 {part.sha256[:16]}"
    if part.problem:
        return [f"not compared with {seal}: {part.problem}"]
    stages, total, others = prediction_rows(part)
    _, predicted, measured, _ = total
    lines = [f"{predicted} predicted, {measured} measured: off by {off_by(part.error)} ({seal})"]
    for rows in (stages, others):
        texts = []
        for name, guess, found, error in rows:
            texts.append(f"{name} {guess} for {found}, {error}")
        if texts:
            lines.append("; ".join(texts))
    return lines


Row = tuple[str, str, str, str]


def prediction_rows(part: PredictionPart) -> tuple[list[Row], Row, list[Row]]:
    """Return the rows of the stages, of all of them together, and of a training step and the memory, where known.

    A row is what was predicted, how much, what was measured, and how far off that was.
    """

    def row(name: str, predicted: float, measured: float, text: Callable[[float], str]) -> Row:
        # A stage that took no time, such as a skipped one, has no relative error.
        error = predicted / measured - 1 if measured else None
        return name, text(predicted), text(measured), off_by(error)

    stages, all_predicted, all_measured = [], [], []
    for name, span in part.seconds.items():
        stages.append(row(name, span.predicted_s, span.measured_s, units.duration))
        all_predicted.append(span.predicted_s)
        all_measured.append(span.measured_s)
    predicted, measured = sum(all_predicted), sum(all_measured)
    others = []
    if (step := part.step) is not None and step.predicted_ms is not None:
        others.append(row("a step", step.predicted_ms, step.measured_ms, lambda ms: f"{units.decimal(ms, 3)} ms"))
    if (memory := part.memory) is not None and memory.predicted_bytes is not None:
        others.append(row("peak memory", memory.predicted_bytes, memory.measured_bytes, units.size))
    return stages, row("all of these", predicted, measured, units.duration), others


def off_by(error: float | None) -> str:
    """Format a relative error with its sign: ``+3.1%`` was predicted too long."""
    return units.ABSENT if error is None else f"{error:+.1%}"


def error_text(error: ErrorPart) -> str:
    return f"{error.message} (exit code {error.exit_code})"


def paragraph(text: str, indent: str = "   ") -> str:
    """Wrap ``text`` to 80 columns, with ``indent`` before its further lines. No word or name is broken."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def first_names(names: Sequence[str], most: int) -> str:
    """Join the first ``most`` of ``names``, and say how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def wrapped(name: str, *texts: str) -> list[str]:
    """Wrap each of ``texts`` to 80 columns. ``name`` precedes the first line."""
    lines = []
    for text in texts:
        # An empty text is one empty line, so that ``name`` is not lost.
        for line in textwrap.wrap(text, WIDTH - NAME, break_long_words=False, break_on_hyphens=False) or [""]:
            lines.append(f"{name:<{NAME}}{line}")
            name = ""
    return lines
