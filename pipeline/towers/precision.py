"""Smaller numbers on the wire: the codecs of TorchRec's quantised collectives.

TorchRec's registry turns bf16 into fp16 on a CPU, with a line in the log. The codecs themselves work, so they are built
here without the registry. Gradients always travel in bf16: fp16 has no room for the small ones of a large batch.
"""

from __future__ import annotations

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from pipeline.errors import ConfigError
from pipeline.records import Plan

_FORWARD = {"fp16": CommType.FP16, "bf16": CommType.BF16, "int8": CommType.INT8}
# Collectives sum the embeddings of these sharding types on the way, which int8 cannot do.
_SUMMED = ("row_wise", "table_row_wise", "grid_shard")


def codecs(exchange: str) -> QuantizedCommCodecs | None:
    """Codecs of an all-to-all of pooled embeddings for ``partition.exchange``; None: plain float32."""
    if exchange == "fp32":
        return None
    return get_qcomm_codecs(QCommsConfig(forward_precision=_FORWARD[exchange], backward_precision=CommType.BF16))


def flat_codecs(exchange: str, plan: Plan) -> dict[str, QuantizedCommCodecs] | None:
    """Codecs of a flat model's collectives, by TorchRec's names; ConfigError names tables that cannot use them."""
    if exchange == "fp32":
        return None
    summed = [name for name, table in plan.tables.items() if table.sharding in _SUMMED]
    if exchange == "int8" and summed:
        raise ConfigError(
            f"partition.exchange is int8, but the row-wise tables {', '.join(summed)} need sums on the way, which int8 "
            "cannot do",
            hint="partition.exchange=bf16, or plan.sharding_types=[data_parallel,table_wise,column_wise]",
        )
    made = {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs(exchange)}
    if exchange != "int8":
        made[CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name] = codecs(exchange)
    return {name: codec for name, codec in made.items() if codec is not None}
