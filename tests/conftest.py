"""What all tests share: where the real data lies, and the line that says what to look at."""

import atexit
import contextlib
import gc
import logging
import multiprocessing.forkserver
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from pipeline.core.cpus import share_cpus

# Before torch: tests share the cores with each other and with the ranks they start. Threads that wait for each other on
# cores that others use take many times as long as one.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
share_cpus()
# Helpers' assertions say what they compare, too.
pytest.register_assert_rewrite(
    *(f"tests.{each.stem}" for each in Path(__file__).parent.iterdir() if each != Path(__file__))
)
gc.disable()  # while everything is imported: see pytest_collection_finish


def _stand_for_laptop() -> None:
    """``hardware=auto``, the default, stands for the laptop's file, here and in child processes: no test is about it.

    What else lies in the user's configuration folder stays where programs look for it.
    """
    former = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    folder = Path(tempfile.mkdtemp(prefix="nightjar-tests-"))
    owner = os.getpid()  # what is forked leaves the folder alone
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    for entry in former.iterdir() if os.access(former, os.R_OK | os.X_OK) and former.is_dir() else ():
        if entry.name != "nightjar":
            (folder / entry.name).symlink_to(entry)
    (folder / "nightjar").mkdir()
    shutil.copy(Path(__file__).parents[1] / "conf/hardware/laptop.yaml", folder / "nightjar" / "hardware.yaml")
    os.environ["XDG_CONFIG_HOME"] = str(folder)


_stand_for_laptop()
# The same examples in every run, none kept from earlier ones, and no limit that a busy machine could pass.
settings.register_profile(
    "nightjar", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nightjar")
# Hypothesis draws numbers from the sources of the modules that are loaded, which depend on the tests before.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

from tests.cluster_kit import KeptCluster, cluster  # noqa: E402, F401 (a fixture)

if TYPE_CHECKING:
    from tests.checkpoint.s3 import Proxy

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets beside the project; skips the test where it is missing."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the real data sets (../shared/data) are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def endpoint() -> "Iterator[Proxy]":
    """moto's S3 behind a proxy that makes faults, one a process; a test makes a bucket of its own."""
    from tests.checkpoint.s3 import served

    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with served(pytest.importorskip("moto.server", reason="moto is not installed")) as proxy:
        yield proxy


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """It imports from the folder that it is started in, and keeps the environment: before a test changes either."""
    if "tests.embeddings.ranks" in sys.modules:  # which says what it imports
        with contextlib.chdir(ROOT):
            multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    """A library's handler on the root logger, bound to the captured stderr of one test, must not outlive that test."""
    before = set(logging.root.handlers)
    yield
    for handler in set(logging.root.handlers) - before:
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    """The logger ``pipeline`` has no handlers when a test begins, and is open from INFO on."""
    own = logging.getLogger("pipeline")
    own.handlers, own.propagate = [], True
    own.setLevel(logging.INFO)
    yield
    own.handlers, own.propagate = [], True


@pytest.fixture(autouse=True)
def _numbers() -> Iterator[None]:
    """As ``_as_in_a_new_process``, after fixtures that are shared; denormal numbers stay what they are.

    torch.compile loads code built with -ffast-math, which rounds denormal numbers to 0 for the whole thread.
    """
    _as_in_a_new_process()
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Fixtures that tests share are the same whichever test asks for them first."""
    _as_in_a_new_process()


def _as_in_a_new_process() -> None:
    """Torch's random numbers and threads do not depend on the tests before: on the threads depend the last bits."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.manual_seed(67280421310721)  # what a new process begins with
        if torch.get_num_threads() != int(os.environ["OMP_NUM_THREADS"]):  # share_cpus sets it
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests of the cluster first, then those with slow ones, which would keep one process busy at last."""
    marked = {mark: {item.path for item in items if item.get_closest_marker(mark)} for mark in ("k8s", "slow")}
    items.sort(key=lambda item: (item.path not in marked["k8s"], item.path not in marked["slow"]))


def pytest_configure(config: pytest.Config) -> None:
    """One cluster a process."""
    config.pluginmanager.register(KeptCluster(), KeptCluster.__name__)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector would look at a million objects of libraries again and again."""
    gc.freeze()
    # By default it looks after every 700 objects: parsing all of the package took four times as long for it.
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Path.home() / ".cache" / "nightjar" / "k8s-assets"
    text = f"folder of the test cluster's programs, which ../shared/k8s/build.sh makes (default: {default})"
    parser.addoption("--k8s-assets", default=str(default), help=text)
    kit = SHARED / "k8s"
    parser.addoption("--airflow-python", default="", help="a Python with Airflow 3, for the DAG of docs/airflow.md")
    parser.addoption("--mlflow", default=None, help="a virtual environment with MLflow (default: mlflow on PATH)")
    parser.addoption("--k8s-kit", default=str(kit), help=f"folder of the Kubernetes test kit (default: {kit})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the markers left out, where they did, and where to look."""
    if "not slow" in config.option.markexpr:
        left_out = "make test leaves out further proofs of the same promises (make test-all), images (make test-image)"
        terminalreporter.write_line(left_out)
    terminalreporter.write_line("look at: the closing line below; every skipped test says why above")
