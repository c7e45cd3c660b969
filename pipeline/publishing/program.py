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
from torch._ops import OpOverload

from pipeline.errors import ArtifactError
from pipeline.store.artifacts import Draft
from pipeline.store.retrying import passes

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
# Arithmetic of sizes, and autocast and no_grad around operators.
_OPERATOR = re.compile(
    r"torch\.ops\.higher_order\.wrap_with_(autocast|set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|floordiv|mod|neg|eq|ne|ge|gt|le|lt|and_)|torch\.sym_(max|min|not|ite|sum)"
)
# Operators on tensors. A ranking model of another package may have any that compute; ``_computes`` has what they must
# not do. Left out by name: what takes strides or pointers that nothing checks.
_ATEN = re.compile(
    r"torch\.ops\.aten\.("
    r"(?!as_strided|cudnn_|fbgemm_|miopen_|mkldnn_|quantized_|resize|segment_reduce|sparse_)[A-Za-z]\w*"
    r"|_assert_scalar|_assert_tensor_metadata|_log_softmax|_shape_as_tensor|_softmax|_to_copy|_unsafe_view"
    r"|__and__|__lshift__|__or__|__rshift__|__xor__)\.(\w+)"
)
# Those that write to a tensor of the program and to nothing else.
_IN_PLACE = frozenset(
    {
        "add_",
        "addcmul_",
        "clamp_",
        "clamp_min_",
        "copy_",
        "detach_",
        "div_",
        "fill_",
        "index_put_",
        "masked_fill_",
        "mul_",
        "relu_",
        "silu_",
        "sub_",
        "zero_",
    }
)
# Those whose text is no name of a file: an equation, a mode, what an assertion says.
_WITH_TEXT = frozenset(
    {
        "_assert_scalar",
        "conv1d",
        "conv2d",
        "div",
        "div_",
        "divide",
        "einsum",
        "gelu",
        "index_reduce",
        "linalg_matrix_norm",
        "linalg_norm",
        "meshgrid",
        "pad",
        "quantile",
        "scatter",
        "scatter_reduce",
        "searchsorted",
    }
)
_EXPRESSION = re.compile(
    r"(?:(?:Symbol|Integer|Add|Mul|Max|Min|Mod|FloorDiv|CleanDiv)\(|'[a-z]+\d+'"
    r"|(?:positive|nonnegative|integer)=(?:True|False)|[-\d(), ])*"
)
# Of parameters, which have names of features: whatever torch can put between double quotes.
_WORD, _PATH = re.compile(r"[A-Za-z_]\w*"), re.compile(r'[^"\\\x00-\x1f\x7f]*')
_NUMBER = re.compile(r"-?Infinity|NaN")
# By key, the texts that a program of ours has. Names become lines of Python when torch makes a module of the program.
_TEXTS = {
    "as_float": _NUMBER,
    "as_floats": _NUMBER,
    "as_name": _WORD,
    "as_string": re.compile(r"[ -~]{0,500}"),
    "buffer_name": _PATH,
    "dialect": re.compile(r"[A-Z_]+"),
    "forward_arg_names": _WORD,
    "fqn": _PATH,
    "name": re.compile(r"([A-Za-z_]\w*)?"),
    "parameter_name": _PATH,
    "tensor_constant_name": _PATH,
    "torch_version": re.compile(r"[\w.+<=-]*"),
    "type": re.compile("cpu"),
    "verifiers": re.compile(r"[A-Z_]+"),
}
# Kinds of nodes in the tree of a program's arguments: a leaf, and what holds others.
_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
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
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
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
    """Read what ``write_program`` of an earlier release wrote, whose versions hold nothing else to build from.

    ``torch.export.load`` is made for archives that one trusts: pickled objects, expressions, guards and libraries in
    one can run code, and an operator may be any function of torch. So it gets an archive made anew, of the entries and
    names that ``write_program`` writes, and nothing else.

    Raises:
        ArtifactError: It is no such program.
    """
    try:
        module = torch.export.load(io.BytesIO(_rebuilt(path))).module()
    except Exception as error:  # whatever torch, zipfile and json raise for one that is cut off or changed
        if isinstance(error, ArtifactError) or passes(error):
            raise
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
    for name, payload in config["config"].items():
        if payload.get("use_pickle") or not _TENSOR.fullmatch(payload["path_name"]):
            raise _unsafe(path, "pickled tensors")
        if not _PATH.fullmatch(name):
            raise _unsafe(path, f"tensor {name!r:.80}")
        _check(path, "", payload["tensor_meta"])


def _checked(path: Path, model: dict[str, Any]) -> dict[str, Any]:
    """The program without guards, which are lines of Python, and what is known of the code that was exported."""
    left_out: dict[str, Any] = {"metadata": {}, "guards_code": [], "treespec_namedtuple_fields": {}}

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {key: left_out[key] if key in left_out else plain(value) for key, value in node.items()}

    checked: dict[str, Any] = plain(model)
    _check(path, "", checked)
    return checked


def _check(path: Path, key: str, node: Any) -> None:
    """ArtifactError for anything below ``node``, the value of ``key``, that ``write_program`` does not write."""
    if isinstance(node, list):
        for each in node:
            _check(path, key, each)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name in ("as_custom_obj", "custom_obj", "as_script_object"):
                raise _unsafe(path, f"an object of a class ({name})")
            if not _WORD.fullmatch(name):
                raise _unsafe(path, f"key {name!r:.80}")
            _check(path, name, value)
    elif key in ("target", "as_operator"):
        if not (isinstance(node, str) and (_OPERATOR.fullmatch(node) or _computes(node))):
            raise _unsafe(path, f"operator {node!r:.80}")
    elif key == "expr_str":
        if not (isinstance(node, str) and _EXPRESSION.fullmatch(node)):
            raise _unsafe(path, f"expression {node!r:.80}")
    elif key in ("in_spec", "out_spec"):
        if not (isinstance(node, str) and _is_plain_tree(json.loads(node))):
            raise _unsafe(path, f"a tree of other things than tensors ({key})")
    elif isinstance(node, str) and not (key in _TEXTS and _TEXTS[key].fullmatch(node)):
        raise _unsafe(path, f"{key or 'text'} {node!r:.80}")


def _computes(target: str) -> bool:
    """Whether ``target`` is an operator of torch that gives tensors of tensors and numbers, and does nothing else.

    ``from_file`` maps any file and writes to it: of operators that take text, only those are let through whose text is
    known to be harmless. One that writes to its arguments could write to what another has mapped.
    """
    parts = _ATEN.fullmatch(target)
    if parts is None:
        return False
    name, overload = parts[1], parts[2]
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(operator, OpOverload):
        return False
    schema = operator._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    if schema.is_mutable and name not in _IN_PLACE:
        return False
    return not any("Storage" in kind or ("str" in kind and name not in _WITH_TEXT) for kind in kinds)


def _is_plain_tree(saved: Any) -> bool:
    """Whether ``saved``, the JSON of a pytree, has tuples, lists and dictionaries of leaves.

    Of any other kind of node, and of a context that says so, torch imports a module and takes attributes of it.
    """

    def plain(node: Any) -> bool:
        if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"}:
            return False
        known = node["type"] in _TREE_TYPES and node["context"] in (None, "null", "[]")
        return known and all(map(plain, node["children_spec"]))

    return isinstance(saved, list) and len(saved) == 2 and saved[0] == 1 and plain(saved[1])


def _unsafe(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} holds {what}, which could run code when opened", hint="publish it again")
