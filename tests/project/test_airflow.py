"""The DAG of docs/airflow.md, run by Airflow itself where a Python with it is named."""

import ast
import json
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.specs import STAGES, default_stages

ROOT = Path(__file__).parents[2]
TRIAL = """
import json, sys
sys.path.insert(0, "dags")
from nightjar import dag
run = dag.test(run_conf=json.loads(sys.argv[1]))
print(json.dumps({ti.task_id: str(ti.state) for ti in run.get_task_instances()}), str(run.state))
"""


def code_of_the_page() -> str:
    """The DAG as the page has it."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/airflow.md").read_text(), re.S)
    return code


def stages_of_the_page() -> list[str]:
    """The stages that the DAG runs."""
    (named,) = re.findall(r"^STAGES = (\(.*\))$", code_of_the_page(), re.M)
    return list(ast.literal_eval(named))


def test_the_page_names_the_stages_in_order() -> None:
    compile(code_of_the_page(), "docs/airflow.md", "exec")
    named = stages_of_the_page()
    assert named == [name for name in STAGES.names() if name in named]
    assert set(named) >= {*default_stages(), "publish"}


def test_the_dag_runs_its_stages_in_order(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    python = request.config.getoption("--airflow-python")
    if not python:
        pytest.skip("no Python with Airflow 3: --airflow-python=<venv>/bin/python")
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags/nightjar.py").write_text(code_of_the_page())
    log = tmp_path / "commands"
    (tmp_path / "nightjar").write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tmp_path / "nightjar").chmod(0o755)
    place = {"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(tmp_path), "HOME": str(tmp_path)}
    place["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    for setup in (["db", "migrate"], ["dags", "reserialize"]):
        command = [python, "-m", "airflow", *setup]
        subprocess.run(command, env=place, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    conf = json.dumps({"nightjar": str(tmp_path / "nightjar"), "overrides": "experiment=demo"})
    days = {datetime.now(UTC).date()}
    done = subprocess.run(
        [python, "-c", TRIAL, conf], env=place, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    commands = log.read_text().splitlines()
    assert [command.split()[0] for command in commands] == stages_of_the_page()
    days.add(datetime.now(UTC).date())  # dag.test() dates its run now, perhaps before midnight
    asked = [f" data.day={day} run=airflow-{day} experiment=demo" for day in (now - timedelta(days=1) for now in days)]
    assert any(all(command.endswith(each) for command in commands) for each in asked)
