"""Smaller numbers on the wire: what TorchRec's quantised collectives truly do, and nothing it falls back from.

TorchRec's registry turns bf16 into fp16 on a CPU with a line in a log; the codecs themselves work, so they are made
here without it. Gradients go as bf16 in every case: fp16 has no room for the small ones of a large batch.
"""

from __future__ import annotations

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from pipeline.errors import ConfigError
from pipeline.records import Plan

_FORWARD = {"fp16": CommType.FP16, "bf16": CommType.BF16, "int8": CommType.INT8}
# Shardings whose embeddings are summed on the way: their sum cannot be taken in int8.
_SUMMED = ("row_wise", "table_row_wise", "grid_shard")


def codecs(exchange: str) -> QuantizedCommCodecs | None:
    """Codecs of one all-to-all of pooled embeddings for ``partition.exchange``; None: float32 as it is."""
    if exchange == "fp32":
        return None
    return get_qcomm_codecs(QCommsConfig(forward_precision=_FORWARD[exchange], backward_precision=CommType.BF16))


def flat_codecs(exchange: str, plan: Plan) -> dict[str, QuantizedCommCodecs] | None:
    """Codecs of a flat model's collectives by TorchRec's name; ConfigError naming tables that cannot travel so."""
    if exchange == "fp32":
        return None
    summed = [name for name, table in plan.tables.items() if table.sharding in _SUMMED]
    if exchange == "int8" and summed:
        raise ConfigError(
            f"partition.exchange is int8, but the row-wise tables {', '.join(summed)} are summed on their way, which "
            "int8 cannot do",
            hint="partition.exchange=bf16, or plan.sharding_types=[data_parallel,table_wise,column_wise]",
        )
    made = {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs(exchange)}
    if exchange != "int8":
        made[CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name] = codecs(exchange)
    return {name: codec for name, codec in made.items() if codec is not None}
