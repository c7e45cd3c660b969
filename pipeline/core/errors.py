"""Error classes: one for each kind of failure that a user can cause or see, with its exit code.

A message says what was found and what was expected, and ``hint`` names the override or command that fixes it. The
command line prints both and exits with ``exit_code``, without a traceback.
"""

from __future__ import annotations

import errno
import signal

# Meanings of exit codes, for the command line's help.
EXIT_CODES = {
    0: "done",
    1: "unexpected fault",
    2: "configuration",
    3: "data",
    4: "no feasible plan",
    5: "a training guard stopped the run",
    6: "gate held",
    7: "corrupt or missing artifact",
    8: "launching failed, a rank was killed, or the store did not answer",
    9: "a study ended the trial early",
}
UNEXPECTED = 1
# Exit code of a process ended by a signal, to which the signal's number is added, as in shells.
SIGNALLED = 128


class NightjarError(Exception):
    """Base class of expected failures. Exit code 1 is for unexpected ones."""

    exit_code = UNEXPECTED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        return f"{self.message}\n  hint: {self.hint}"

    def to_json(self) -> dict[str, object]:
        """Return plain data that crosses a process boundary; ``from_json`` restores the error."""
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_json(record: dict[str, object]) -> NightjarError:
        """Restore the error from ``to_json``. An unknown class becomes a NightjarError."""
        kind = _family(NightjarError).get(str(record.get("error")), NightjarError)
        # Bypass the class's own __init__, whose arguments did not cross the process boundary.
        error = kind.__new__(kind)
        NightjarError.__init__(error, str(record.get("message", "")), hint=str(record.get("hint", "")))
        # Handlers of DamagedError need the file.
        if isinstance(error, DamagedError):
            error.file = str(record.get("file", ""))
        return error


class ConfigError(NightjarError):
    """A wrong, unknown or contradictory setting."""

    exit_code = 2


class DataError(NightjarError):
    """Input data that is missing, empty or not what the schema says."""

    exit_code = 3


class PlanError(NightjarError):
    """No placement of the tables satisfies the hardware's capacities."""

    exit_code = 4


class GuardError(NightjarError):
    """A training guard stopped the run: non-finite values, collapse, an id out of range, a full disk."""

    exit_code = 5


class FullScratchError(GuardError):
    """A disk of scratch files has no space left. The same command goes on once it has."""


class GateHeldError(NightjarError):
    """The gate held the model: it is not promoted."""

    exit_code = 6


class ArtifactError(NightjarError):
    """An artifact is missing, incomplete or fails its checksum."""

    exit_code = 7


class DamagedError(ArtifactError):
    """An artifact is damaged: one of its files is missing, or has other bytes than were written.

    Only this error allows a caller to skip an artifact. ``file``: the damaged file, relative to the store; "" if the
    error does not depend on one file.
    """

    def __init__(self, message: str, *, hint: str = "", file: str = "") -> None:
        super().__init__(message, hint=hint)
        self.file = file

    def to_json(self) -> dict[str, object]:
        """Return plain data, with the file."""
        return {**super().to_json(), "file": self.file}


class OtherCodeError(ArtifactError):
    """A version is whole, but other code made it: this installation would compute another model from its weights."""


class FullDiskError(ArtifactError):
    """A disk has no space left. It says nothing about any artifact; the same command goes on once there is some."""


class PassingError(ArtifactError):
    """A temporary failure, such as memory, a thread or a connection. It says nothing about the artifact; try again.

    Its exit code is not that of a damaged artifact: a scheduler starts the same command again.
    """

    exit_code = 8


class UnreachableError(PassingError):
    """The store is unreachable after several tries. Its contents may be intact, so nothing is rebuilt."""


class LaunchError(NightjarError):
    """A stage could not be started, found or finished."""

    exit_code = 8


class TrialEndedError(NightjarError):
    """A study ended this trial early: other trials are better."""

    exit_code = 9


class LostLeaseError(BaseException):
    """Another process has this one's lease, so this one ends at once and writes nothing more.

    Like a signal, it must not be caught by code that cleans up after errors.
    """

    exit_code = LaunchError.exit_code


def _family(kind: type[NightjarError]) -> dict[str, type[NightjarError]]:
    """Return ``kind`` and all its subclasses, by name."""
    # Not cached, because importing a plugin may add subclasses.
    family = {kind.__name__: kind}
    for below in kind.__subclasses__():
        family |= _family(below)
    return family


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk has no space left, which is the machine's fault and passes."""
    # A quota that is used up counts as well: to a writer it is the same as a full disk.
    by_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return by_number or isinstance(error, FullDiskError | FullScratchError)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of ``error``: that of its class, 128 plus the number for a signal, else 1.

    A broken pipe and Ctrl-C count as signals, which Python turns into exceptions.
    """
    if isinstance(error, KeyboardInterrupt):
        return SIGNALLED + signal.SIGINT
    if isinstance(error, BrokenPipeError):
        return SIGNALLED + signal.SIGPIPE
    # Exceptions outside of the NightjarError family have an exit code, too, such as that of a lost lease.
    return int(getattr(error, "exit_code", UNEXPECTED))
