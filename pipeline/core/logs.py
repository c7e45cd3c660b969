"""Logging: where the lines of the logger ``pipeline`` go, as text or JSON, without breaking the progress line.

A module logs through ``log = logging.getLogger(__name__)``. A launcher calls ``start`` and ``speak`` once, a rank calls
``start_rank``. Before that, only warnings are shown, which is Python's default.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
CLEAR_LINE = "\r\x1b[K"
_ROOT = logging.getLogger("pipeline")
_context: dict[str, Any] = {"rank": None, "stage": None, "run": None}
log = logging.getLogger(__name__)


class Terminal:
    """Standard output with a progress line. ``put`` writes text, by default to standard output."""

    def __init__(self, put: Callable[[str], None] | None = None) -> None:
        self._put = put or _to_stdout
        self._open = False
        # Reentrant, because ``line`` holds the lock while it ends the open line and writes.
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        """Write ``text``. A last line without a line end counts as the open progress line."""
        if text:
            with self._lock:
                self._put(text)
                self._open = not text.endswith("\n")

    def pass_on(self, data: bytes) -> None:
        """Write output of a child process, which may end inside a character, to standard output."""
        if data:
            with self._lock:
                # Flush text that was written before, because the bytes below bypass its buffer.
                sys.stdout.flush()
                if hasattr(sys.stdout, "buffer"):
                    sys.stdout.buffer.write(data)
                else:
                    # A caller that captures output may have replaced sys.stdout by a stream of text.
                    sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
                self._open = not data.endswith(b"\n")

    def end_line(self) -> None:
        """End an open progress line."""
        with self._lock:
            if self._open:
                self.write("\n")

    def line(self, text: str, put: Callable[[str], None] | None = None) -> None:
        """Write ``text`` as a separate line. ``put``: write it elsewhere than to this terminal."""
        with self._lock:
            self.end_line()
            (put or self.write)(f"{text}\n")


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


TERMINAL = Terminal()


class _LineWriter(logging.Handler):
    """Passes each line to ``put``. If the output fails (closed pipe, full disk), the caller fails, like ``print``."""

    def __init__(self, put: Callable[[str], None], formatter: logging.Formatter, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.put = put
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))


class BriefText(logging.Formatter):
    """For people: the message, after ``warning:`` or ``error:``, and the rank unless it is 0."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the message."""
        text = _message(self, record)
        # Lines are rank 0's unless they name another rank.
        if _context["rank"]:
            text = f"rank {_context['rank']}: {text}"
        if record.levelno > logging.INFO:
            text = f"{record.levelname.lower()}: {text}"
        return text


class FullText(logging.Formatter):
    """For log files: time (UTC), level, rank and logger before the message."""

    def format(self, record: logging.LogRecord) -> str:
        """As ``2026-01-31T02:10:00.123Z INFO    rank 0 pipeline.training.trainer: message``."""
        process = "launcher"
        if _context["rank"] is not None:
            process = f"rank {_context['rank']}"
        return f"{_time(record)} {record.levelname:<7} {process} {record.name}: {_message(self, record)}"


class Json(logging.Formatter):
    """For clusters: one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Format time, level, rank (null: the launcher), stage, run, logger, message, and the exception if any."""
        fields = {"time": _time(record), "level": record.levelname.lower(), **_context, "logger": record.name}
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += f"\n{formatter.formatException(record.exc_info)}"
    return text


def add_level(parser: ArgumentParser) -> None:
    """Add the option ``--log-level``."""
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="show lines from this level on")


def start(level: str = "info", *, to_stderr: bool = False) -> None:
    """Show lines from ``level`` on, on standard output or error; at level debug with time and logger."""
    # A process may run several commands in turn, and none must keep the context of the one before.
    _context.update(rank=None, stage=None, run=None)
    formatter = FullText() if level == "debug" else BriefText()
    put = _line_on_stderr if to_stderr else TERMINAL.line
    _install(level, _LineWriter(put, formatter))


def speak(form: str, run: str) -> None:
    """Continue in the format ``form`` (``launch.logs``), with ``run`` in JSON lines."""
    _context["run"] = run
    wants_json = form == "json"
    for handler in _ROOT.handlers:
        # A formatter of the right kind stays: at level debug it is the FullText that ``start`` chose.
        if isinstance(handler, _LineWriter) and is_json() != wants_json:
            handler.setFormatter(Json() if wants_json else BriefText())


def start_rank(level: str, form: str, rank: int, *, stage: str, run: str, in_pod: bool, live: bool = False) -> None:
    """Set up logging of a rank: rank 0 shows all lines, the others only warnings.

    Args:
        in_pod: Lines have times. Otherwise the launcher shows the standard output of the ranks, and whatever else ranks
            other than 0 print goes to their log file.
        live: Rank 0 has a progress line, which warnings of other ranks replace.
    """
    _context.update(rank=rank, stage=stage, run=run)
    if level != "debug":
        # TorchRec warns once per table and rank. None of it helps whoever runs the training.
        logging.getLogger("torchrec").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
    full: logging.Formatter = Json() if form == "json" else FullText()
    brief: logging.Formatter = BriefText()
    if form == "json" or in_pod or level == "debug":
        brief = full
    if rank == 0:
        _install(level, _LineWriter(TERMINAL.line, brief))
        return
    if in_pod:
        _install(level, _LineWriter(_line_on_stderr, full, logging.WARNING))
        return
    # Only warnings reach the standard output that the launcher shows: all else goes to standard error from now on.
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    # Clear the progress line, which rank 0 has written: it does not know that another process prints a line.
    cleared = CLEAR_LINE if live else ""

    def put(text: str) -> None:
        stdout.write(f"{cleared}{text}\n")
        stdout.flush()

    _install(level, _LineWriter(_line_on_stderr, full), _LineWriter(put, brief, logging.WARNING))


def hide_tracing_advice() -> None:
    """Hide advice that FX logs when TorchRec asks whether it is being traced; whoever trains cannot follow it."""
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_is_no_tracing_advice)


def _is_no_tracing_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("is_fx_tracing will return true")


def _line_on_stderr(text: str) -> None:
    TERMINAL.line(text, _to_stderr)


def _install(level: str, *handlers: logging.Handler) -> None:
    # Remove handlers of an earlier ``start``, or every line would appear twice. Handlers added by others stay.
    for former in list(_ROOT.handlers):
        if isinstance(former, _LineWriter):
            _ROOT.removeHandler(former)
    for handler in handlers:
        _ROOT.addHandler(handler)
    _ROOT.setLevel(level.upper())
    # A library that calls logging.basicConfig adds a handler to Python's root logger, which would print lines again.
    _ROOT.propagate = False


def level_arguments() -> list[str]:
    """Return arguments that give a child process the same log level; none for the default."""
    name = logging.getLevelName(_ROOT.level).lower()
    # Before ``start`` is called the level is NOTSET, which the option does not take.
    if name not in LEVELS or name == "info":
        return []
    return ["--log-level", name]


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return any(isinstance(handler.formatter, Json) for handler in _ROOT.handlers)


def show(text: str) -> None:
    """Print the end of a run at any level; as a JSON line if lines are JSON."""
    if is_json():
        log.info("%s", text.strip("\n"))
    else:
        TERMINAL.line(text)


def show_fault(error: BaseException) -> None:
    """Print the traceback of ``error`` on standard error; as a JSON line if lines are JSON."""
    if is_json():
        log.error("unexpected %s: %s", type(error).__name__, error, exc_info=error)
    else:
        TERMINAL.end_line()
        traceback.print_exception(error)


@contextmanager
def about(stage: str) -> Iterator[None]:
    """Make lines in this context be about ``stage``."""
    former, _context["stage"] = _context["stage"], stage
    try:
        yield
    finally:
        _context["stage"] = former
