"""What the plan predicted beside what training measured: the ``phases``, ``step`` and ``memory`` of ``result.json``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pipeline.records import PHASES, Plan
from pipeline.training.distributed import add_up, largest
from pipeline.training.memory import MemoryMeter
from pipeline.training.phases import PhaseClock


def compared(plan: Plan, clock: PhaseClock, memory: MemoryMeter, device: torch.device) -> dict[str, Any]:
    """The figures of all ranks; collective. Without phases in the plan only the measured ones.

    ``phases``: ms, mean over the ranks; the time that a rank waits for another is in the exchanges. ``step``: ms of the
    slowest rank, without the wait for data. ``memory``: bytes of the rank with most, of HBM on CUDA, else of DDR.
    """
    measured = clock.figures()
    spent = torch.tensor([measured.get(phase, 0.0) for phase in PHASES], dtype=torch.float64, device=device)
    most = torch.stack([spent.sum(), torch.tensor(float(memory.peak()), dtype=torch.float64, device=device)])
    step, peak = largest(most).tolist()
    means = (add_up(spent) / dist.get_world_size()).tolist()
    figures: dict[str, Any] = {"memory": _comparison("bytes", predicted_bytes(plan), int(peak))}
    if measured:
        predicted = predicted_phases(plan)
        figures["phases"] = {p: _comparison("ms", predicted.get(p), ms) for p, ms in zip(PHASES, means, strict=True)}
        # Without phases the plan predicts the step of the embedding part alone, which was not measured.
        figures["step"] = _comparison("ms", plan.predicted_step_ms if predicted else None, step)
    return figures


def predicted_phases(plan: Plan) -> dict[str, float]:
    """Predicted ms by phase, mean over ranks; empty where the plan has none."""
    return {p: sum(rank.get(p, 0.0) for rank in plan.phases) / len(plan.phases) for p in PHASES if plan.phases}


def predicted_bytes(plan: Plan) -> int | None:
    """Bytes of the fullest rank in the device's own memory: its tables and the reservations; None where unknown."""
    return max(plan.resident_bytes() or [0]) or None


def _comparison(unit: str, predicted: float | None, measured: float) -> dict[str, float]:
    known = {} if predicted is None else {f"predicted_{unit}": predicted}
    return {**known, f"measured_{unit}": measured}
