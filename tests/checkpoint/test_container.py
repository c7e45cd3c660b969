"""Files are plain safetensors, and damaged or hostile ones are refused without running anything."""

import io
import pickle

import pytest
import torch
from safetensors.torch import load, save

from pipeline.checkpoint.container import read_tensors, write_tensors
from pipeline.core.errors import ArtifactError

TENSORS = {
    "codes": torch.arange(12, dtype=torch.uint8).view(3, 4),
    "state": torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "weight": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
}


def written() -> bytes:
    sink = io.BytesIO()
    write_tensors(sink, TENSORS, {"table": "C1"})
    return sink.getvalue()


def test_the_library_reads_what_we_write_and_we_read_what_it_writes() -> None:
    found = load(written())
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    theirs = save({name: tensor.contiguous() for name, tensor in TENSORS.items()}, {"table": "C1"})
    tensors, metadata = read_tensors(bytearray(theirs), "x")
    assert metadata == {"table": "C1"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("cut", [0, 4, 20, 60, -1])
def test_a_truncated_file_is_refused_by_name(cut: int) -> None:
    with pytest.raises(ArtifactError, match=r"rows/C1/0\.safetensors is not a whole safetensors file"):
        read_tensors(bytearray(written()[:cut]), "rows/C1/0.safetensors")


def test_a_pickled_bomb_is_refused_and_never_runs(tmp_path) -> None:
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    with pytest.raises(ArtifactError, match="not a whole safetensors file"):
        read_tensors(bytearray(pickle.dumps(Bomb())), "evil")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{", b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', b'{"a":{"dtype":"X"}}', b'{"a":1}'],
)
def test_a_lying_header_is_refused(header: bytes) -> None:
    with pytest.raises(ArtifactError):
        read_tensors(len(header).to_bytes(8, "little") + header + b"\0" * 8, "evil")
