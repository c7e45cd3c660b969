"""The ``track`` group: other programs that are told of runs and nights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.specs import TRACKERS


@dataclass(kw_only=True)
class PrometheusConfig:
    """Where Prometheus gets the figures from."""

    folder: str | None = setting(
        None, doc="Folder of this machine for files in Prometheus' text format, for node exporter's textfile collector."
    )
    push: str | None = setting(None, doc="URL of a Pushgateway, for launchers in pods; null: do not push.")


@dataclass(kw_only=True)
class TrackConfig:
    """Trackers; docs/trackers.md explains them."""

    to: list[str] = setting(
        factory=list, choices=TRACKERS.names, doc="Programs that are told of runs and nights. Each is an extra of pip."
    )
    every_seconds: float = setting(10.0, low=0.1, high=3600.0, doc="Seconds between two looks at a run's records.")
    prometheus: PrometheusConfig = setting(factory=PrometheusConfig, doc="Where Prometheus gets the figures from.")

    def check(self, path: str) -> None:
        """The packages of the trackers must be installed, and Prometheus needs a place."""
        for name in self.to:
            TRACKERS.get(name).check(self)
        push = self.prometheus.push
        if push is not None and not re.match(r"https?://[^/\s]", push):
            raise ConfigError(
                f"{path}.prometheus.push is not an http or https URL",
                hint=f"{path}.prometheus.push=https://<host>:9091",
            )
