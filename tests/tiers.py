"""Cases of which ``make test`` runs a few; the others are marked slow and run in ``make test-all``."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parametrise a test over ``cases``, of which those that are not in ``default`` are slow.

    Args:
        cases: Values for ``pytest.mark.parametrize``; a tuple stands for several arguments.
        default: The cases that ``make test`` runs.

    Raises:
        ValueError: A default case is none of the cases, so that ``make test`` would run less than it says.
    """
    cases = list(cases)
    if unknown := [case for case in default if case not in cases]:
        raise ValueError(f"{unknown} are none of {cases}")
    return [
        case if case in default else pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


class Together(dict[Any, Any]):
    """Outcomes by case, made a group at a time, when the first case of the group is asked for.

    One spawn of ranks makes a whole group; the slow cases are groups of their own, which ``make test`` never asks for.

    Args:
        make: Takes the cases of a group and returns the outcome of each.
        groups: The cases, each in one of them.
    """

    def __init__(self, make: Callable[[list[Any]], Mapping[Any, Any]], *groups: Iterable[Any]) -> None:
        super().__init__()
        self._make, self._groups = make, [list(group) for group in groups]

    def __missing__(self, case: Any) -> Any:
        group = next((group for group in self._groups if case in group), None)
        if group is None:
            raise KeyError(case)
        self.update(self._make(group))
        return self[case]
