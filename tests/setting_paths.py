"""The paths of all settings of the configuration."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from pipeline.config import Config, ModelConfig
from pipeline.models.dlrm import DlrmConfig


def leaves(kind: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings below dataclass ``kind``, ``*`` for every entry of a dictionary of dataclasses."""
    for field in dataclasses.fields(kind):
        inner, path = typing.get_type_hints(kind)[field.name], f"{prefix}{field.name}"
        inner = MODEL if inner is ModelConfig else inner
        if typing.get_origin(inner) is dict and dataclasses.is_dataclass(typing.get_args(inner)[1]):
            inner, path = typing.get_args(inner)[1], f"{path}.*"
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, f"{path}.")
        else:
            yield path


# A model's settings are those of its own class.
MODEL = DlrmConfig
LEAVES = sorted(leaves(Config))
