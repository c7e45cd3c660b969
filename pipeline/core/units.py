"""Units, and numbers and tables as text. A value that is absent or not finite is shown as ``-``."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import TypeGuard

ABSENT = "-"
_MENTION = re.compile(r"(?<!\w)@(?=\w)|@(?=(?:everyone|here|channel|all)\b)")
KIB, MIB, GIB = 2**10, 2**20, 2**30


def known(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a finite number."""
    # bool is a subclass of int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def printable(text: str, most: int = 80) -> str:
    """Make ``text`` from outside, such as an id, fit for a line: escape control characters and cut it at ``most``."""
    # An id from a log may contain escape sequences, which a terminal would obey.
    plain = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if len(plain) > most:
        return f"{plain[: most - 3]}..."
    return plain


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def for_chat(text: str) -> str:
    """Escape ``text`` for a line of a chat or of Markdown: it makes no HTML, link, image or mention of anybody.

    Text that users copy stays as it is: an image by digest, a URL with a user.
    """
    line = ""
    for each in text:
        if each.isprintable():
            line += each
        elif each.isspace():
            line += " "
        else:
            line += _escaped(each)
    # Zero-width spaces after @ and within ]( are invisible, and break mentions and links.
    return _MENTION.sub("@\u200b", html.escape(line, quote=False)).replace("](", "]\u200b(")


def count(value: object) -> str:
    """Format a whole number with thousands separators: ``81,234``."""
    return f"{round(value):,}" if known(value) else ABSENT


def plural(number: object, noun: str) -> str:
    """Format a number with its noun: ``1 step``, ``1,172 steps``."""
    ending = "" if number == 1 else "s"
    return f"{count(number)} {noun}{ending}"


def decimal(value: object, digits: int = 4) -> str:
    """Format a number with a fixed number of decimals: ``0.8321``."""
    return f"{value:.{digits}f}" if known(value) else ABSENT


def percent(value: object, digits: int = 1) -> str:
    """Format a share in [0, 1] as per cent: ``0.4%``."""
    return f"{100 * value:.{digits}f}%" if known(value) else ABSENT


def size(value: object) -> str:
    """Format bytes in the binary unit that leaves at most four digits: ``61.3 MiB``."""
    if not known(value):
        return ABSENT
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # The next unit starts at 1000, not 1024, because 1,023 MiB would be a digit wider than other sizes.
        if abs(amount) < 1000 or unit == "TiB":
            break
        amount /= 1024
    if unit == "B" or abs(amount) >= 100:
        return f"{amount:.0f} {unit}"
    return f"{amount:.1f} {unit}"


def clock(seconds: object) -> str:
    """Format seconds as ``hh:mm:ss``, after the days if there are any."""
    if not known(seconds):
        return ABSENT
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86_400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    if days:
        text = f"{days}d {text}"
    return text


def duration(seconds: object) -> str:
    """Format seconds in short: ``0.32 s``, ``12.3 s``, ``3 min 12 s``, ``2 h 05 min``."""
    if not known(seconds):
        return ABSENT
    if seconds < 1:
        return f"{seconds:.2f} s"
    # From 59.95 on, one decimal would round to "60.0 s".
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def short(value: object, spread: object = None) -> str:
    """Format for axes: ``0.25``, ``1,200``, ``80k``, ``1.5M``. ``spread``: distance between ticks, for the decimals."""
    if not known(value):
        return ABSENT
    # Without a distance between ticks, the value's own magnitude decides on the decimals; 0 needs none.
    step = abs(float(value)) or 1.0
    if known(spread) and spread:
        step = abs(float(spread))
    # Numbers below 10,000 are shown in full, because 1,200 is about as short as 1.2k.
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{_trim(value / scale, step / scale)}{letter}"
    if step < 1e-4 and abs(value) < 1e-3:
        # Such a number would be too long beside an axis in full.
        return f"{value:.3g}".replace("e-0", "e-")
    return _trim(float(value), step)


def money(amount: object, currency: str = "") -> str:
    """Format an amount with two decimals, four where it is below one: ``1,203.40 USD``."""
    if not known(amount):
        return ABSENT
    # A night on a small machine may cost less than a cent, which two decimals would show as 0.00.
    text = f"{amount:,.2f}" if abs(amount) >= 1 else f"{amount:.4f}"
    if currency:
        text = f"{text} {currency}"
    return text


def _trim(value: float, step: float) -> str:
    # Show as many decimals as are needed to tell two neighbouring ticks apart. The 1e-9 makes up for rounding in log10.
    # A step such as 0.25 needs one decimal more than its magnitude says.
    digits = max(0, min(6, -math.floor(math.log10(step) + 1e-9)))
    if abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1
    return f"{value:,.{digits}f}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns. A heading that ends with ``*`` marks a column of numbers, aligned to the right."""
    names = [name.removesuffix("*") for name in head]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    lines = []
    for row in [names, *rows]:
        cells = []
        for cell, title, width in zip(row, head, widths, strict=True):
            align = str.rjust if title.endswith("*") else str.ljust
            cells.append(align(cell, width))
        # Trailing blanks could wrap the line on a narrow terminal.
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
