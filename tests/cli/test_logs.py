"""Log lines: levels, ranks, JSON, and a progress line that stays whole."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.core import logs
from pipeline.launch.appdefs import stage_app

TINY = ["stages=[ingest]", "data.synthetic.rows=2000", "data.synthetic.ids_per_feature=50", "run=x"]
TRAIN = [
    "stages=[ingest,plan,partition,train]",
    "data.synthetic.rows=2000",
    "data.synthetic.ids_per_feature=50",
    "run=x",
    "hardware=laptop2",
    "train.max_steps=2",
    "train.global_batch=64",
    "train.log_every_steps=1",
]
RANK = """
import logging, os, sys
from pipeline.core import logs
logs.start_rank("info", sys.argv[1], int(os.environ["RANK"]), stage="train", run="x", in_pod=False)
logging.getLogger("pipeline.training").info("fine")
logging.getLogger("pipeline.training").warning("look")
print("of a library")
"""


def test_of_other_ranks_warnings_are_seen_and_all_else_is_in_their_log_file(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = ["-m", "pipeline.launch.agent", "--nproc-per-node", "2"]
    where = ["--redirects", "1:2", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, *command, *where, str(tmp_path / "rank.py"), "text"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["fine", "of a library", "warning: look", "warning: rank 1: look"]
    (log,) = (tmp_path / "logs").rglob("1/stderr.log")
    text = log.read_text()
    assert "Z INFO    rank 1 pipeline.training: fine" in text and "of a library" in text


def test_json_lines_have_rank_stage_and_run(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    lines: list[str] = []
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, str(tmp_path / "rank.py"), "json"],
            env={**os.environ, "RANK": rank},
            capture_output=True,
            text=True,
            check=True,
        )
        lines += done.stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(each["rank"], each["level"], each["message"]) for each in records] == [
        (0, "info", "fine"),
        (0, "warning", "look"),
        (1, "warning", "look"),
    ]
    assert all((each["stage"], each["run"], each["logger"]) == ("train", "x", "pipeline.training") for each in records)
    assert all(each["time"].endswith("Z") for each in records)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_json_to_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.cli", "run", *TRAIN, f"store={tmp_path}", "launch.logs=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert {record["run"] for record in records} == {"x"}
    trained = [record for record in records if record["rank"] == 0 and record["stage"] == "train"]
    assert any(record["message"].startswith("step 2/2") for record in trained)
    assert records[-1]["rank"] is None and "run x" in records[-1]["message"]


def test_the_level_decides_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["run", *TINY, f"store={tmp_path}", "--log-level", "warning"]) == 0
    assert "ingest     started" not in capsys.readouterr().out
    assert cli.main(["run", *TINY, f"store={tmp_path}"]) == 0
    assert "\ningest     skipped: " in capsys.readouterr().out
    assert cli.main(["run", *TINY, f"store={tmp_path}", "--log-level", "debug"]) == 0
    assert "Z INFO    launcher pipeline.launch.chain: ingest     skipped: " in capsys.readouterr().out


def test_ranks_log_from_the_launchers_level_on() -> None:
    from pipeline.config.compose import compose

    logs.start("debug")
    assert stage_app("train", compose(["run=x"]), "/s/runs/x/config.yaml").roles[0].args[-2:] == [
        "--log-level",
        "debug",
    ]
    logs.start("info")
    assert "--log-level" not in stage_app("train", compose(["run=x"]), "/s/runs/x/config.yaml").roles[0].args


def test_a_line_ends_an_open_progress_line(capsys: pytest.CaptureFixture) -> None:
    logs.start()
    logs.TERMINAL.write("\r[===>  ] 1/2")
    logging.getLogger("pipeline.x").warning("disk is slow")
    logging.getLogger("pipeline.x").info("on")
    assert capsys.readouterr().out == "\r[===>  ] 1/2\nwarning: disk is slow\non\n"


def test_logs_stay_off_standard_output_where_it_is_the_result(capsys: pytest.CaptureFixture) -> None:
    logs.start(to_stderr=True)
    logging.getLogger("pipeline.x").info("working")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "working\n")


def test_an_exception_is_part_of_its_json_line(capsys: pytest.CaptureFixture) -> None:
    logs.start()
    logs.speak("json", "r")
    try:
        raise ValueError("odd")
    except ValueError as error:
        logs.show_fault(error)
    record = json.loads(capsys.readouterr().out)
    assert record["level"] == "error" and "ValueError: odd" in record["exception"]


def test_the_output_of_ranks_reaches_a_caller_that_captures_text() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as captured:
        logs.Terminal().pass_on("step 1 – loss".encode())
    assert captured.getvalue() == "step 1 – loss"


def test_advice_on_tracing_is_hidden_and_other_warnings_of_fx_are_not(caplog: pytest.LogCaptureFixture) -> None:
    from torch.fx._symbolic_trace import is_fx_tracing_warning

    logger = logging.getLogger("torch.fx._symbolic_trace")
    logger.addHandler(caplog.handler)
    try:
        logs.hide_tracing_advice()
        is_fx_tracing_warning.__wrapped__()
        logger.warning("another one")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records if record.name == logger.name} == {"another one"}
