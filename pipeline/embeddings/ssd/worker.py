"""The one thread that touches the SSD tier's maps, slots and files, so that these need no locks."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")
# The thread uses the cores that the dense part leaves, and gives the interpreter back at once: a step of training waits
# for it some hundred times. On two cores a step took 116 ms with Python's 5 ms and 94 with 0.2; with a faster dense
# part and a log that is cleaned, 130 with 0.2 and 75 with 0.05: lookups waited 54 and 2 (docs/measurements/ssd.md).
_NICE = 10
_SWITCH_SECONDS = 0.00005


class SsdWorker:
    """Runs tasks one after another, in their order. An error ends all of them; ``check`` and ``call`` raise it.

    ``idle`` is called while there is no task, until it returns that nothing is left to do; the next task wakes it.
    ``refused``: why the thread has the same priority as training, '' where it has a lower one.
    """

    def __init__(self, idle: Callable[[], bool] | None = None) -> None:
        self._idle = idle
        self._tasks: deque[Callable[[], object]] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="nightjar-ssd", daemon=True)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self.refused = ""
        self._began = threading.Event()
        self._thread.start()
        self._began.wait()

    def submit(self, task: Callable[[], object], *, urgent: bool = False) -> None:
        """Queue ``task``; ``urgent``: in front."""
        with self._change:
            (self._tasks.appendleft if urgent else self._tasks.append)(task)
            self._change.notify_all()

    def call(self, task: Callable[[], T]) -> T:
        """Run ``task`` before all queued ones and return its result; raises its error."""
        result: list[T] = []
        done = threading.Event()

        def run() -> None:
            result.append(task())
            done.set()

        self.submit(run, urgent=True)
        self.wait(done)
        return cast(T, result[0])

    def wait(self, event: threading.Event) -> None:
        """Wait until a task sets ``event``; raises the error that ended the thread."""
        while not event.wait(0.05):
            if self._stopped and not event.is_set():
                self.check()
                raise RuntimeError("the SSD tier was closed while a lookup waited for its rows")

    def check(self) -> None:
        """Raise the error of a task."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after its current task; queued ones are dropped."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        try:
            self._give_way()
            self._began.set()
            while True:
                while self._idle is not None and not self._tasks and not self._stopped and self._idle():
                    pass
                with self._change:
                    self._change.wait_for(lambda: self._tasks or self._stopped)
                    if self._stopped:
                        return
                    task = self._tasks.popleft()
                task()
        except BaseException as error:  # raised where training looks
            self._error = error
            self._stopped = True
            self._began.set()

    def _give_way(self) -> None:
        if sys.platform != "linux":  # elsewhere this changes the whole process
            return
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as error:
            self.refused = error.strerror or str(error)
