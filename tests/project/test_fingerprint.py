"""What users get is as recorded in ``fingerprint.txt``: helps, configurations, settings, schemas, files of runs."""

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.fingerprint import CHEAP, GOLDEN, PARTS, ROOT, RUNS, Record, compare, differences, machine, meaning

QUICK = [part for part in CHEAP if part != "keys"]
AGAIN = "where it was changed on purpose: python tools/fingerprint.py golden"


def fingerprint(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``tools/fingerprint.py`` as it is typed."""
    program = str(ROOT / "tools" / "fingerprint.py")
    return subprocess.run([sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True)


def shown(done: subprocess.CompletedProcess[str], part: str) -> str:
    """The last lines, without hashes."""
    lines = [line for line in done.stdout.splitlines() if not line.startswith(f"{part} ")]
    return "\n".join([*lines, done.stderr, AGAIN])


def test_commands_configurations_settings_and_schemas_are_the_recorded_ones() -> None:
    done = fingerprint("compare", str(GOLDEN), "--only", *QUICK)
    assert done.returncode == 0, "\n".join([*done.stdout.splitlines()[-40:], done.stderr, AGAIN])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["keys", *RUNS])
def test_a_reference_run_leaves_the_recorded_files(part: str) -> None:
    if part in RUNS and (why := RUNS[part].skipped()):
        pytest.skip(why)
    done = fingerprint("compare", str(GOLDEN), "--only", part)
    assert done.returncode == 0, shown(done, part)


def test_the_golden_file_has_every_part() -> None:
    golden = Record.read(GOLDEN)
    assert list(golden.lines) == list(PARTS) and not golden.skipped
    assert min(len(lines) for lines in golden.lines.values()) > 5


def page(*lines: str) -> bytes:
    return "\n".join(lines).encode()


def program(nodes: list[dict], weight: bytes, when: int) -> bytes:
    """An exported program, as far as it is read."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (
            ("archive/models/model.json", json.dumps({"nodes": nodes, "torch_version": str(when)}).encode()),
            ("archive/data/weights/weight_0", weight),
            ("archive/.data/serialization_id", str(when).encode()),
        ):
            archive.writestr(zipfile.ZipInfo(name, (when, 1, 1, 0, 0, 0)), content)
    return file.getvalue()


SAME = {
    "a.json": (b'{"seconds": 1, "ne": 0.5}', b'{"ne": 0.5,  "seconds": 2}'),
    "a.jsonl": (b'{"step_ms": 1}\n{"step": 2}\n', b'{"step_ms": 3}\n{"step": 2}\n'),
    "runs/r/manifest.json": (
        b'{"files": {"train.json": {"bytes": 1, "checksum": "x"}}, "seal": "a"}',
        b'{"files": {"train.json": {"bytes": 2, "checksum": "y"}}, "seal": "b"}',
    ),
    "models/m/current.json": (b'{"log": [{"at": 1, "id": "x"}]}', b'{"log": [{"at": 2, "id": "y"}]}'),
    "README.md": (
        page("Made 2026-01-01 00:00 UTC by x", "- rows per s: 1"),
        page("Made 2027-01-01 00:00 UTC by x", "- rows per s: 2"),
    ),
    "report.html": (
        page("<div><dt>Duration</dt><dd>1 s</dd></div>"),
        page("<div><dt>Duration</dt><dd>2 min</dd></div>"),
    ),
    "index.html": (page("<td>a time</td>"), page("<td>another</td>")),
    "dense.pt2": (
        program([{"op": "a", "metadata": {"place": "x.py"}}], b"1", 1990),
        program([{"op": "a", "metadata": {}}], b"1", 2000),
    ),
}
OTHER = {
    "a.json": (b'{"seconds": 1}', b'{"second": 1}'),
    "a.jsonl": (b'{"step": 1}\n{"step": 2}\n', b'{"step": 2}\n{"step": 1}\n'),
    "runs/r/manifest.json": (
        b'{"files": {"plan.json": {"bytes": 1, "checksum": "x"}}}',
        b'{"files": {"plan.json": {"bytes": 1, "checksum": "y"}}}',
    ),
    "models/m/card.json": (b'{"id": "x"}', b'{"id": "y"}'),
    "README.md": (page("- rows: 1"), page("- rows: 2")),
    "report.html": (page("<div><dt>NE</dt><dd>1</dd></div>"), page("<div><dt>NE</dt><dd>2</dd></div>")),
    "runs/r/index.html": (page("1"), page("2")),
    "dense.pt2": (program([{"op": "a"}], b"1", 1990), program([{"op": "b"}], b"1", 1990)),
    "dense2.pt2": (program([], b"1", 1990), program([], b"2", 1990)),
    "logits.npy": (b"1", b"2"),
    "config.yaml": (b"lr: 1", b"lr: 1 "),
}


def test_what_is_measured_does_not_count_and_all_else_does() -> None:
    assert [name for name, (one, two) in SAME.items() if meaning(name, one) != meaning(name, two)] == []
    assert [name for name, (one, two) in OTHER.items() if meaning(name, one) == meaning(name, two)] == []


def test_differences_are_named_and_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = Record(machine(), {"help": {"nightjar": "1", "nightjar run": "2"}, "demo": {"a.json": "3"}})
    new = Record(
        machine(), {"help": {"nightjar": "1", "nightjar go": "2"}, "demo": {"a.json": "4"}}, {"adult": "it is not here"}
    )
    found = ["added help nightjar go", "gone help nightjar run", "changed demo a.json"]
    files = [tmp_path / "old.txt", tmp_path / "new.txt"]
    for file, record in zip(files, (old, new), strict=True):
        file.write_text(record.text())
        assert Record.read(file) == record
    assert compare(*files, PARTS) == 1
    assert capsys.readouterr().out.splitlines() == ["not compared: adult, as it is not here", *found, "3 differences"]
    assert compare(files[0], files[0], PARTS) == 0
    new.machine = "another one"
    assert list(differences(old, new, PARTS)) == found[:2], "trained numbers may differ there"
