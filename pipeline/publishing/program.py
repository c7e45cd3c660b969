"""The dense part of a version: a ``torch.export`` program from dense features and embeddings to logits.

It is for programs other than ours, which build the dense part themselves (``dense.py``). Whoever opens one with
``torch.export.load`` trusts who wrote it: such an archive can run code.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from pipeline.core.errors import ArtifactError
from pipeline.core.logs import hide_tracing_advice
from pipeline.core.retrying import passes
from pipeline.store.artifacts import Draft

PROGRAM = "dense.pt2"
# Do not use 0 or 1, which torch would specialise on.
_EXAMPLE_ROWS = 3
# Entries of an archive that Nightjar writes: raw tensors, JSON, marks of the format.
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
# Operators on tensors. Another package's ranking model may use any operator that computes; ``_computes`` checks what
# they must not do. Operators that take unchecked strides or pointers are left out by name.
_ATEN = re.compile(
    r"torch\.ops\.aten\.("
    r"(?!as_strided|cudnn_|fbgemm_|miopen_|mkldnn_|quantized_|resize|segment_reduce|sparse_)[A-Za-z]\w*"
    r"|_assert_scalar|_assert_tensor_metadata|_log_softmax|_shape_as_tensor|_softmax|_to_copy|_unsafe_view"
    r"|__and__|__lshift__|__or__|__rshift__|__xor__)\.(\w+)"
)
# Operators that write only to a tensor of the program.
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
# Operators whose text is not a file name but an equation, a mode or the message of an assertion.
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
# Parameters have the names of features: anything that torch can put between double quotes.
_WORD, _PATH = re.compile(r"[A-Za-z_]\w*"), re.compile(r'[^"\\\x00-\x1f\x7f]*')
# Values to empty, by key: guards, which are lines of Python, and records of the exported code.
_CLEARED: dict[str, Any] = {"metadata": {}, "guards_code": [], "treespec_namedtuple_fields": {}}
_NUMBER = re.compile(r"-?Infinity|NaN")
# Patterns of the texts in our programs, by key. Names become lines of Python when torch makes a module of the program.
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
# Kinds of nodes in the tree of a program's arguments: a leaf, and the containers.
_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
Program = Callable[..., Tensor]


def write_program(
    draft: Draft, module: nn.Module, dense: int, embeddings: tuple[int, ...], events: Sequence[int] = ()
) -> None:
    """Export ``module``: (dense [b, n] float32, embeddings [b, ...] float32, *events) -> logits [b] or [b, T].

    Args:
        draft: The version.
        module: A ``DenseModel``, or an ensemble of some.
        dense: Number of dense features.
        embeddings: Shape of a sample's embeddings.
        events: The width of each sequence's events. The program takes for each of them the embeddings of all events
            [n, width], sample by sample, and the sample of each, [n] int64.
    """
    rows = torch.export.Dim("rows")
    example = [torch.zeros(_EXAMPLE_ROWS, dense), torch.zeros(_EXAMPLE_ROWS, *embeddings)]
    shapes: list[dict[int, Any]] = [{0: rows}, {0: rows}]
    for number, width in enumerate(events):
        count = torch.export.Dim(f"events{number}")
        samples = torch.arange(_EXAMPLE_ROWS).repeat_interleave(number + 2)
        example += [torch.zeros(len(samples), width), samples]
        shapes += [{0: count}, {0: count}]
    # Torch takes *events for one argument.
    dynamic_shapes = (*shapes[:2], tuple(shapes[2:])) if events else tuple(shapes)
    hide_tracing_advice()
    with torch.no_grad():
        program = torch.export.export(module.eval(), tuple(example), dynamic_shapes=dynamic_shapes)
    # Torch would pickle the example inputs.
    program.example_inputs = None
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                # The trace holds lines of this source, and its folder on this machine.
                node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with draft.open(PROGRAM) as sink:
        sink.write(buffer.getvalue())


def read_program(path: Path) -> Program:
    """Read what ``write_program`` of an earlier release wrote, whose versions hold nothing else to build from.

    Raises:
        ArtifactError: It is no such program.
    """
    # torch.export.load is made for trusted archives: pickled objects, expressions, guards and libraries in an archive
    # can run code, and an operator may be any function of torch. So load a rebuilt archive that has only the entries
    # and names that write_program writes.
    try:
        module = torch.export.load(io.BytesIO(_rebuild_archive(path))).module()
    # Torch, zipfile and json raise many kinds of errors for an archive that is cut off or changed.
    except Exception as error:
        if isinstance(error, ArtifactError) or passes(error):
            raise
        raise ArtifactError(f"{path} is not an exported program: {error}", hint="publish it again") from error
    return module


def _rebuild_archive(path: Path) -> bytes:
    # Raise ArtifactError if the archive holds more than data.
    rebuilt = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(rebuilt, "w") as copy:
        root = next(iter(archive.namelist()), "").partition("/")[0]
        for entry in archive.infolist():
            folder, _, name = entry.filename.partition("/")
            # The sample would be a pickle, so it is never read; the copy has an empty one.
            data = b"" if name == _SAMPLE else archive.read(entry)
            if folder != root or not _ENTRY.fullmatch(name):
                raise _unsafe(path, f"entry {entry.filename[:80]!r}")
            if name == _SAMPLE and entry.file_size:
                raise _unsafe(path, f"a pickled object ({name})")
            if name == "archive_format" and data != b"pt2":
                raise _unsafe(path, f"format {data[:20]!r}")
            if name.endswith("_config.json"):
                _check_tensors(path, json.loads(data))
            if name == _MODEL:
                model = _clear(json.loads(data))
                _check(path, "", model)
                data = json.dumps(model).encode()
            copy.writestr(entry.filename, data)
        if f"{root}/archive_format" not in archive.namelist():
            raise _unsafe(path, "no mark of its format")
    return rebuilt.getvalue()


def _check_tensors(path: Path, config: dict[str, Any]) -> None:
    # Raise ArtifactError for tensors that are pickled or stored elsewhere.
    for name, payload in config["config"].items():
        if payload.get("use_pickle") or not _TENSOR.fullmatch(payload["path_name"]):
            raise _unsafe(path, "pickled tensors")
        if not _PATH.fullmatch(name):
            raise _unsafe(path, f"tensor {name!r:.80}")
        _check(path, "", payload["tensor_meta"])


def _clear(node: Any) -> Any:
    # Return the JSON with the values of _CLEARED emptied wherever they occur.
    if isinstance(node, list):
        return [_clear(item) for item in node]
    if not isinstance(node, dict):
        return node
    cleared = {}
    for key, value in node.items():
        cleared[key] = _CLEARED[key] if key in _CLEARED else _clear(value)
    return cleared


def _check(path: Path, key: str, node: Any) -> None:
    # Raise ArtifactError for anything in node, the value of key, that write_program does not write.
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
    # Whether target is an operator of torch that computes tensors from tensors and numbers, and does nothing else.
    parts = _ATEN.fullmatch(target)
    if parts is None:
        return False
    name, overload = parts[1], parts[2]
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(operator, OpOverload):
        return False
    schema = operator._schema
    # An operator that writes to its arguments could write to memory that another operator has mapped.
    if schema.is_mutable and name not in _IN_PLACE:
        return False
    # from_file maps any file and writes to it. So of the operators that take text, allow only those whose text is known
    # to be harmless.
    for argument in schema.arguments:
        kind = str(argument.type)
        if "Storage" in kind or ("str" in kind and name not in _WITH_TEXT):
            return False
    return True


def _is_plain_tree(saved: Any) -> bool:
    # Whether the JSON of a pytree holds only tuples, lists and dictionaries of leaves. For any other kind of node, and
    # for a context that asks for it, torch imports a module and takes attributes of it.

    def plain(node: Any) -> bool:
        if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"}:
            return False
        known = node["type"] in _TREE_TYPES and node["context"] in (None, "null", "[]")
        return known and all(map(plain, node["children_spec"]))

    return isinstance(saved, list) and len(saved) == 2 and saved[0] == 1 and plain(saved[1])


def _unsafe(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} holds {what}, which could run code when opened", hint="publish it again")
