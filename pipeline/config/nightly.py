"""The ``nightly``, ``schedule`` and ``track`` groups: a night, its CronJob, and trackers of runs and nights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.fields import check_time_zone, setting
from pipeline.config.prices import offer_of
from pipeline.core.errors import ConfigError
from pipeline.core.registry import TRACKERS


@dataclass(kw_only=True)
class NightlyConfig:
    """A night; docs/nightly.md explains it."""

    time_zone: str | None = setting(
        None, doc="Time zone of date=yesterday and date=today; null: `data.time_zone`, else `schedule.time_zone`."
    )
    wait_minutes: float = setting(
        120.0,
        low=0.0,
        doc="Minutes to wait for the day's logs; if they are not complete then, the night ends with exit code 3.",
    )
    poll_seconds: float = setting(60.0, low=0.01, doc="Seconds between two checks for the logs.")
    catch_up: int = setting(0, low=0, high=366, doc="Largest number of missed nights to catch up on first.")
    keep_going: bool = setting(False, doc="Run the later nights although an earlier one failed.")
    reuse_plan: bool = setting(True, doc="Reuse the incumbent's plan if neither tables nor settings have changed.")
    lease_seconds: float = setting(
        30.0,
        low=0.1,
        high=3600.0,
        doc="Another launcher takes over a night whose lease has not been renewed for this many seconds.",
    )
    bisect: int = setting(
        0,
        low=0,
        high=20,
        doc="Trainings that a night which the gate held may spend on finding what spoilt it, once its verdict is "
        "recorded and posted; 0: none. See `nightjar bisect`.",
    )
    webhook: str | None = setting(None, doc="URL that the outcome is posted to as JSON; null: none.")
    prices: str | None = setting(
        None, doc="File of prices, as of `nightjar price`, by which a night's record has its cost; null: it has none."
    )
    priced_as: str | None = setting(
        None, doc="Offer in `prices` that nights run on; null: the only one that the file has."
    )
    priced_spot: bool = setting(False, doc="Nights run on spot hosts of that offer, not on demand.")

    def check(self, path: str) -> None:
        # The webhook must be a URL, the time zone must exist, and the prices must have the offer. Read the file now, so
        # that a missing offer is noticed before a night and not at its end.
        if self.prices is not None:
            offer_of(self.prices, self.priced_as, spot=self.priced_spot, path=path)
        elif self.priced_as is not None or self.priced_spot:
            name = "priced_spot" if self.priced_as is None else "priced_as"
            raise ConfigError(f"{path}.{name} is set, but {path}.prices is null", hint=f"{path}.prices=prices.yaml")
        if self.webhook is not None and not re.match(r"https?://[^/\s]", self.webhook):
            raise ConfigError(
                f"{path}.webhook is not an http or https URL", hint=f"{path}.webhook=https://<host>/<path>"
            )
        check_time_zone(f"{path}.time_zone", self.time_zone)


@dataclass(kw_only=True)
class ScheduleConfig:
    """The CronJob that starts a launcher every night."""

    name: str = setting("nightjar-nightly", doc="Name of the CronJob.")
    cron: str = setting("0 2 * * *", doc="When a launcher starts: minute, hour, day, month, weekday.")
    time_zone: str = setting("Etc/UTC", doc="Time zone of `cron`.")
    start_within_minutes: int = setting(60, low=1, doc="Skip a start that is more than this many minutes late.")
    retries: int = setting(
        2, low=0, high=20, doc="How often to restart a launcher that failed; it continues where it stopped."
    )
    deadline_hours: float = setting(20.0, low=0.01, doc="Hours after which a night is cancelled.")
    keep: int = setting(7, low=0, doc="Finished nights of each outcome that the cluster remembers.")
    suspended: bool = setting(False, doc="Suspend the CronJob.")

    def check(self, path: str) -> None:
        # The time zone must exist.
        check_time_zone(f"{path}.time_zone", self.time_zone)


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
        # The packages of the trackers must be installed, and Prometheus needs a destination.
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
