"""A kernel that refuses system calls of this process from now on, as a container's seccomp profile does."""

import ctypes
import errno
import platform
import struct

# By machine: AUDIT_ARCH, then the numbers of the calls (seccomp(2), syscalls(2)).
MACHINES = {
    "x86_64": (0xC000003E, {"io_uring_setup": 425, "io_setup": 206, "setpriority": 141, "fcntl": 72}),
    "aarch64": (0xC00000B7, {"io_uring_setup": 425, "io_setup": 0, "setpriority": 140, "fcntl": 25}),
}
O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|ABS, BPF_JMP|JEQ, BPF_JMP|JSET, BPF_RET
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(*names):
    """Refuse calls of ``MACHINES`` with EPERM, and ``direct`` (O_DIRECT for an open file) with EINVAL."""
    _, calls = MACHINES[platform.machine()]
    code = []
    for name in names:
        if name == "direct":  # fcntl(fd, F_SETFL, flags): the third argument lies at byte 32 of seccomp_data
            code += [(LOAD, 0, 0, 0), (EQUAL, 0, 5, calls["fcntl"]), (LOAD, 0, 0, 24), (EQUAL, 0, 3, 4)]
            code += [
                (LOAD, 0, 0, 32),
                (ANY_BIT, 0, 1, O_DIRECT[platform.machine()]),
                (RETURN, 0, 0, REFUSE | errno.EINVAL),
            ]
        else:
            code += [(LOAD, 0, 0, 0), (EQUAL, 0, 1, calls[name]), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code.append((RETURN, 0, 0, ALLOW))
    packed = b"".join(struct.pack("HBBI", *each) for each in code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(code), packed)), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set")
