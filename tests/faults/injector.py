"""Passing faults at the lowest seams a process has: the calls to the operating system, or the requests to a store."""

import builtins
import errno
import io
import os
import socketserver
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch

OPERATIONS = ("read", "write", "list", "delete", "rename", "thread", "allocate")
NO_THREAD = "can't start new thread"


class Injector:
    """Fails the next ``count`` operations of one kind after ``arm``; ``met``: how many did fail."""

    def __init__(self):
        self.lock = threading.Lock()
        self.disarm()

    def arm(self, operation, count):
        """From now on the next ``count`` of ``operation`` fail."""
        with self.lock:
            self.operation, self.left = operation, count

    def disarm(self):
        """Nothing fails any more; what was met is forgotten."""
        with self.lock:
            self.operation, self.left, self.met = None, 0, 0

    def takes(self, operation):
        """Whether this ``operation`` fails; it is counted."""
        with self.lock:
            if operation != self.operation or not self.left:
                return False
            self.left -= 1
            self.met += 1
            return True

    def pass_or_fail(self, operation, path=""):
        """OSError (EIO) where this one fails, MemoryError for an allocation, RuntimeError for a thread."""
        if self.takes(operation):
            if operation == "allocate":
                raise MemoryError("told to by the test")
            if operation == "thread":
                raise RuntimeError(NO_THREAD)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path) or None)


class Faulty:
    """An open file whose reads and writes may fail."""

    def __init__(self, inner, injector):
        self.__dict__["inner"], self.__dict__["injector"] = inner, injector

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.inner.close()

    def __iter__(self):
        return iter(self.inner)

    def read(self, *args):
        self.injector.pass_or_fail("read")
        self.injector.pass_or_fail("allocate")
        return self.inner.read(*args)

    def readinto(self, buffer):
        self.injector.pass_or_fail("read")
        return self.inner.readinto(buffer)

    def write(self, data):
        self.injector.pass_or_fail("write")
        return self.inner.write(data)


def _under(root, path, dir_fd=None):
    try:
        if isinstance(path, int):
            path = REAL["readlink"](f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = REAL["readlink"](f"/proc/self/fd/{dir_fd}")
        return os.fspath(path).startswith(root)
    except (OSError, TypeError):
        return False


REAL = {"readlink": os.readlink}
BY_NAME = {
    "stat": "list",
    "lstat": "list",
    "scandir": "list",
    "listdir": "list",
    "mkdir": "write",
    "fsync": "write",
    "unlink": "delete",
    "remove": "delete",
    "rmdir": "delete",
    "rename": "rename",
    "replace": "rename",
    "link": "rename",
}


@contextmanager
def disk_seams(root, injector):
    """Faults of everything that lies below the folder ``root``."""
    with ExitStack() as stack:
        for name, operation in BY_NAME.items():
            stack.enter_context(mock.patch.object(os, name, _call(getattr(os, name), operation, root, injector)))
        stack.enter_context(mock.patch.object(os, "open", _os_open(os.open, root, injector)))
        opened = _open(io.open, root, injector)
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))
        yield


def _call(real, operation, root, injector):
    def call(path=".", *args, **more):
        if injector.left and _under(root, path, more.get("dir_fd", more.get("src_dir_fd"))):
            injector.pass_or_fail(operation, path)
        return real(path, *args, **more)

    return call


def _os_open(real, root, injector):
    def call(path, flags, *args, **more):
        if injector.left and _under(root, path, more.get("dir_fd")):
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            injector.pass_or_fail("write" if changes else "read", path)
        return real(path, flags, *args, **more)

    return call


def _open(real, root, injector):
    def call(path, mode="r", *args, **more):
        if not _under(root, path):
            return real(path, mode, *args, **more)
        if not isinstance(path, int):
            injector.pass_or_fail("write" if set(mode) & set("wax+") else "read", path)
        file = real(path, mode, *args, **more)
        return Faulty(file, injector) if "b" in mode else file

    return call


class Requests:
    """For ``tests.checkpoint.s3.Proxy``: the faults of an object store, by what a request asks for."""

    KINDS = {"read": "cut", "write": 503, "list": 500, "delete": 503}

    def __init__(self, injector):
        self.injector = injector

    @property
    def kind(self):
        """How the request fails that ``hits`` has just picked."""
        return self.KINDS[self.injector.operation]

    def hits(self, method, path):
        """Whether this request fails."""
        if method == "HEAD" or (method == "GET" and ("list-type" in path or "?" in path)):
            operation = "list"
        elif method == "DELETE" or (method == "POST" and "delete" in path):
            operation = "delete"
        else:
            operation = "read" if method == "GET" else "write"
        return self.injector.takes(operation)


@contextmanager
def machine_seams(injector):
    """Faults of memory and threads; a server that runs in this process for the test is spared."""
    with ExitStack() as stack:
        start = threading._start_new_thread

        def thread(function, *args, **more):
            target = getattr(getattr(function, "__self__", None), "_target", None)
            if not isinstance(getattr(target, "__self__", None), socketserver.BaseServer):
                injector.pass_or_fail("thread")
            return start(function, *args, **more)

        stack.enter_context(mock.patch.object(threading, "_start_new_thread", thread))
        for module in (np, torch):
            for name in ("empty", "zeros", "ones", "full", "arange", "stack", "empty_like", "zeros_like"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, _allocating(getattr(module, name), injector)))
        for name in ("from_numpy", "cat", "frombuffer"):
            stack.enter_context(mock.patch.object(torch, name, _allocating(getattr(torch, name), injector)))
        for name in ("concatenate", "frombuffer"):
            stack.enter_context(mock.patch.object(np, name, _allocating(getattr(np, name), injector)))
        yield


def _allocating(real, injector):
    def call(*args, **more):
        injector.pass_or_fail("allocate")
        return real(*args, **more)

    return call
