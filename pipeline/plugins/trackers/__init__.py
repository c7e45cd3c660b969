"""The trackers: ``SPECS`` lists them. Their packages are imported when they are used."""

from __future__ import annotations

from pipeline.plugins.trackers.mlflow import MLFLOW
from pipeline.plugins.trackers.opentelemetry import OPENTELEMETRY
from pipeline.plugins.trackers.prometheus import PROMETHEUS
from pipeline.plugins.trackers.tensorboard import TENSORBOARD

SPECS = (TENSORBOARD, MLFLOW, PROMETHEUS, OPENTELEMETRY)
