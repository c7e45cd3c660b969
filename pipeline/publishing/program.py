"""The dense part of a version: a ``torch.export`` program from dense features and embeddings to logits.

It is for programs other than ours, which build the dense part themselves (``dense.py``). Whoever opens one with
``torch.export.load`` trusts who wrote it: such an archive can run code.
"""

from __future__ import annotations

import io
import json
import logging
import re
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
# What an archive of ours has: raw tensors, JSON, marks of its format.
_MODEL, _SAMPLE = "models/model.json", "data/sample_inputs/model.pt"
_ENTRY = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|models/model\.json|data/sample_inputs/model\.pt|archive_(format|version)|byteorder"
    r"|\.data/(version|serialization_id)|\.format_version|\.storage_alignment"
)
_TENSOR = re.compile(r"(weight|tensor)_\d+")
# Tensor operators, autocast and no_grad around some, arithmetic of sizes.
_OPERATOR = re.compile(
    r"torch\.ops\.aten\.\w+\.\w+|torch\.ops\.higher_order\.wrap_with_(autocast|set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|mod|neg|eq|ne|ge|gt|le|lt|and_)|torch\.sym_(max|min|not|ite|sum)"
)
_EXPRESSION = re.compile(
    r"(?:(?:Symbol|Integer|Add|Mul|Max|Min|Mod|FloorDiv|CleanDiv)\(|'[a-z]+\d+'"
    r"|(?:positive|nonnegative|integer)=(?:True|False)|[-\d(), ])*"
)
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
    """Read what ``write_program`` of an earlier release wrote, whose versions hold nothing else to build from.

    ``torch.export.load`` is made for archives that one trusts: pickled objects, expressions, guards and libraries in
    one can run code, and an operator may be any function of torch. So it gets an archive made anew, of the entries and
    names that ``write_program`` writes, and nothing else.

    Raises:
        ArtifactError: It is no such program.
    """
    try:
        module = torch.export.load(io.BytesIO(_rebuilt(path))).module()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path} is not an exported program: {error}", hint="publish it again") from error
    return module


def _rebuilt(path: Path) -> bytes:
    """The archive at ``path`` without what could run code; ArtifactError where it has more than data."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(made, "w") as copy:
        root = next(iter(archive.namelist()), "").partition("/")[0]
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            data = b"" if name == _SAMPLE else archive.read(entry)
            if folder != root or not _ENTRY.fullmatch(name):
                raise _unsafe(path, f"entry {entry.filename[:80]!r}")
            if name == _SAMPLE and entry.file_size:
                raise _unsafe(path, f"a pickled object ({name})")
            if name == "archive_format" and data != b"pt2":
                raise _unsafe(path, f"format {data[:20]!r}")
            if name.endswith("_config.json"):
                _check_config(path, json.loads(data))
            if name == _MODEL:
                data = json.dumps(_checked(path, json.loads(data))).encode()
            copy.writestr(entry.filename, data)
        if f"{root}/archive_format" not in archive.namelist():
            raise _unsafe(path, "no mark of its format")
    return made.getvalue()


def _check_config(path: Path, config: dict[str, Any]) -> None:
    """ArtifactError for tensors that are pickled, or lie elsewhere."""
    for payload in config["config"].values():
        if payload.get("use_pickle") or not _TENSOR.fullmatch(payload["path_name"]):
            raise _unsafe(path, "pickled tensors")


def _checked(path: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The program without guards, which are lines of Python, and what is known of the code that was exported."""

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(each) for each in node]
        if not isinstance(node, dict):
            return node
        for key, value in node.items():
            if key in ("target", "as_operator") and not (isinstance(value, str) and _OPERATOR.fullmatch(value)):
                raise _unsafe(path, f"operator {value!r:.80}")
            if key == "expr_str" and not (isinstance(value, str) and _EXPRESSION.fullmatch(value)):
                raise _unsafe(path, f"expression {value!r:.80}")
            if key in ("as_custom_obj", "custom_obj", "as_script_object"):
                raise _unsafe(path, f"an object of a class ({key})")
        return {key: {} if key == "metadata" else visit(value) for key, value in node.items()}

    checked: dict[str, Any] = visit(model)
    return {**checked, "guards_code": []} if "guards_code" in checked else checked


def _unsafe(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} holds {what}, which could run code when opened", hint="publish it again")
