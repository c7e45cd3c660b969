"""The stages: (configuration, input artifacts) -> artifact. A stage meets the others only through artifacts.

One file each, listed here in the order of the chain: a new stage is its file and its line. Importing them imports no
room, so that a configuration is checked against their names without torch.
"""

from __future__ import annotations

from pipeline.specs.stage import Stage
from pipeline.stages import evaluate, ingest, partition, plan, publish, train

SPECS: tuple[Stage, ...] = (ingest.SPEC, plan.SPEC, partition.SPEC, train.SPEC, evaluate.SPEC, publish.SPEC)
