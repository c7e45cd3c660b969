"""The stages: (configuration, input artifacts) -> artifact. A stage meets the others only through artifacts.

Each stage has its own file, listed here in the order of the chain: a new stage is a file and a line here. Importing
them imports none of the packages that do their work, so a configuration can be checked against their names without
torch.
"""

from __future__ import annotations

from pipeline.specs.stage import Stage
from pipeline.stages import evaluate, ingest, partition, plan, publish, train

SPECS: tuple[Stage, ...] = (ingest.SPEC, plan.SPEC, partition.SPEC, train.SPEC, evaluate.SPEC, publish.SPEC)
