"""The dense part of a version: a ``torch.export`` program from dense features and embeddings to logits.

The archive holds JSON and raw weights. torch can also write pickled objects into one, which could run code when opened.
This module writes none, and refuses an archive that holds one before torch reads it.
"""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ArtifactError
from pipeline.store import Draft

PROGRAM = "dense.pt2"
_EXAMPLE_ROWS = 3  # not 0 or 1, which torch would specialise on
Program = Callable[..., Tensor]


def write_program(
    draft: Draft, module: nn.Module, dense: int, embeddings: tuple[int, ...], events: Sequence[int] = ()
) -> None:
    """Write ``module``: (dense [b, n] float32, ``embeddings`` [b, ...] float32) -> logits [b] or [b, T].

    ``events``: the width of each sequence's events. The program then takes for each of them the embeddings of all
    events [n, width], sample by sample, and the sample of each, [n] int64.
    """
    rows = torch.export.Dim("rows")
    example = [torch.zeros(_EXAMPLE_ROWS, dense), torch.zeros(_EXAMPLE_ROWS, *embeddings)]
    shapes: list[dict[int, Any]] = [{0: rows}, {0: rows}]
    for number, width in enumerate(events):
        count = torch.export.Dim(f"events{number}")
        own = torch.arange(_EXAMPLE_ROWS).repeat_interleave(number + 2)
        example += [torch.zeros(len(own), width), own]
        shapes += [{0: count}, {0: count}]
    with torch.no_grad(), _quiet():
        taken = (*shapes[:2], tuple(shapes[2:])) if events else tuple(shapes)  # those of ``*events`` are one argument
        program = torch.export.export(module.eval(), tuple(example), dynamic_shapes=taken)
    program.example_inputs = None  # it would be pickled
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # the lines of this source and its folder on this machine
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with draft.open(PROGRAM) as sink:
        sink.write(buffer.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the advice that torch logs when torchrec asks whether it is tracing."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_program(path: Path) -> Program:
    """Read what ``write_program`` wrote; ArtifactError if it is no program, or could run code."""
    try:
        if problem := _pickled(path):
            raise ArtifactError(f"{path} holds {problem}, which could run code when opened", hint="publish it again")
        module = torch.export.load(path).module()
    except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} is not an exported program: {error}", hint="publish it again") from error
    return module


def _pickled(path: Path) -> str:
    """The pickled part of the archive; "" if there is none."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]
            if name.endswith("_config.json"):
                payloads = json.loads(archive.read(entry))["config"]
                if any(payload.get("use_pickle") for payload in payloads.values()):
                    return f"pickled tensors ({name})"
            elif name.endswith(".pt") and entry.file_size:
                return f"a pickled object ({name})"
            elif "_obj_" in name.rpartition("/")[2]:
                return f"an object of a class ({name})"
    return ""
