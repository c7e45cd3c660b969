"""The adapter of TorchX's local scheduler beside files that are written only half."""

import time

import pytest
from torchx.specs import AppDef, Role

from pipeline.launch.runner import LocalRunner

HALF = "printf '{\"message\": ' > $TORCHELASTIC_ERROR_FILE"


def role(script):
    return Role(name="half", image="/tmp", entrypoint="sh", args=["-c", script], num_replicas=1)


@pytest.mark.parametrize(
    ("script", "ended"), [(f"{HALF}; exit 3", "failed"), (f"{HALF}; exit 0", "succeeded"), ("exit 4", "failed")]
)
def test_an_error_file_that_is_cut_short_hides_no_ending(script, ended):
    runner = LocalRunner()
    try:
        job, last = runner.submit(AppDef(name="half", roles=[role(script)])), time.monotonic() + 60
        while (state := job.state()) == "running" and time.monotonic() < last:
            time.sleep(0.02)
        assert state == ended
    finally:
        runner.close()


def test_a_process_that_lives_on_after_half_of_an_error_is_running():
    runner = LocalRunner()
    try:
        ready = runner.log_directory / "ready"
        app = AppDef(name="half", roles=[role(f"{HALF}; touch {ready}; exec sleep 60")])
        job, last = runner.submit(app), time.monotonic() + 60
        while not ready.exists() and time.monotonic() < last:
            time.sleep(0.02)
        assert job.state() == "running"
    finally:
        runner.close()
