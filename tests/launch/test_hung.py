"""A command of a test that hangs is ended, and what its processes do is told."""

import subprocess
import sys

import psutil

from tests.hung import end_with_stacks
from tests.waits import until

PARENT = """
import subprocess, sys
from tests.hung import write_stacks_on_abort
write_stacks_on_abort()
child = subprocess.Popen([sys.executable, "-c", "def waiting():\\n  print('up', flush=True); input()\\nwaiting()"])
child.wait()
"""


def test_all_processes_of_a_command_end_and_tell_what_they_do(tmp_path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    (child,) = psutil.Process(parent.pid).children()
    until(lambda: child.status() == psutil.STATUS_SLEEPING)  # it reads its input by then
    told = end_with_stacks(parent.pid)
    assert not psutil.pid_exists(child.pid)
    parent.wait()
    for part in (str(parent.pid), f"{child.pid} sleeping in", "in waiting", "in wait", "Fatal Python error: Aborted"):
        assert part in told
