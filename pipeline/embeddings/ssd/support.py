"""Features that make the tier fast and that a kernel, a container or a file system may refuse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.embeddings.ssd.aio import DiskQueue
from pipeline.embeddings.ssd.engines import Threads
from pipeline.embeddings.ssd.files import PAGE, ScratchFile
from pipeline.embeddings.ssd.worker import SsdWorker


def reading(queue: DiskQueue) -> str:
    """What reads rows, and why nothing better does."""
    why = "".join(f"; {name} is refused ({reason})" for name, reason in queue.refused.items())
    return f"rows on SSD are read by {queue.engine}{why}"


def shortcomings(queue: DiskQueue, worker: SsdWorker, files: Iterable[ScratchFile]) -> list[tuple[str, str]]:
    """What was refused, why and what it costs; with each, what to change. Linux AIO is as good as io_uring."""
    refused = {}
    if queue.engine == Threads.name:
        refused[f"{reading(queue)}: at several times the processor time"] = (
            "allow io_uring_setup, io_uring_enter and io_uring_register, or io_setup, io_submit, io_getevents and "
            "io_destroy, or raise fs.aio-max-nr"
        )
    if worker.refused:
        refused[
            f"setpriority is refused ({worker.refused}): the thread that reads rows from SSD ahead competes with "
            "training for the cores"
        ] = "allow setpriority"
    for directory, why in {file.directory: file.cached for file in files if file.cached}.items():
        refused[
            f"{directory} refuses O_DIRECT ({why}): rows on SSD go through the page cache, which counts as memory"
        ] = "hardware.ssd_paths=[/a/directory/on/ext4/or/xfs]"
    return list(refused.items())


def examine(directory: Path) -> tuple[str, list[tuple[str, str]]]:
    """``reading`` and ``shortcomings`` of tables on SSD in ``directory``.

    ConfigError and GuardError where no file can be made.
    """
    file = ScratchFile(directory, PAGE, "a trial of tables on SSD", direct=True)
    queue, worker = DiskQueue(), SsdWorker()
    try:
        return reading(queue), shortcomings(queue, worker, [file])
    finally:
        worker.close()
        queue.close()
        file.close()
