"""The command line as a user meets it: help, flags, exit codes, completion in a real bash."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.cli.commands.command import Command
from pipeline.core.kernels import load_kernels
from tests.commands import nightjar_in_turn

ROOT = Path(__file__).parents[2]


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


HEAVY = {"torch", "torchrec", "polars", "pyarrow", "numpy", "scipy", "torchx", "hydra", "kubernetes"}


def imported(*arguments: str) -> tuple[str, set[str]]:
    """What a Python with ``arguments`` prints, and the modules that it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_help_answers_at_once_for_it_imports_nothing_heavy() -> None:
    """Imports are all of its time; ``make bench-startup`` has the seconds."""
    shown, modules = imported("-m", "pipeline.cli", "--help")
    for each in cli.find_commands():
        assert (f"\n    {each.name}" in shown) is not each.internal
    assert "exit codes: 0 done" in shown
    assert "argparse" in modules and not HEAVY & modules
    assert len(modules) < 600  # torch alone has more than a thousand
    _, modules = imported("-c", "import pipeline.launch; from pipeline import cli; cli._parser(cli.find_commands())")
    assert "pipeline.launch" in modules and not HEAVY & modules


def test_only_the_options_of_the_command_itself_are_declared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of sixty commands take as long as a whole short one, and one of a package may raise."""
    known = cli.find_commands()
    whole = cli._parser(known).format_help()
    assert all(f"    {command.name}" in whole for command in known if not command.internal)

    def broken(parser: argparse.ArgumentParser) -> None:
        raise ValueError("these options are declared")

    monkeypatch.setattr(
        cli, "find_commands", lambda: [*known, Command(name="other", help="raise", add_arguments=broken)]
    )
    assert cli.main(["result", "none", f"store={tmp_path}"]) == 7
    assert "no run 'none' in store" in capsys.readouterr().err
    with pytest.raises(ValueError, match="these options are declared"):
        cli.main(["--help"])


def test_help_of_a_composing_command_shows_groups_and_looking_leaves_no_files_behind(tmp_path: Path) -> None:
    commands = [["run", *flags] for flags in (["--help"], ["--cfg", "job"], ["--info"])]
    done = nightjar_in_turn(commands, cwd=tmp_path)
    assert [each.returncode for each in done] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []
    text = done[0].stdout
    assert text.lstrip().startswith("nightjar run [overrides]: ")
    assert "hardware: a100x16x8" in text
    (line,) = [line for line in text.splitlines() if line.startswith("train: ") and "settings" in line]
    assert line.endswith("--help train")
    assert "global_batch: " not in text


def test_help_of_a_group_shows_its_keys(nightjar) -> None:
    assert "  global_batch: " in nightjar("train", "--help", "train").stdout


def test_cfg_shows_the_job_or_a_part_of_it_with_overrides_applied(nightjar) -> None:
    assert "lr: 0.5" in nightjar("run", "--cfg", "job", "train.lr=0.5").stdout
    part = nightjar("run", "train.lr=0.5", "--cfg", "job", "--package", "train").stdout
    assert part.startswith("# @package train")
    assert "stages:\n- train\n" in nightjar("train", "-c", "job").stdout
    assert "hydra:" in nightjar("run", "--cfg", "hydra").stdout


def test_info_says_where_the_configuration_comes_from(tmp_path: Path) -> None:
    commands = [["run", "--info", what] for what in ("searchpath", "defaults", "nonsense")]
    path, defaults, wrong = nightjar_in_turn(commands, cwd=tmp_path)
    assert "Config search path" in path.stdout
    assert "nightjar_schema" in defaults.stdout
    assert (wrong.returncode, "expected one of: all, config" in wrong.stderr) == (2, True)


def test_unknown_commands_flags_and_leftovers_are_refused(nightjar) -> None:
    wrong = nightjar("trian")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "nightjar: nightjar has no command 'trian'; did you mean nightjar train?\n"
        "  hint: nightjar --help lists the commands\n",
    )
    assert nightjar("nonsense").returncode == 2
    done = nightjar("run", "--nonsense")
    assert (done.returncode, done.stderr) == (
        2,
        "nightjar: nightjar run does not know --nonsense\n  hint: nightjar run --help\n",
    )
    assert nightjar("doctor", "extra").returncode == 2


def test_an_option_that_would_do_nothing_is_an_error(nightjar) -> None:
    for command, words in (
        (["run", "--package", "train"], "hint: --cfg job --package train\n"),
        (["run", "--resolve", "seed=1"], "hint: --cfg job --resolve\n"),
        (["widths", "--share", "2"], "--share 2, expected a share above 0 and at most 1"),
        (["widths", "--share", "nan"], "--share nan, expected"),
    ):
        done = nightjar(*command)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_an_option_has_one_name(nightjar, tmp_path: Path) -> None:
    """A name that is cut short would be another option's once a release adds one that begins like it."""
    (tmp_path / "store").mkdir()
    for command in (["run", "--multi"], ["runs", "ls", "--js", "--store", str(tmp_path / "store")]):
        done = nightjar(*command)
        short = command[-1] if command[0] == "run" else command[2]
        assert (done.returncode, f"does not know {short}\n" in done.stderr) == (2, True), done.stderr


def test_overrides_and_flags_may_stand_in_any_order(nightjar) -> None:
    done = nightjar("run", "train.lr=0.5", "--cfg", "job", "seed=7")
    assert "seed: 7" in done.stdout
    assert "lr: 0.5" in done.stdout


def test_a_sweep_gives_every_job_its_own_run_and_ends_with_a_table(nightjar, tmp_path: Path) -> None:
    done = nightjar("ingest", "-m", "data.synthetic.rows=500,700", f"store={tmp_path}")
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("sweep:")[1]
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert all(run in table for run in runs)
    assert "data.synthetic.rows=500" in table
    assert "store=" not in table


def test_a_wrong_job_of_a_sweep_stops_it_before_anything_starts(nightjar, tmp_path: Path) -> None:
    done = nightjar("ingest", "-m", "data.synthetic.rows=500,abc", f"store={tmp_path}")
    assert done.returncode == 2
    assert "data.synthetic.rows is 'abc', expected a whole number" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with run ``mine``, which ingested."""
    place = tmp_path_factory.mktemp("store")
    assert cli.main(["ingest", "data.synthetic.rows=500", "run=mine", f"store={place}"]) == 0
    return place


def test_a_store_without_versions_says_how_to_publish_one(nightjar, store: Path) -> None:
    done = nightjar("rollback", "clicks", "--store", str(store))
    assert (done.returncode, f"no published model in store {store}" in done.stderr) == (2, True), done.stderr
    assert "nightjar nightly or stages=[" in done.stderr


def test_result_shows_a_run_and_names_the_known_ones(nightjar, store: Path) -> None:
    shown = nightjar("result", "mine", f"store={store}", "--json")
    assert json.loads(shown.stdout)["run"] == "mine"
    assert nightjar("result", "mine", "--store", str(store)).returncode == 0
    missing = nightjar("result", "yours", f"store={store}")
    assert missing.returncode == 7
    assert "known runs: mine" in missing.stderr


def test_an_unexpected_fault_has_exit_code_1_and_asks_for_a_report(monkeypatch, capsys) -> None:
    def broken(options: object) -> int:
        raise ZeroDivisionError("x")

    monkeypatch.setattr("pipeline.cli.commands.doctor.examine", broken)
    assert cli.main(["doctor"]) == 1
    assert "unexpected ZeroDivisionError: x" in capsys.readouterr().err


def test_doctor_prints_one_line_a_finding_or_json(nightjar, tmp_path: Path) -> None:
    done = nightjar("doctor", "--json", "--store", str(tmp_path))
    findings = json.loads(done.stdout)
    assert done.returncode == (2 if any(finding["level"] == "fail" for finding in findings) else 0)
    levels = {finding["name"]: finding["level"] for finding in findings}
    assert {"python", "torch", "torchx", "cores", "memory", "disk", "/dev/shm", "ssd"} <= levels.keys()
    built = all(load_kernels(name) is not None for name in ("steps", "linear", "shampoo"))
    assert levels["step"] == ("ok" if built else "warn")


def test_doctor_tells_a_missing_driver_from_a_broken_installation() -> None:
    from pipeline.cli.commands.doctor import LOCK, not_imported

    said = "OSError: libnvidia-ml.so.1: cannot open shared object file\n\nOSError: Could not load this library: x.so\n"
    driver, broken = not_imported(said), not_imported("Traceback\nImportError: undefined symbol\n")
    assert (driver.level, broken.level) == ("fail", "fail")
    assert "needs the NVIDIA driver, and there is no libnvidia-ml.so.1 here" in driver.found
    assert "a node with a GPU" in driver.advice
    assert (broken.found, broken.advice) == ("ImportError: undefined symbol", LOCK)


COMPLETIONS = {
    "nightjar pl": ["plan ", "plan-diff "],
    "nightjar run hardware=lapt": ["hardware=laptop", "hardware=laptop2"],
    "nightjar run seed=4 data=adult data.sparse.workc": ["data.sparse.workclass."],
}
FURTHER_COMPLETIONS = {
    "nightjar run hardw": ["hardware=", "hardware."],
    "nightjar run train.l": ["train.lr=", "train.lanes=", "train.log_every_steps=", "train.label_smoothing="],
    "nightjar train train.gu": ["train.guard."],
    "nightjar run launch.inl": ["launch.inline="],
    "nightjar result x": [],
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "completions", [COMPLETIONS, pytest.param(FURTHER_COMPLETIONS, marks=pytest.mark.slow)], ids=["few", "further"]
)
def test_tab_completion_works_in_bash(tmp_path: Path, completions: dict[str, list[str]]) -> None:
    command = tmp_path / "nightjar"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline.cli "$@"\n')
    command.chmod(0o755)
    script = """
eval "$(nightjar run -sc install=bash)"
function=$(complete -p nightjar | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDBREAKS=" "
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE} COMP_WORDS=($COMP_LINE) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    "$function" nightjar
    printf '> %s\\n' "$COMP_LINE"
    printf '%s\\n' "${COMPREPLY[@]}"
done
"""
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *completions],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
    )
    assert done.stderr == ""
    offered: dict[str, list[str]] = {}
    for text in done.stdout.split("\n")[:-1]:
        if text.startswith("> "):
            words = offered[text.removeprefix("> ")] = []
        elif text:
            words.append(text)
    assert {line: sorted(words) for line, words in offered.items()} == {
        line: sorted(words) for line, words in completions.items()
    }


def test_completion_of_words_that_bash_splits_at_equals_signs(tmp_path: Path) -> None:
    from pipeline.config.compose.completion import script

    text = script([c.name for c in cli.find_commands()], [c.name for c in cli.find_commands() if c.composes])
    check = f"""{text}
nightjar() {{ echo "hardware=laptop hardware=laptop2"; }}
COMP_LINE="nightjar run hardware=lap" COMP_POINT=25
COMP_WORDS=(nightjar run hardware = lap) COMP_CWORD=4 COMP_WORDBREAKS=" =:"
_nightjar_complete nightjar
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc", "-c", check], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["laptop", "laptop2"]
