"""A rank on CPUs ends with its work: whatever it leaves behind that waits, it waits for nothing."""

import subprocess
import sys

from tests.waits import PATIENCE

RANK = """
import threading
from pipeline.config.compose import compose
from pipeline.records.runs import Step
from pipeline.specs.stage import StageIO
from pipeline.stages import execution

def left_waiting(step, config, store, io):
    threading.Thread(target=threading.Event().wait).start()  # the interpreter would wait for it
    print("worked")

step = Step(name="ingest", key="", path="datasets/x")
execution.load = lambda store, run: compose([])
execution.read_steps = lambda store, run: [step]
execution.run_stage = left_waiting
raise SystemExit(execution.work("ingest", "STORE/runs/r/config.yaml", 0, lambda config, store, rank: StageIO()))
"""


def test_a_rank_on_cpus_waits_for_no_thread(tmp_path) -> None:
    script = RANK.replace("STORE", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("worked\n", 0)
    assert list(tmp_path.glob("runs/r/**/*.json")), "the report is written first"
