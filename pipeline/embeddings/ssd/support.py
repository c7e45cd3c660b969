"""Features that make the tier fast and that a kernel, a container or a file system may refuse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.embeddings.ssd.aio import DiskQueue
from pipeline.embeddings.ssd.files import PAGE, ScratchFile
from pipeline.embeddings.ssd.worker import Worker


def shortcomings(queue: DiskQueue, worker: Worker, files: Iterable[ScratchFile]) -> list[tuple[str, str]]:
    """What was refused, why and what it costs; with each, what to change."""
    refused = {}
    if queue.refused:
        refused[f"io_setup is refused ({queue.refused}): rows on SSD are read one after another, many times slower"] = (
            "allow io_setup, io_submit, io_getevents and io_destroy, or raise fs.aio-max-nr"
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


def examine(directory: Path) -> list[tuple[str, str]]:
    """``shortcomings`` of tables on SSD in ``directory``. ConfigError and GuardError where no file can be made."""
    file = ScratchFile(directory, PAGE, "a trial of tables on SSD", direct=True)
    queue, worker = DiskQueue(), Worker()
    try:
        return shortcomings(queue, worker, [file])
    finally:
        worker.close()
        queue.close()
        file.close()
