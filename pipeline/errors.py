"""The error family: every failure a user can cause or meet, each with its exit code.

A message says what was found and what was expected; ``hint`` names the override or command that
mends it. The command line prints both and exits with ``exit_code``; it never shows a traceback for
one of these. ``exit_code_of`` is the one place that says which exit code an exception has: the process,
``result.json``, a night's record and a rank's report all ask it.
"""

from __future__ import annotations

import signal

# What an exit code means, for the command line's help.
EXIT_CODES = {
    0: "done",
    1: "unexpected fault",
    2: "configuration",
    3: "data",
    4: "no feasible plan",
    5: "a training guard stopped the run",
    6: "gate held",
    7: "corrupt or missing artifact",
    8: "launching failed, or a rank was killed",
}
UNEXPECTED = 1
SIGNALLED = 128  # plus the signal's number, as shells have it


class NightjarError(Exception):
    """Base of all expected failures (exit code 1 is kept for unexpected ones)."""

    exit_code = UNEXPECTED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def to_json(self) -> dict[str, object]:
        """Plain form that crosses a process boundary; ``from_json`` restores it."""
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}

    @staticmethod
    def from_json(record: dict[str, object]) -> NightjarError:
        """The error that ``to_json`` described; an unknown class becomes a plain NightjarError."""
        kind = _family(NightjarError).get(str(record.get("error")), NightjarError)
        error = kind.__new__(kind)  # what a class's own __init__ asks for beside these did not cross
        NightjarError.__init__(error, str(record.get("message", "")), hint=str(record.get("hint", "")))
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


class GateHeldError(NightjarError):
    """The gate held the model: it is not promoted."""

    exit_code = 6


class ArtifactError(NightjarError):
    """An artifact is missing, incomplete or fails its checksum."""

    exit_code = 7


class DamagedError(ArtifactError):
    """An artifact is proven damaged: a file it names is gone, or its bytes, read whole, are not those written.

    Only this error may be the reason to pass an artifact over. ``file``: the one that shows the damage, relative to the
    store; "" where what was read proves it by itself.
    """

    def __init__(self, message: str, *, hint: str = "", file: str = "") -> None:
        super().__init__(message, hint=hint)
        self.file = file

    def to_json(self) -> dict[str, object]:
        """As for the others, with the file."""
        return {**super().to_json(), "file": self.file}


class PassingError(ArtifactError):
    """Something failed that says nothing about an artifact: memory, a thread, a connection. It may work next time."""


class UnreachableError(PassingError):
    """A store does not answer, after several tries: what lies there may be whole, so nothing may be made of it."""


class LaunchError(NightjarError):
    """The scheduler could not start, find or finish a stage."""

    exit_code = 8


def _family(kind: type[NightjarError]) -> dict[str, type[NightjarError]]:
    """``kind`` and all classes below it, by name."""
    found = {kind.__name__: kind}
    for below in kind.__subclasses__():
        found |= _family(below)
    return found


def exit_code_of(error: BaseException) -> int:
    """The exit code for ``error``: what its class says, of a signal 128 and its number, else 1.

    A broken pipe counts as its signal, which Python turns into an exception, and so does Ctrl-C.
    """
    if isinstance(error, KeyboardInterrupt):
        return SIGNALLED + signal.SIGINT
    if isinstance(error, BrokenPipeError):
        return SIGNALLED + signal.SIGPIPE
    return int(getattr(error, "exit_code", UNEXPECTED))
