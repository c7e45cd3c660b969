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
    # To Python, True is the number 1.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def printable(text: str, most: int = 80) -> str:
    """``text`` from outside, such as an id, as a line can show it: control characters escaped, not too long."""
    # An id of a log may hold escape sequences, which a terminal would obey.
    plain = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if len(plain) > most:
        return f"{plain[: most - 3]}..."
    return plain


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def for_chat(text: str) -> str:
    """``text`` as a line of a chat or of Markdown shows it and no more: no HTML, link, image or mention of anybody.

    What is to be copied stays as it is: an image by digest, a URL with a user.
    """
    line = ""
    for each in text:
        if each.isprintable():
            line += each
        elif each.isspace():
            line += " "
        else:
            line += _escaped(each)
    # A space of no width after the @, and within ](, is nothing to the reader and breaks mentions and links.
    return _MENTION.sub("@\u200b", html.escape(line, quote=False)).replace("](", "]\u200b(")


def count(value: object) -> str:
    """Whole number with thousands separators: ``81,234``."""
    return f"{round(value):,}" if known(value) else ABSENT


def plural(number: object, noun: str) -> str:
    """``1 step``, ``1,172 steps``."""
    ending = "" if number == 1 else "s"
    return f"{count(number)} {noun}{ending}"


def decimal(value: object, digits: int = 4) -> str:
    """Fixed number of decimals: ``0.8321``."""
    return f"{value:.{digits}f}" if known(value) else ABSENT


def percent(value: object, digits: int = 1) -> str:
    """A share in [0, 1] as per cent: ``0.4%``."""
    return f"{100 * value:.{digits}f}%" if known(value) else ABSENT


def size(value: object) -> str:
    """Bytes in the binary unit that leaves at most four digits: ``61.3 MiB``."""
    if not known(value):
        return ABSENT
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # From 1000 on, not 1024: 1,023 MiB would be a digit wider than all other sizes of a column.
        if abs(amount) < 1000 or unit == "TiB":
            break
        amount /= 1024
    if unit == "B" or abs(amount) >= 100:
        return f"{amount:.0f} {unit}"
    return f"{amount:.1f} {unit}"


def clock(seconds: object) -> str:
    """Seconds as ``hh:mm:ss``, after the days if there are any."""
    if not known(seconds):
        return ABSENT
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86_400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    if days:
        text = f"{days}d {text}"
    return text


def duration(seconds: object) -> str:
    """Seconds in short: ``0.32 s``, ``12.3 s``, ``3 min 12 s``, ``2 h 05 min``."""
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
    """For axes: ``0.25``, ``1,200``, ``80k``, ``1.5M``. ``spread``: the distance between ticks, for the decimals."""
    if not known(value):
        return ABSENT
    # Without a distance between ticks the value itself says how many decimals it needs; 0 needs none.
    step = abs(float(value)) or 1.0
    if known(spread) and spread:
        step = abs(float(spread))
    # Up to 10,000 in full: 1,200 is as short as 1.2k.
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{_trim(value / scale, step / scale)}{letter}"
    if step < 1e-4 and abs(value) < 1e-3:
        # In full it would not fit beside the axis.
        return f"{value:.3g}".replace("e-0", "e-")
    return _trim(float(value), step)


def money(amount: object, currency: str = "") -> str:
    """An amount with two decimals, four where it is below one: ``1,203.40 USD``."""
    if not known(amount):
        return ABSENT
    # A night on a small machine costs cents: two decimals would say 0.00.
    text = f"{amount:,.2f}" if abs(amount) >= 1 else f"{amount:.4f}"
    if currency:
        text = f"{text} {currency}"
    return text


def _trim(value: float, step: float) -> str:
    # As many decimals as tell two neighbouring ticks apart. log10(0.001) may be -2.9999..., hence the 1e-9; a step such
    # as 0.25 or 2.5 needs one decimal more than its magnitude says.
    digits = max(0, min(6, -math.floor(math.log10(step) + 1e-9)))
    if abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1
    return f"{value:,.{digits}f}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns. A heading that ends with ``*`` marks a column of numbers, aligned to the right."""
    names = [name.removesuffix("*") for name in head]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    lines = []
    for row in [names, *rows]:
        cells = []
        for cell, title, width in zip(row, head, widths, strict=True):
            align = str.rjust if title.endswith("*") else str.ljust
            cells.append(align(cell, width))
        # Blanks at the end would wrap the line on a terminal that is just wide enough for its text.
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
