"""One setting of the configuration: its default, its bounds or choices, and its documentation.

``setting`` declares a dataclass field with all of them. The checks (``values``), ``nightjar explain`` and
``docs/configuration.md`` read them from the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any

METADATA = "setting"
AUTO = "auto"
_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a field besides its type and default.

    ``doc``: the documentation, with the unit. ``low``, ``high``: a closed range; None: open. ``choices``: the allowed
    values (of a list or dictionary, of its entries), or a function that lists registered ones. ``auto``: the word
    ``auto`` is allowed besides numbers, or besides true and false without a range. ``more``: documentation of
    registered choices, which ``text`` appends.
    ``quiet``: at its default the setting stays out of artifact keys, so adding it changes no key.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | Callable[[], Iterable[str]] | None = None
    auto: bool = False
    more: Callable[[], str] | None = None
    quiet: bool = False

    @property
    def text(self) -> str:
        """The whole documentation."""
        return f"{self.doc} {self.more()}" if self.more else self.doc

    def allowed(self) -> tuple[str, ...]:
        """The allowed values; empty if every value of the type is allowed."""
        return tuple(self.choices() if callable(self.choices) else self.choices or ())


def setting(
    default: Any = _NOTHING,
    *,
    doc: str,
    factory: Callable[[], Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | Callable[[], Iterable[str]] | None = None,
    auto: bool = False,
    more: Callable[[], str] | None = None,
    quiet: bool = False,
) -> Any:
    """A dataclass field with its ``Setting``; ``default`` or ``factory`` as in ``dataclasses.field``."""
    metadata = {METADATA: Setting(doc=doc, low=low, high=high, choices=choices, auto=auto, more=more, quiet=quiet)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is _NOTHING else field(default=default, metadata=metadata)


def default_of(each: Field[Any]) -> Any:
    """The default of a dataclass field; ``MISSING`` where it has none."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def setting_of(each: Field[Any]) -> Setting:
    """The ``Setting`` of a dataclass field; KeyError if the field was not declared by ``setting``."""
    known: Setting = each.metadata[METADATA]
    return known
