"""One setting of the configuration: its default, its bounds or choices, and its sentence of documentation.

``setting`` declares a dataclass field that carries all of them. The checks (``values``), ``nightjar explain`` and
``docs/configuration.md`` read them from there. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field
from typing import Any

METADATA = "setting"
AUTO = "auto"
_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a field besides its type and default.

    ``doc``: one sentence or a few, unit included. ``low``, ``high``: a closed range, None is an open end. ``choices``:
    the allowed values (of a list or a dictionary: of its entries), as a tuple, or a function that lists them where
    they are registered elsewhere. ``auto``: the word ``auto`` is allowed beside numbers. ``more``: what registered
    choices say of themselves, appended to ``doc`` by ``text``. ``quiet``: at its default it stays out of artifact
    keys, so that a setting can be added without new keys for what was made before.
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
        """The allowed values; empty where any value of the type is."""
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


def setting_of(each: Field[Any]) -> Setting:
    """The ``Setting`` that dataclass field ``each`` was declared with; KeyError where it was not by ``setting``."""
    known: Setting = each.metadata[METADATA]
    return known
