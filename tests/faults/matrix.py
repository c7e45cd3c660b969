"""Every operation failing once and ten times at every phase, on a disk and on S3: what came of it, as a table.

``python -m tests.faults.matrix`` prints the lines of docs/faults.md; names of acts, of operations, ``disk`` or
``S3`` behind it choose a part.
"""

import logging
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.store import Store
from tests.checkpoint.s3 import bucket, served
from tests.faults.acts import WENT_ON, BrokenPromiseError, Nightly, Promoting, Restoring, Taking, outcome
from tests.faults.injector import OPERATIONS, Injector, Requests, disk_seams, machine_seams
from tests.faults.publish_act import Publishing
from tests.waits import no_waits

ACTS = (Taking, Restoring, Publishing, Promoting, Nightly)
COUNTS = (1, 10)


@dataclass
class Cell:
    """What came of one fault; ``met``: how many operations failed (0: there is no such operation in that phase)."""

    act: str
    place: str
    phase: str
    operation: str
    count: int
    met: int
    ended: str
    problem: str = ""


@contextmanager
def on_disk(folder, injector):
    """A store in ``folder``."""
    with disk_seams(str(folder), injector), machine_seams(injector), no_waits():
        yield Store(f"{folder}/store"), "disk"


@contextmanager
def on_s3(proxy, monkeypatch, injector):
    """A store in a bucket of its own behind ``proxy``, whose client tries once."""
    with bucket(proxy, monkeypatch) as url, machine_seams(injector):
        proxy.fault = Requests(injector)
        yield Store(f"{url}/store"), "S3"


def cells(act, store, place, injector, operations=OPERATIONS, phases=None):
    """Do ``act`` once for every operation, count and phase."""
    done = act(store)
    for phase in phases or act.phases:
        for operation in operations:
            if place == "S3" and operation == "rename":
                continue  # there is none
            for count in COUNTS:
                yield one(done, place, str(phase), operation, count, injector)


def sample(act, store, place, injector, operations=OPERATIONS):
    """Do ``act`` for every phase and every operation at least once, but not for every pair of them."""
    done, phases = act(store), act.phases
    for number in range(max(len(phases), len(operations))):
        phase, operation = phases[number % len(phases)], operations[number % len(operations)]
        count = COUNTS[(number + number // len(operations)) % len(COUNTS)]  # each operation once with either
        yield one(done, place, str(phase), operation, count, injector)


def one(act, place, phase, operation, count, injector):
    """One cell: prepare, let it fail, look at what is there."""
    injector.disarm()
    act.reset()
    armed = []

    def reached(name):
        if str(name) == phase and not armed:
            armed.append(name)
            injector.arm(operation, count)

    cell = Cell(act.name, place, phase, operation, count, 0, "")
    try:
        try:
            cell.ended = outcome(lambda: act.do(reached))
        finally:
            cell.met = injector.met
            injector.disarm()
        if not armed:
            raise BrokenPromiseError(f"phase {phase!r} was not reached")
        act.verify(cell.ended)
    except BrokenPromiseError as error:
        cell.problem = str(error)
    except Exception as error:
        cell.problem = f"afterwards: {type(error).__name__}: {error}"
    act.made = not cell.problem  # one that went wrong may have left anything
    return cell


def table(found):
    """Markdown: a line for every act, place and operation; how many phases went on, or ended with a message."""
    lines = [
        "| act | store | operation | phases met | failing once | failing ten times |",
        "|---|---|---|---:|---|---|",
    ]
    groups = {}
    for cell in found:
        groups.setdefault((cell.act, cell.place, cell.operation), []).append(cell)
    for (act, place, operation), group in groups.items():
        met = {cell.phase for cell in group if cell.met}
        if met:
            told = [summed([cell for cell in group if cell.count == count and cell.met]) for count in COUNTS]
            lines.append(f"| {act} | {place} | {operation} | {len(met)} | {told[0]} | {told[1]} |")
    return "\n".join(lines)


def summed(group):
    """How a few cells ended, in words."""
    wrong = sum(bool(cell.problem) for cell in group)
    on = sum(cell.ended == WENT_ON and not cell.problem for cell in group)
    parts = [(on, "went on"), (len(group) - on - wrong, "one message"), (wrong, "WRONG")]
    return ", ".join(f"{count} {word}" for count, word in parts if count) or "not met"


def main():
    """Print the table, and what is wrong on standard error; the number of wrong cells."""
    import pytest

    known = {"disk", "S3", *OPERATIONS, *(act.name for act in ACTS)}
    if unknown := set(sys.argv[1:]) - known:
        print(f"no {', '.join(sorted(unknown))}; any of these narrow the grid: {', '.join(sorted(known))}")
        return 2
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    names = set(sys.argv[1:])
    operations = [each for each in OPERATIONS if not names & set(OPERATIONS) or each in names]
    acts = [act for act in ACTS if not names & {a.name for a in ACTS} or act.name in names]
    found, injector = [], Injector()
    if "S3" not in names:
        for act in acts:
            with tempfile.TemporaryDirectory() as folder, on_disk(folder, injector) as (store, place):
                found += cells(act, store, place, injector, operations)
    if "disk" not in names:
        import moto.server

        monkeypatch = pytest.MonkeyPatch()
        with served(moto.server) as proxy:
            for act in acts:
                with on_s3(proxy, monkeypatch, injector) as (store, place):
                    found += cells(act, store, place, injector, operations)
        monkeypatch.undo()
    print(table(found))
    wrong = [cell for cell in found if cell.problem]
    for cell in wrong:
        where = f"{cell.act} {cell.place} {cell.phase} {cell.operation} x{cell.count}"
        print(f"{where} (met {cell.met}): {cell.problem[:600]}", file=sys.stderr)
    for name, place in dict.fromkeys((cell.act, cell.place) for cell in found):
        count = sum((cell.act, cell.place) == (name, place) for cell in found)
        print(f"{name} {place}: {count} cells", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(1, main()))
