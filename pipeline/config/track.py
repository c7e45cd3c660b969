"""The ``track`` group: other programs that are told of runs and nights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError
from pipeline.specs.registry import TRACKERS


@dataclass(kw_only=True)
class PrometheusConfig:
    """Where Prometheus gets the figures from."""

    folder: str | None = setting(
        None, doc="Folder of this machine for files in Prometheus' text format, for node exporter's textfile collector."
    )
    push: str | None = setting(None, doc="URL of a Pushgateway, for launchers in pods; null: do not push.")


@dataclass(kw_only=True)
class MlflowConfig:
    """The MLflow server, and the names that it gets."""

    uri: str | None = setting(None, doc="URL of the MLflow server.")
    experiment: str | None = setting(None, doc="Experiment of the runs; null: the name of the model.")
    registry: str | None = setting(
        None, doc="Registered model that gets an entry for each published version; null: the name of the model."
    )
    login_file: str | None = setting(
        None, doc="File of this machine with user:password or a bearer token for the server; null: it asks for none."
    )


@dataclass(kw_only=True)
class OpenTelemetryConfig:
    """Where spans are sent to."""

    endpoint: str | None = setting(None, doc="URL of a collector that takes OTLP over HTTP, as http://<host>:4318.")


@dataclass(kw_only=True)
class TrackConfig:
    """Trackers; docs/trackers.md explains them."""

    to: list[str] = setting(factory=list, choices=TRACKERS.names, doc="Programs that are told of runs and nights.")
    every_seconds: float = setting(10.0, low=0.1, high=3600.0, doc="Seconds between two looks at a run's records.")
    mlflow: MlflowConfig = setting(factory=MlflowConfig, doc="The MLflow server, and the names that it gets.")
    prometheus: PrometheusConfig = setting(factory=PrometheusConfig, doc="Where Prometheus gets the figures from.")
    opentelemetry: OpenTelemetryConfig = setting(factory=OpenTelemetryConfig, doc="Where spans are sent to.")

    def check(self, path: str) -> None:
        """The packages of the trackers must be installed, and Prometheus needs a place."""
        for name in self.to:
            TRACKERS.get(name).check(self)
        urls = {
            "prometheus.push": (self.prometheus.push, 9091),
            "mlflow.uri": (self.mlflow.uri, 5000),
            "opentelemetry.endpoint": (self.opentelemetry.endpoint, 4318),
        }
        for name, (url, port) in urls.items():
            if url is not None and not re.match(r"https?://[^/\s]", url):
                raise ConfigError(
                    f"{path}.{name} is not an http or https URL", hint=f"{path}.{name}=https://<host>:{port}"
                )
