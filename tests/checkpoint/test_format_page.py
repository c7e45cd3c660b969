"""A reader written from docs/checkpoint-format.md alone (``read_checkpoint``), checked against Nightjar's own.

Between the two lines nothing of Nightjar is used: only json, struct, urllib, numpy and zstandard.
"""

import json
import re
import struct
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import zstandard

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}
COMPRESSED = {"float16": "<f2", "bfloat16": "<u2", "uint8": "u1", "float32": "<f4"}

# ---------------------------------------------------------------------------------------- the reader


def read_safetensors(data):
    """({name: (numpy array, is bf16)}, metadata)."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        found[name] = (array, entry["dtype"] == "BF16")
    return found, metadata


def to_float(array, is_bf16):
    if is_bf16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def read_ids(data, count):
    numbers, value, shift = [], 0, 0
    for byte in data.tolist():
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value, shift = 0, 0
    assert len(numbers) == count
    return np.cumsum(numbers)


def read_codes(packed, bits, columns):
    codes = np.empty((len(packed), columns), np.float32)
    wide = packed.astype(np.uint64)
    for j in range(columns):
        if bits in (3, 6):
            at = bits * (j // 8)
            word = sum(wide[:, at + i] << 8 * i for i in range(bits))
            codes[:, j] = word >> bits * (j % 8) & (2**bits - 1)
        else:
            per = 8 // bits
            codes[:, j] = wide[:, j // per] >> bits * (j % per) & (2**bits - 1)
    return codes


def read_chunk(data):
    """(table, first column, ids, weights, {state: values})."""
    tensors, meta = read_safetensors(data)
    assert meta["format"] == "nightjar-rows-1"
    for name, (dtype, shape, *planes) in json.loads(meta.get("compressed", "{}")).items():
        with zstandard.ZstdDecompressor().stream_reader(tensors[name][0].tobytes(), read_across_frames=True) as frames:
            raw = frames.read()
        if planes:
            raw = np.frombuffer(raw, np.uint8).reshape(planes[0], -1).T.tobytes()
        tensors[name] = (np.frombuffer(raw, COMPRESSED[dtype]).reshape(shape), dtype == "bfloat16")
    count, columns, first = int(meta["rows"]), int(meta["columns"]), int(meta["first"])
    ids = first + np.arange(count) if meta["ids"] == "range" else read_ids(tensors["ids"][0], count)
    if meta["weight"] in ("fp32", "fp16"):
        weight = to_float(*tensors["weight"])
    else:
        bits, unit = int(meta["weight"][1:]), float.fromhex(meta["unit"])
        codes = read_codes(tensors["weight"][0], bits, columns)
        low, span = (tensors[f"weight.{part}"][0].astype(np.float32) for part in ("low", "span"))
        scale = span * np.float32(unit / (2**bits - 1))
        weight = (low * np.float32(unit))[:, None] + codes * scale[:, None]
    states = {name[6:]: to_float(*value) for name, value in tensors.items() if name.startswith("state.")}
    return meta["table"], int(meta["column"]), ids, weight, states


def read_checkpoint(path):
    """{table: (weights [rows, dim], {state: [rows]})} of the checkpoint in directory ``path``."""
    manifest = json.loads((path / "manifest.json").read_text())
    order = [path]
    for name in reversed(manifest["summary"]["parents"]):
        order.insert(0, path.parent / name)
        if json.loads((order[0] / "manifest.json").read_text())["summary"]["type"] == "baseline":
            break
    tables = {}
    for place in order:
        summary = json.loads((place / "manifest.json").read_text())["summary"]
        index = json.loads((place / summary.get("index", "index.json")).read_text())
        assert index["format"] == 2
        fresh = {}
        for entry in index["files"]:
            rows, dim = index["tables"][entry["table"]]["rows"], index["tables"][entry["table"]]["dim"]
            table, column, ids, weight, states = read_chunk((place / entry["file"]).read_bytes())
            assert (table, len(ids), ids[0], ids[-1]) == tuple(entry[k] for k in ("table", "rows", "first", "last"))
            assert unquote(Path(entry["file"]).parts[1]) == table
            whole = tables.setdefault(table, (np.full((rows, dim), np.nan, np.float32), {}))
            columns = weight.shape[1]
            whole[0][ids, column : column + columns] = weight
            for name, values in states.items():
                sums = fresh.setdefault((table, name), np.zeros(rows, np.float32))
                sums[ids] += values * np.float32(columns / dim)
        for (table, name), sums in fresh.items():
            touched = np.unique(np.concatenate(changed(place, index, table)))
            tables[table][1].setdefault(name, np.full(len(sums), np.nan, np.float32))[touched] = sums[touched]
    return tables


def changed(place, index, table):
    return [read_chunk((place / e["file"]).read_bytes())[2] for e in index["files"] if e["table"] == table]


# ------------------------------------------------------------------------------------ end of the reader

SCHEMA = re.compile(r"\| `schema_version` \| (\d+)")
PAGE = (Path(__file__).parents[2] / "docs/checkpoint-format.md").read_text()


def test_the_page_says_the_schema_version_that_manifests_hold(tmp_path):
    from tests.checkpoint.built import new_store, put

    assert SCHEMA.search(PAGE).group(1) == str(put(new_store(tmp_path), 1).schema_version)


def compare(store, artifact):
    from tests.checkpoint.built import ROWS, restored

    mine = read_checkpoint(Path(store.full(artifact.path)))
    assert set(mine) == set(ROWS)
    for name, _, weight, sums in restored(store, artifact):
        # Restoring may fuse a multiplication with an addition: one unit in the last place of the largest value.
        np.testing.assert_allclose(mine[name][0], weight.numpy(), rtol=0, atol=6e-8)
        np.testing.assert_array_equal(mine[name][1]["adagrad_sum"], sums.numpy())


@pytest.mark.parametrize("coding", ["fp32", "fp16", "q8", "q6", "q4", "q3", "q2", "q2+q3+q4+q6+q8"])
def test_the_reader_gets_the_rows_that_a_restore_gets(tmp_path, coding):
    from tests.checkpoint.built import CODINGS, new_store, put

    store = new_store(tmp_path)
    put(store, 1, coding=CODINGS[coding])
    put(store, 2, [1], 0.3, CODINGS[coding])
    compare(store, put(store, 3, [1, 2], 0.3, CODINGS[coding]))


def test_the_reader_knows_column_shards_and_compacted_checkpoints(tmp_path):
    from pipeline.checkpoint.compact import compact
    from tests.checkpoint.built import CODINGS, DIM, new_store, put

    store = new_store(tmp_path)
    put(store, 1, coding=CODINGS["q4"], cuts=(0, 6, DIM))
    middle = put(store, 2, [1], 0.3, CODINGS["q8"], cuts=(0, 6, DIM))
    last = put(store, 3, [1, 2], 0.3)
    compare(store, last)
    compact(store, middle)
    store.fs.rm(store.full("runs/r/checkpoints/0123456789/step-00000001"), recursive=True)
    compare(store, last)
    compare(store, compact(store, last))


def test_the_worked_example_is_what_nightjar_writes_and_what_the_page_says():
    import io

    import torch

    from pipeline.checkpoint.chunks import RowBlock, TableCoding, write_block
    from pipeline.checkpoint.quantise import Coding

    weight = torch.tensor([[0.0, 0.5, 1.0], [-1.0, 0.25, 2.0], [0.1, 0.1, 0.1]])
    block = RowBlock("C1", np.array([3, 5, 200]), 0, weight, {"adagrad_sum": torch.tensor([0.5, 1.0, 2.0])})
    sink = io.BytesIO()
    write_block(sink, block, TableCoding(Coding(4), "bf16"))
    data = sink.getvalue()
    (example,) = re.findall(r"```\n(03 02 c3 01.*?)```", PAGE, re.DOTALL)
    page = bytes.fromhex("".join(re.match(r"[0-9a-f ]+?(?=  +\D)", line)[0] for line in example.splitlines()))
    assert data[8 + int.from_bytes(data[:8], "little") :] == page
    _, column, ids, rows, states = read_chunk(data)
    assert (column, ids.tolist(), states["adagrad_sum"].tolist()) == (0, [3, 5, 200], [0.5, 1.0, 2.0])
    np.testing.assert_allclose(rows, [[0, 8 / 15, 1], [-1, 0.2, 2], [0.1, 0.1, 0.1]], atol=1e-4)


def test_the_page_names_every_key(tmp_path):
    from pipeline.checkpoint.compact import compact
    from tests.checkpoint.built import new_store, put

    store = new_store(tmp_path)
    put(store, 1)
    done = compact(store, put(store, 2, [1], 0.2))
    record = json.loads(store.fs.cat_file(store.full(f"{done.path}/manifest.json")))
    named = set(re.findall(r"`([a-z_.]+)`", PAGE))
    assert set(record) <= named
    assert set(record["summary"]) <= named
    index = json.loads(store.fs.cat_file(store.full(f"{done.path}/{done.summary['index']}")))
    assert all(f'"{key}"' in PAGE for key in {*index, *index["files"][0]})
    state = json.loads(store.fs.cat_file(store.full(f"{done.path}/state.json")))
    assert {f"train.{key}" for key in state["train"]} | {"optimizer"} <= named
