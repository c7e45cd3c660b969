"""YAML files parsed by libyaml, where PyYAML has it: PyYAML's own parser takes most of the time of a composition."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TextIO

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

HEADER = 512  # characters of a file in which Hydra looks for ``# @package``


class LibyamlRepository(ConfigRepository):
    """Hydra's repository of configurations, with ``LibyamlFiles`` for the directories of its search path."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Open the search path."""
        super().initialize_sources(config_search_path)
        self.sources = [
            LibyamlFiles(each.provider, each.path) if type(each) is FileConfigSource else each for each in self.sources
        ]


class LibyamlFiles(FileConfigSource):
    """A directory of the search path."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a configuration as Hydra does, by ``read_yaml``."""
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        if not path.exists():
            raise ConfigLoadError(f"Config not found : {path}")
        with path.open(encoding="utf-8") as file:
            header = ConfigSource._get_header_dict(file.read(HEADER))
            file.seek(0)
            config = read_yaml(file)
        return ConfigResult(
            config=OmegaConf.create({} if config is None else config),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=header,
        )


def read_yaml(document: str | TextIO) -> Any:
    """Parse YAML by OmegaConf's rules of numbers, dates and keys that occur twice.

    Args:
        document: Its text, or an open file, whose name messages have.

    Returns:
        What it says: None where it says nothing.

    Raises:
        yaml.YAMLError: It is not YAML, or has a key twice.
    """
    return yaml.load(document, Loader=_loader())


@functools.cache
def _loader() -> Any:
    rules: Any = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return rules

    class Loader(yaml.cyaml.CParser, rules):  # type: ignore[misc]
        """The parser of libyaml behind OmegaConf's rules."""

        def __init__(self, stream: str | TextIO) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader
