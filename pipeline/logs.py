"""Logging: where the lines of the logger ``pipeline`` go, as text or JSON, and the progress line they never tear.

A module logs through ``log = logging.getLogger(__name__)``. The process says once where lines go: a launcher by
``start`` and ``speak``, a rank by ``start_rank``. Until then only warnings are seen, by Python's own default.
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
    """Standard output, where a progress line may be open; ``put`` (by default standard output) takes text as it is."""

    def __init__(self, put: Callable[[str], None] | None = None) -> None:
        self._put = put or _to_stdout
        self._open = False
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        """Write ``text`` as it is; a last line without an end counts as an open progress line."""
        if text:
            with self._lock:
                self._put(text)
                self._open = not text.endswith("\n")

    def pass_on(self, data: bytes) -> None:
        """Write the output of a child process, which may end in the middle of a character, to standard output."""
        if data:
            with self._lock:
                sys.stdout.flush()
                if hasattr(sys.stdout, "buffer"):
                    sys.stdout.buffer.write(data)
                else:  # a caller in this process captures text
                    sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
                self._open = not data.endswith(b"\n")

    def end_line(self) -> None:
        """End an open progress line."""
        with self._lock:
            if self._open:
                self.write("\n")

    def line(self, text: str, put: Callable[[str], None] | None = None) -> None:
        """Write ``text`` as a line of its own; ``put``: elsewhere than to this terminal."""
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


class _Lines(logging.Handler):
    """Hands each line to ``put``. An output that fails (a closed pipe, a full disk) fails the caller, as ``print``."""

    def __init__(self, put: Callable[[str], None], formatter: logging.Formatter, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.put = put
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))


class BriefText(logging.Formatter):
    """For people: the message, behind ``warning:`` or ``error:`` and the rank where it is not the first one's."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several where the message has several."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        rank = f"rank {_context['rank']}: " if _context["rank"] else ""
        return f"{level}{rank}{_message(self, record)}"


class FullText(logging.Formatter):
    """For log files: time (UTC), level, rank and logger before the message."""

    def format(self, record: logging.LogRecord) -> str:
        """As ``2026-01-31T02:10:00.123Z INFO    rank 0 pipeline.training.loop: message``."""
        who = "launcher" if _context["rank"] is None else f"rank {_context['rank']}"
        return f"{_time(record)} {record.levelname:<7} {who} {record.name}: {_message(self, record)}"


class Json(logging.Formatter):
    """For clusters: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, rank (null: the launcher), stage, run, logger, message, and exception where there is one."""
        fields = {"time": _time(record), "level": record.levelname.lower(), **_context, "logger": record.name}
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    trace = f"\n{formatter.formatException(record.exc_info)}" if record.exc_info else ""
    return record.getMessage() + trace


def add_level(parser: ArgumentParser) -> None:
    """The option ``--log-level``."""
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="show lines from this level on")


def start(level: str = "info", *, to_stderr: bool = False) -> None:
    """Show lines from ``level`` on, on standard output or (``to_stderr``) error; at debug with time and logger."""
    _context.update(rank=None, stage=None, run=None)
    formatter = FullText() if level == "debug" else BriefText()
    put = (lambda text: TERMINAL.line(text, _to_stderr)) if to_stderr else TERMINAL.line
    _install(level, _Lines(put, formatter))


def speak(form: str, run: str) -> None:
    """Go on as ``launch.logs`` (``form``) asks, about ``run``."""
    _context["run"] = run
    for handler in _ROOT.handlers:
        if isinstance(handler, _Lines) and is_json() != (form == "json"):
            handler.setFormatter(Json() if form == "json" else BriefText())


def start_rank(level: str, form: str, rank: int, *, stage: str, run: str, in_pod: bool, live: bool = False) -> None:
    """Set up a rank. The first one's lines go to standard output, of the others only warnings.

    In a pod (``in_pod``) that is its log, whose lines have times. Else the launcher passes standard output on: it gets
    lines for people, and whatever else other ranks print goes to their log file with standard error. ``live``: the
    first rank has a progress line there, which a warning of another one takes the place of.
    """
    _context.update(rank=rank, stage=stage, run=run)
    if level != "debug":
        _quiet_torchrec()
    full: logging.Formatter = Json() if form == "json" else FullText()
    brief = full if form == "json" or in_pod or level == "debug" else BriefText()
    if rank == 0:
        _install(level, _Lines(TERMINAL.line, brief))
        return
    if in_pod:
        _install(level, _Lines(lambda text: TERMINAL.line(text, _to_stderr), full, logging.WARNING))
        return
    shown, clear = _kept_stdout(), CLEAR_LINE if live else ""
    own = _Lines(lambda text: TERMINAL.line(text, _to_stderr), full)
    _install(level, own, _Lines(lambda text: shown(f"{clear}{text}\n"), brief, logging.WARNING))


def _quiet_torchrec() -> None:
    """Leave out what TorchRec warns of once a table and rank: nothing in it is for the one who runs the training."""
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")


def _kept_stdout() -> Callable[[str], None]:
    """A way to write to standard output, which all other output leaves for standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def put(text: str) -> None:
        kept.write(text)
        kept.flush()

    return put


def _install(level: str, *handlers: logging.Handler) -> None:
    for former in [each for each in _ROOT.handlers if isinstance(each, _Lines)]:
        _ROOT.removeHandler(former)
    for handler in handlers:
        _ROOT.addHandler(handler)
    _ROOT.setLevel(level.upper())
    _ROOT.propagate = False


def level_arguments() -> list[str]:
    """The arguments by which a process that this one starts logs from the same level on; none for the default."""
    name = logging.getLevelName(_ROOT.level).lower()
    return ["--log-level", name] if name in LEVELS and name != "info" else []


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return any(isinstance(handler.formatter, Json) for handler in _ROOT.handlers)


def show(text: str) -> None:
    """Print what a run ends with, whatever the level; where lines are JSON as one of them."""
    if is_json():
        log.info("%s", text.strip("\n"))
    else:
        TERMINAL.line(text)


def show_fault(error: BaseException) -> None:
    """Print the traceback of ``error`` on standard error; where lines are JSON as one of them."""
    if is_json():
        log.error("unexpected %s: %s", type(error).__name__, error, exc_info=error)
    else:
        TERMINAL.end_line()
        traceback.print_exception(error)


@contextmanager
def about(stage: str) -> Iterator[None]:
    """Lines within are about ``stage``."""
    former, _context["stage"] = _context["stage"], stage
    try:
        yield
    finally:
        _context["stage"] = former
