"""How commands speak: lines, a result as text or JSON, a bar while they work, an error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from pipeline.logs import TERMINAL
from pipeline.records import plain

_BAR = 24


def columns() -> int:
    """Width of the terminal that standard output is, 0 where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def show(text: str) -> None:
    """Print a line of the result at once."""
    TERMINAL.line(text)


def complain(text: str, code: int) -> int:
    """Print an error after all that was printed before; returns its exit ``code``."""
    TERMINAL.end_line()
    sys.stderr.write(f"nightjar: {text}\n")
    sys.stderr.flush()
    return code


def tell(as_json: bool, result: Any, render: Callable[[Any], str], to: TextIO | None = None) -> None:
    """Print ``result`` as JSON or as the text that ``render`` makes of it; ``to``: by default standard output."""
    text = json.dumps(plain(result), indent=1) if as_json else render(result)
    to = to or sys.stdout
    to.write(f"{text}\n")
    to.flush()


def progress(as_json: bool, what: str) -> Callable[[int, int], None]:
    """A bar on standard error where that is a terminal, else nothing; it is called with (done, total)."""
    if as_json or not sys.stderr.isatty():
        return lambda done, total: None
    last = [0.0]

    def show(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] < 0.1 and done < total:
            return
        last[0] = now
        share = done / max(1, total)
        bar = f"{what} [{'=' * int(share * _BAR):<{_BAR}}] {share:4.0%}"
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\r{bar[: shutil.get_terminal_size().columns - 1]}\x1b[K{end}")
        sys.stderr.flush()

    return show
