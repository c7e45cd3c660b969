"""What several tasks share behind a ranker's last hidden layer: ``SPECS`` lists it. No torch at import."""

from __future__ import annotations

from pipeline.models.tasks import esmm, mmoe, ple, shared_bottom
from pipeline.specs.task_architecture import TaskArchitecture

SPECS: tuple[TaskArchitecture, ...] = (shared_bottom.SPEC, mmoe.SPEC, ple.SPEC, esmm.SPEC)
