"""Errors of a store, with hints: it is full, refuses access, is in use, or does not answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import ArtifactError, FullDiskError, LaunchError, NightjarError, UnreachableError, is_full

_REFUSALS = (errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def disk_errors(
    what: str, option: str = "store=", *, doing: str = "writing", place: str = "the store"
) -> Iterator[None]:
    """Turn a full disk into a FullDiskError, and a refusal into an ArtifactError, about ``doing`` ``what``.

    ``option``: how the user chooses another place, for the hint; "" if another place does not help. ``place``: what
    holds ``what``, in words.
    """
    try:
        yield
    except OSError as error:
        # Errors of object stores and file servers may have no errno, only the words.
        if is_full(error) or "No space left" in str(error):
            raise FullDiskError(
                f"no space left on {place}'s disk while {doing} {what}",
                hint=f"free space there, or {option}<another fsspec URL>; no partial output was kept",
            ) from error
        if isinstance(error, PermissionError) or error.errno in _REFUSALS:
            # Object stores set no errno.
            reason = os.strerror(error.errno) if error.errno else str(error)
            hint = "run the same command as a user who may write there"
            if option:
                hint = f"{option}<an fsspec URL you may write to>"
            raise ArtifactError(f"{place} refuses {doing} {what}: {reason}", hint=hint) from error
        raise


class TakenError(LaunchError):
    """Another process is first."""


def taken(what: str, holder: str, where: str, hint: str) -> TakenError:
    """Return the error if another process is first: ``what`` happens already, because ``holder`` holds ``where``."""
    return TakenError(f"{what}: {holder} holds {where}", hint=hint)


@contextmanager
def reachable(where: str) -> Iterator[None]:
    """Turn errors of the store into UnreachableError, except a missing file, a bad sector or a NightjarError."""
    try:
        yield
    except (NightjarError, FileNotFoundError):
        raise
    except Exception as error:
        # Any other class counts: object store clients have their own for a cut connection or a timeout.
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        raise UnreachableError(
            f"{where} cannot be read: {type(error).__name__}: {error}",
            hint="run the same command again once the store answers; nothing was changed",
        ) from error
