"""``make gpu-check``: what is packed, and how the tests' outcome is read."""

from pathlib import Path

import pytest

from benchmarks.gpu_check import RUNS, TRIPLES, outcome_of, wanted
from pipeline.config.compose import compose
from pipeline.core.package_versions import PACKAGES

LOCK = Path(__file__).parents[2] / "requirements/cuda.txt"
REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="broken"><error/></testcase><testcase classname="a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_what_comes_with_torch_is_not_packed_and_the_others_fit_it():
    pins = wanted(LOCK.read_text().splitlines(), "2.11")
    assert {"torchrec==1.6.0", "fbgemm-gpu==1.6.0"} <= set(pins)
    names = {pin.split("==")[0] for pin in pins}
    assert not names & {"torch", "triton"} and not [name for name in names if name.startswith(("nvidia-", "cuda-"))]
    assert {"hydra-core", "polars", "torchmetrics", "tensordict"} <= names and all(";" not in pin for pin in pins)


def test_the_triple_of_this_version_is_one_that_is_packed():
    torch = PACKAGES["torch"].split("==")[1].rpartition(".")[0]
    assert PACKAGES["torchrec"] == f"torchrec=={TRIPLES[torch]}"


def test_the_outcome_counts_tests_and_names_the_failed(tmp_path):
    (tmp_path / "tests.xml").write_text(REPORT)
    assert outcome_of(tmp_path / "tests.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "names": ["a::bad", "a::broken"],
    }
    assert outcome_of(tmp_path / "none.xml") == {"error": "pytest wrote no report"}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_a_configuration(name):
    composed = compose(["experiment=demo", f"run={name}", "hardware.device=cuda", "train.profile=true", *RUNS[name]])
    assert composed.hardware.device == "cuda" and composed.run == name
