"""CUDA without a GPU: tensors that have a device and a shape but no values, for which every wait is an error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class _NoCopiesBack(TorchDispatchMode):
    """Refuses copies from the device to the host: the host waits for them, and a fake tensor says nothing of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sources = [a for a in args if isinstance(a, torch.Tensor)]
        if func._overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            target, source = (out, sources[0]) if func._overloadpacket is torch.ops.aten._to_copy else sources[:2]
            if source.device.type == "cuda" and target.device.type == "cpu":
                raise AssertionError("the host waits for a copy from the device")
        return out


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside may be on device ``cuda``. Raises where tensors of two devices meet, or the host waits."""
    with FakeTensorMode(), _NoCopiesBack():
        yield
