"""``nightjar explain`` and the page of all settings come from the declarations."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.cli.commands.settings_page import markdown
from tests.setting_paths import LEAVES

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), "make docs writes docs/configuration.md"


def test_the_page_has_every_setting_once_in_lines_of_at_most_120_characters() -> None:
    page = markdown()
    assert [path for path in LEAVES if page.count(f"- `{path}`:") != 1] == []
    assert max(map(len, page.splitlines())) <= 120


def test_a_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train.lr: a number, at least 0; default 0.002"
    assert lines[1].endswith(".")
    assert " ".join(line.strip() for line in lines[2:]) == (
        "If you change it, these stages run again, and all that read their output: partition, train. "
        "Training starts from scratch."
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epochs", "Training continues from its checkpoints, or with train.snapshots from scratch."),
        ("run", "no finished stage runs again."),
    ],
)
def test_a_change_that_costs_less_is_explained(setting: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", setting]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(words)


def test_of_a_group_the_usual_cost_of_a_change_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gate"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert said.endswith(
        "Unless a setting says otherwise: if you change it, " + said.rpartition("if you change it, ")[2]
    )
    assert said.count("all that read their output: publish.") == 1 and "gate.max_ne_increase: " in out


def test_an_entry_of_a_dictionary_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data.sparse.C1.min_count"]) == 0
    assert capsys.readouterr().out.startswith(
        "data.sparse.*.min_count: a whole number or null, at least 1; default null"
    )


def test_a_default_of_a_group_inside_a_group_is_the_outer_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data.checks.warn.psi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["default"] == 0.25


def test_a_group_is_explained_with_all_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records[0]["group"] == "train"
    assert {"train.lr", "train.guard.window_steps"} <= {record.get("setting") for record in records}
    schedule = next(record for record in records if record.get("setting") == "train.schedule")
    assert schedule["choices"] == ["constant", "linear", "cosine"]
    assert schedule["default"] == "linear" and not schedule["required"]


def test_without_a_name_every_group_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{group}: " in out for group in ("data", "train", "debug"))
    assert "train.lr" not in out


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("train.lrr", "train.lrr is unknown; did you mean train.lr?", "nightjar explain train.lr"),
        ("trian", "trian is unknown; did you mean train?", "nightjar explain train"),
        ("learning_rate", "learning_rate is unknown; did you mean train.lr?", "nightjar explain train.lr"),
        (" ", "the setting's name is empty, expected a setting or a group", "nightjar explain"),
        ("train.decay_share", "train.decay_share is now train.decay_ratio", "nightjar explain train.decay_ratio"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    name: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", name]) == 2
    err = capsys.readouterr().err
    assert message in err and err.strip().endswith(f"hint: {hint}")


def test_the_help_of_run_has_the_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("  lr: ") and "dense part" in line]
    assert line.split("#")[0].strip() == "lr: 0.002"
    assert line.endswith("# Learning rate of the dense part after the warm-up.")
    assert lines[0].startswith("nightjar run [overrides]") and "  nightjar run experiment=demo" in lines
    assert len(lines) > 500


def test_the_help_of_run_is_short_and_that_of_a_group_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "model=mlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 70 and any(line.startswith("model: dcnv2, ") for line in lines)
    (train,) = [line for line in lines if line.startswith("train:") and "settings" in line]
    assert re.search(r"# The training loop\. \d\d settings: --help train$", train)
    assert not any(line.startswith("  lr: ") for line in lines)
    assert main(["train", "--help", "train.guard"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train:" and lines[1].startswith("  guard:") and len(lines) > 4
    assert all(line.startswith("    ") for line in lines[2:])
    assert main(["run", "--help", "trian"]) == 2
    assert "there is no group or setting 'trian'; did you mean train?" in capsys.readouterr().err


def test_explaining_loads_no_heavy_package() -> None:
    code = (
        "import sys; from pipeline.cli.commands.settings_page import markdown; markdown(); "
        "print([m for m in ('torch', 'polars', 'torchrec', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
