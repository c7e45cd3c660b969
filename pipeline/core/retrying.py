"""One retry policy for all users of a store: which errors are temporary, and how often to try again.

Only idempotent operations are retried: reading, listing, writing a whole file at once, removing.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.core.errors import ArtifactError, NightjarError, PassingError

TRIES = 3
# Pauses of 0.2 and 0.8 s; object store clients wait longer before that.
FIRST_SECONDS, FACTOR = 0.2, 4.0
# CPython raises a plain RuntimeError that only this text tells apart.
NO_THREAD = "can't start new thread"

_PASSING_NAMES = (
    "EIO EAGAIN EINTR EBUSY ESTALE ENOMEM EMFILE ENFILE ENOBUFS ETIMEDOUT EREMOTEIO ECONNRESET ECONNABORTED "
    "ECONNREFUSED EHOSTUNREACH ENETUNREACH ENETRESET EPIPE ETXTBSY"
)
# Not every system defines all of them.
_PASSING = frozenset(getattr(errno, name) for name in _PASSING_NAMES.split() if hasattr(errno, name))
# Packages whose own errors mean that a request got no answer. Refusals are PermissionError or FileNotFoundError.
_CLIENTS = frozenset(
    ("botocore", "aiobotocore", "aiohttp", "urllib3", "requests", "http", "azure", "gcsfs", "google", "fsspec")
)
AGAIN = "run the same command again; committed artifacts are untouched"
Result = TypeVar("Result")
_here = threading.local()


def passes(error: BaseException) -> bool:
    """Whether ``error`` may be temporary: an error of the machine, the disk or the network, not of the data."""
    # Errors of API servers state whether they are temporary.
    if getattr(error, "passing", False):
        return True
    if isinstance(error, MemoryError | TimeoutError | asyncio.TimeoutError | ConnectionError):
        return True
    # Object stores' clients raise these for answers of the store, which would be the same at the next try.
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | NotADirectoryError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    if isinstance(error, RuntimeError) and NO_THREAD in str(error):
        return True
    return isinstance(error, Exception) and type(error).__module__.partition(".")[0] in _CLIENTS


def pause(error: BaseException, attempt: int) -> bool:
    """Wait before the try after number ``attempt`` (from 1); returns False at once if another try is pointless."""
    # There is no pause after the last try.
    if attempt >= TRIES or not passes(error):
        return False
    time.sleep(FIRST_SECONDS * FACTOR ** (attempt - 1))
    return True


def retried(work: Callable[[], Result], doing: str) -> Result:
    """Call ``work``, again if its error is temporary; the last error gets a note with ``doing``."""
    # Inside the ``work`` of another call there is only one try: the outermost call retries, so tries do not multiply.
    if getattr(_here, "retried", False):
        return work()
    attempt = 0
    while True:
        _here.retried = True
        try:
            return work()
        except Exception as error:
            attempt += 1
            _here.retried = False
            if not pause(error, attempt):
                # A note rather than a new exception, because callers catch FileNotFoundError and the like by class.
                if attempt > 1:
                    error.add_note(f"while {doing}, {attempt} times")
                raise
        finally:
            _here.retried = False


def explained(error: BaseException) -> NightjarError | None:
    """Return a message for the user if ``error`` is temporary or a refusal; None otherwise, or if it is one already."""
    message = " ".join(str(error).split())
    # ``retried`` notes what was being done, which an error's own text rarely says.
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, PermissionError):
        hint = "check the rights of this account there, and that its credentials have not expired"
        return ArtifactError(f"access was refused{where}: {message}", hint=hint)
    if isinstance(error, NightjarError) or not passes(error):
        return None
    if isinstance(error, MemoryError):
        return PassingError(f"there was not enough memory{where}: {message or 'MemoryError'}", hint=AGAIN)
    if isinstance(error, RuntimeError):
        limits = "ulimit -u and the container's pids limit say how many there may be"
        return PassingError(f"this machine starts no more threads: {message}", hint=f"{AGAIN}; {limits}")
    return PassingError(f"the disk or the store did not answer{where}: {type(error).__name__}: {message}", hint=AGAIN)
