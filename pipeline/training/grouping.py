"""Dense parameters in groups with rates of their own, by patterns of their names (``train.dense_groups``)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from pipeline.config import TrainConfig
from pipeline.errors import ConfigError
from pipeline.specs.optimizers import ParameterGroup

_SHOWN = 12


def dense_groups(dense: Mapping[str, nn.Parameter], train: TrainConfig) -> list[ParameterGroup]:
    """The groups of the parameters ``dense``, by name: those of no pattern first, then by pattern in their order.

    The first pattern that matches a name counts. ConfigError for a pattern that is left without a parameter.
    """
    members: dict[str, list[nn.Parameter]] = {"": [], **{pattern: [] for pattern in train.dense_groups}}
    for name, parameter in dense.items():
        members[next((p for p in train.dense_groups if fnmatchcase(name, p)), "")].append(parameter)
    groups = [ParameterGroup(members.pop(""), train.lr, train.weight_decay)]
    for pattern, parameters in members.items():
        if not parameters:
            raise _unmatched(pattern, list(dense), list(train.dense_groups))
        own = train.dense_groups[pattern]
        lr = train.lr if own.lr is None else own.lr
        decay = train.weight_decay if own.weight_decay is None else own.weight_decay
        groups.append(ParameterGroup(parameters, lr, decay))
    return [group for group in groups if group.parameters]


def _unmatched(pattern: str, names: list[str], patterns: list[str]) -> ConfigError:
    hidden = any(fnmatchcase(name, pattern) for name in names)
    why = "matches only parameters that a pattern before it has" if hidden else "matches no dense parameter"
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    near = difflib.get_close_matches(pattern, names, 1, 0.0)[0]
    other = f"put it before {patterns[0]!r}" if hidden else f"'train.dense_groups={{\"{near}\": {{lr: 0.001}}}}'"
    return ConfigError(
        f"train.dense_groups: {pattern!r} {why}; the model has: {', '.join(names[:_SHOWN])}{more}", hint=other
    )
