"""The adapter of TorchX's local scheduler beside files that are written only half."""

import pytest
from torchx.specs import AppDef, Role

from pipeline.launch.runner import LocalRunner
from tests.waits import until

HALF = "printf '{\"message\": ' > $TORCHELASTIC_ERROR_FILE"


def role(script):
    return Role(name="half", image="/tmp", entrypoint="sh", args=["-c", script], num_replicas=1)


@pytest.mark.parametrize(
    ("script", "ended"), [(f"{HALF}; exit 3", "failed"), (f"{HALF}; exit 0", "succeeded"), ("exit 4", "failed")]
)
def test_an_error_file_that_is_cut_short_hides_no_ending(script, ended):
    runner = LocalRunner()
    try:
        job, states = runner.submit(AppDef(name="half", roles=[role(script)])), []
        until(lambda: states.append(job.state()) or states[-1] != "running")
        assert states[-1] == ended
    finally:
        runner.close()


def test_a_process_that_lives_on_after_half_of_an_error_is_running():
    runner = LocalRunner()
    try:
        ready = runner.log_directory / "ready"
        app = AppDef(name="half", roles=[role(f"{HALF}; touch {ready}; exec sleep 600")])
        job = runner.submit(app)
        until(ready.exists)
        assert job.state() == "running"
    finally:
        runner.close()
