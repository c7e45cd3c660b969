"""Tables of any width on a CPU: TorchRec and FBGEMM refuse widths that CUDA kernels cannot move, on every device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torchrec.distributed import batched_embedding_kernel as torchrec

_STEP = 4


@contextmanager
def any_width(device: torch.device) -> Iterator[None]:
    """Within: kernels of ``device`` are built for tables of any width, if it is a CPU, whose kernels take them all.

    On a GPU ``config.checks`` refuses such a width before anything starts.
    """
    if device.type != "cpu":
        yield
        return
    check, layout = torchrec._assert_local_cols_divisible_by_4, fbgemm.construct_split_state

    def host_layout(specs: Sequence[Any], rowwise: bool, *others: Any, **named: Any) -> Any:
        """Where the values of each table (``specs``: rows, width, ..) begin in one piece of host memory."""
        if all(width % _STEP == 0 for _, width, *_ in specs):
            return layout([*specs], rowwise, *others, **named)
        sizes = [rows if rowwise else rows * width for rows, width, *_ in specs]
        starts = [0, *accumulate(sizes)]
        return fbgemm.SplitState(
            dev_size=0,
            host_size=starts[-1],
            uvm_size=0,
            placements=[EmbeddingLocation.HOST] * len(sizes),
            offsets=starts[:-1],
        )

    torchrec._assert_local_cols_divisible_by_4 = lambda config: None
    fbgemm.construct_split_state = host_layout
    try:
        yield
    finally:
        torchrec._assert_local_cols_divisible_by_4, fbgemm.construct_split_state = check, layout
