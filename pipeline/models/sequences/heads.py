"""What blocks with several heads ask of the width of events."""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.specs.sequence_block import BlockInputs


def check_heads(block: str, heads: int, inputs: BlockInputs) -> None:
    """ConfigError unless ``heads`` divide the width of the events."""
    if inputs.dim % heads:
        raise ConfigError(
            f"{block} has {heads} heads, expected a divisor of model.embedding_dim, {inputs.dim}",
            hint="model.sequences.<name>.options.heads=1",
        )
