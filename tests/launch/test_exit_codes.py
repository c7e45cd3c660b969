"""Exit codes: one mapping, which the process, result.json, a rank's report, help and the docs all follow."""

import re
import signal
from pathlib import Path

import pytest

import pipeline.cli
import pipeline.plugins.kubernetes.api_client
import pipeline.plugins.trackers.mlflow_server
import pipeline.training  # every room that may have errors of its own
from pipeline.cli.commands.run import failed
from pipeline.core.errors import (
    EXIT_CODES,
    SIGNALLED,
    ConfigError,
    DataError,
    GateHeldError,
    NightjarError,
    exit_code_of,
)
from pipeline.core.retrying import explained
from pipeline.launch.chain import StageError
from pipeline.launch.run_records import Report, assemble
from pipeline.launch.signals import Interrupted

ROOT = Path(__file__).parents[2]


def family(kind: type[NightjarError] = NightjarError) -> list[type[NightjarError]]:
    return [kind, *(below for each in kind.__subclasses__() for below in family(each))]


FAMILY = sorted({kind for kind in family() if kind.__module__.startswith("pipeline.")}, key=lambda kind: kind.__name__)
FAULT = Report.of(ZeroDivisionError("a fault"))
OTHERS = [
    (StageError("a rank died", None, ""), 8),
    (StageError("a rank died after it was done", Report(status="done"), ""), 8),
    (StageError("a rank reported a fault", FAULT, ""), 1),
    (Interrupted(signal.SIGINT), 130),
    (Interrupted(signal.SIGTERM), 143),
    (KeyboardInterrupt(), 130),
    (BrokenPipeError(), 141),
    (RuntimeError("x"), 1),
    (explained(MemoryError()), 8),
    (explained(OSError(5, "Input/output error")), 8),
]


def made(kind: type[NightjarError]) -> NightjarError:
    """One of ``kind``, whatever else its own ``__init__`` asks for."""
    return NightjarError.from_json({"error": kind.__name__, "message": "m", "hint": "h"})


EVERY = [*((made(kind), kind.exit_code) for kind in FAMILY), *OTHERS]


@pytest.mark.parametrize(("error", "code"), EVERY, ids=lambda value: repr(value)[:40])
def test_every_error_has_one_exit_code_and_result_json_says_it(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code
    assert assemble("r", {}, {}, error).error.exit_code == code
    assert code in EXIT_CODES or code > SIGNALLED


@pytest.mark.parametrize(
    ("error", "code"),
    [(error, code) for error, code in EVERY if isinstance(error, NightjarError | StageError)],
    ids=lambda value: repr(value)[:40],
)
def test_the_process_exits_with_the_code_of_what_stopped_the_chain(error: BaseException, code: int, capsys) -> None:
    assert failed(error) == code
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class_and_code_from_a_rank_to_the_launcher(kind: type[NightjarError]) -> None:
    report = Report.of(made(kind), rank=1)
    there = report.exception()
    assert report.exit_code == kind.exit_code
    assert type(there) is kind and (there.message, there.hint) == ("m", "h")


def test_every_class_of_the_family_but_its_root_has_a_code_of_the_table() -> None:
    assert {kind.exit_code for kind in FAMILY if kind is not NightjarError} == set(EXIT_CODES) - {0, 1}
    assert [ConfigError.exit_code, DataError.exit_code, GateHeldError.exit_code] == [2, 3, 6]


def test_help_readme_and_runbook_name_every_code() -> None:
    runbook, readme = (ROOT / "docs/runbook.md").read_text(), (ROOT / "README.md").read_text()
    headings = re.findall(r"^### (\d): ", runbook, re.M)
    assert headings == [str(code) for code in EXIT_CODES if code]
    table = readme.partition("| exit code | meaning |")[2]
    assert re.findall(r"^\| (\d) \|", table, re.M) == [str(code) for code in EXIT_CODES]
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in " ".join(pipeline.cli.EPILOG.split())


def test_a_killed_rank_is_told_below_the_code_that_it_has() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    code = StageError("a rank died", None, "").exit_code
    section = runbook.partition(f"### {code}: ")[2].partition("\n#")[0]
    assert "illed by signal 9" in section and runbook.count("illed by signal 9") == 1
