"""What every benchmark shares: the last line is one JSON object."""

from __future__ import annotations

import json
from typing import Any


def finish(bench: str, ratio: float | None, **figures: Any) -> None:
    """Print the result line: ``bench``, ``ratio`` (what it is judged by; None: not measured), ``figures`` by name."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"bench": bench, "ratio": None if ratio is None else round(ratio, 4), **rounded}), flush=True)
