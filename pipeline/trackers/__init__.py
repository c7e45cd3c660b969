"""The trackers: ``SPECS`` lists them. Their packages are imported when they are used."""

from __future__ import annotations

from pipeline.trackers.mlflow import MLFLOW
from pipeline.trackers.opentelemetry import OPENTELEMETRY
from pipeline.trackers.prometheus import PROMETHEUS
from pipeline.trackers.tensorboard import TENSORBOARD

SPECS = (TENSORBOARD, MLFLOW, PROMETHEUS, OPENTELEMETRY)
