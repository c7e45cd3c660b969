"""What users get from Nightjar, one line for each thing, with a SHA-256 of what it says.

A change of the code that is to change nothing for users leaves every line as it is::

    python tools/fingerprint.py record before.txt     all lines, those of eight reference runs included
    python tools/fingerprint.py compare before.txt    the same again: exit code 1, and a line for each difference
    python tools/fingerprint.py compare before.txt --only help cfg towers
    python tools/fingerprint.py compare before.txt --against after.txt
    python tools/fingerprint.py golden                writes tests/project/fingerprint.txt anew

A line has a part, a name and the hash. The cheap parts are ``help`` (every command), ``cfg`` (``run --cfg job`` of
every experiment), ``explain`` (every setting) and ``schemas`` (docs/schemas); ``keys`` is the help of every stage.
Every other part is a reference run: real command lines over an empty store in a temporary folder, and a line for each
file that they leave there. Nothing is used of the package but its command line, so code may move as it likes.

Hashed is what a file means. ``MEASURED`` and what follows it list, by kind of file, what is left out: times and
durations, speeds, memory, random ids, absolute paths, versions of packages, and in exported programs the names of
modules and files of code. JSON is compared by keys; where a manifest has the checksum of a file, its bytes count too.

The reference runs plan for ``hardware=laptop``, compute in float32 on one thread a rank, and hold MKL, oneDNN and
torch to instructions that every CPU of the last ten years has. What stays is Nightjar's own C code, NumPy and FBGEMM,
which use AVX-512 where there is some: a trained number may then end in another bit. So a record names its kind of
machine, and between two kinds, of the files of reference runs only the names are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "project" / "fingerprint.txt"
ADULT = ROOT.parent / "shared" / "data" / "adult.data"
INTERNAL = ("worker", "fork-server", "trial")  # commands that nightjar --help does not list

# No line depends on the machine.
SURROUNDINGS = {"COLUMNS": "80", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SURROUNDINGS |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

# What is left out, from here to digest(). Of JSON, the values of these keys; that there is such a key counts.
MEASURED = re.compile(
    r"created|started|finished|seconds|seconds_waited|eta_seconds|step_ms|measured_ms"  # times and durations
    r"|rows_per_s|samples_per_s|data_wait_share|stall_share"  # speeds
    r"|peak_rss_bytes|peak_pss_bytes|peak_bytes|pss_bytes|host_memory_bytes|measured_bytes"  # memory
    r"|ssd_\w+"  # reads and writes of tables on SSD, which depend on how far a thread has read ahead
    r"|seal"  # of a manifest: a hash of its content, times included
)
MEASURED_IN = {
    "current.json": {"at", "id"},  # of a promotion: its time, and a random id
    "sources.json": {"folders"},  # absolute paths of the logs
    "first.json": {"folders"},
    "folder.json": {"folders"},
    "model.json": {"metadata", "torch_version"},  # in an exported program; metadata: places in code, by node
}
# Of files that have such values, the sizes and checksums in manifests are left out as well.
WITH_MEASURED = re.compile(r"(train\.json|card\.json|sources\.json|README\.md|\.pt2)$")
# Of lines of pages that show such values, what is matched stays. Pages have a line for each figure and row of a table.
MEASURED_LINES = re.compile(
    r"- rows per s: |\| Duration of the stages |\| (ingest|plan|partition|train|evaluate|publish) (?=\| [\d.]+ )"
    r"|<div><dt>(Samples/s|Duration( of the stages)?|Ingestion, rows/s)</dt>"
    r"|<div><dt>(Training time|Peak memory|Stalled by checkpoints)</dt>"
    r"|<div><dt>(Lookups of tables on SSD that|Their rows in the device|Read from SSD|Written to SSD)"
    r"|<section><h2>Stages</h2>|<tr><td><svg class=.swatch.{,99}</svg>\w+</td><td><span class=.pill \w+.>\w+</span>"
    r"|<figure><figcaption>(Speed|Waiting for data) <span>.*?</span></figcaption>"
    r"|<tr><td>(input exchange|lookup|output exchange|dense|gradient exchange|update|overhead)</td>(?=.* ms<)"
    r"|<tr><td>(whole step, slowest rank|memory of the fullest rank)</td>"
)
DATES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
FOLDER_HASH = re.compile(r"^(sources/\w+/)\w{32}(?=\.json$)")  # name of a file after the folder in which a log lay


def meaning(name: str, content: bytes) -> bytes:
    """What a file says, without what is measured or depends on the machine.

    Args:
        name: Path or name of the file, whose ending says of what kind it is.
        content: All of its bytes.
    """
    if name.endswith((".json", ".jsonl")):
        lines = content.splitlines() if name.endswith(".jsonl") else [content]
        shown = [json.dumps(_unmeasured(json.loads(line), Path(name).name), sort_keys=True) for line in lines]
        return "\n".join(shown).encode()
    if name == "index.html":
        return b""  # of the store: the times of all its nights and runs, on almost every line; that it is there counts
    if name.endswith((".html", ".md")):
        return "\n".join(_page_line(line) for line in content.decode().splitlines()).encode()
    if name.endswith(".pt2"):
        return _program(content)
    return content


def _unmeasured(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_unmeasured(each, name) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, each in value.items():
        of_file = name == "manifest.json" and isinstance(each, dict) and "checksum" in each
        measured = WITH_MEASURED.search(key) if of_file else MEASURED.fullmatch(key)
        kept[key] = None if measured or key in MEASURED_IN.get(name, ()) else _unmeasured(each, name)
    return kept


def _page_line(line: str) -> str:
    measured = MEASURED_LINES.match(line)
    return measured.group() if measured else DATES.sub("(a time)", line)


def _program(content: bytes) -> bytes:
    """The files in an exported program, by name; the times of a zip file and the places of its parts do not count."""
    parts: list[bytes] = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if "/.data/" not in name:  # torch's version of the file, and a hash of its names
                parts += [name.encode(), digest(meaning(name, archive.read(name))).encode()]
    return b"\n".join(parts)


def digest(content: bytes) -> str:
    """SHA-256, as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class ReferenceRun:
    """Command lines over one empty store, one after the other.

    Attributes:
        commands: What is typed after ``nightjar``; names in braces stand for ``SETTINGS``.
        log: A log that the run reads, and that lies beside the checkout; None: it makes its own.
    """

    commands: tuple[str, ...]
    log: Path | None = None

    def skipped(self) -> str:
        """Why it cannot run here; "" if it can."""
        return f"{self.log.name} is not beside this checkout" if self.log and not self.log.exists() else ""


STAGES = ("ingest", "plan", "partition", "train", "evaluate", "publish")
EVERY_STAGE = f"[{','.join(STAGES)}]"
SETTINGS = {
    # As little as has every kind of artifact. Of so few rows the gate can tell nothing: it asks for next to nothing.
    "small": "store=store train.threads_per_rank=1 train.compile=false train.precision=fp32 train.log_every_steps=10 "
    "model.embedding_dim=8 model.top_mlp=[16] gate.min_rows=100 gate.max_ne=2 gate.min_auc=0.1 gate.replicates=50 "
    "gate.max_calibration_error=1 gate.min_baseline_gain=null",
    "all": f"stages={EVERY_STAGE}",
    "here": f"hardware=laptop launch.inline={EVERY_STAGE}",  # in the command's own process, which imports torch once
    "clicks": "data.synthetic.rows=3000 data.synthetic.ids_per_feature=60 train.global_batch=128 model.bottom_mlp=[16]",
    "eight": " ".join(f"~data.sparse.C{number}" for number in range(9, 27)),  # of the 26 features
    "users": "data.synthetic.rows=3000 data.synthetic.users=200 train.epochs=1",
}
NIGHT = (
    "nightly date=2026-01-{day} data=synthetic {{small}} {{here}} {{clicks}} {{eight}} publish.model=clicks "
    "nightly.wait_minutes=0 data.synthetic.new_ids=0.05 data.synthetic.drift=0.1 gate.max_psi=null "
    "gate.max_ne_increase=0.5"
)
RUNS = {
    "demo": ReferenceRun(("run experiment=demo hardware=laptop {small} {all} {clicks}",)),
    "adult": ReferenceRun(
        (
            "run experiment=adult data.path=log.csv run=adult {small} {all} {here} train.epochs=1",
            "predict log.csv --store store --out store/scores.csv",
        ),
        log=ADULT,
    ),
    "histories": ReferenceRun(("run experiment=histories {small} {all} {here} {users}",)),
    "ranks": ReferenceRun(
        (
            "run data=synthetic_users run=ranks hardware=laptop2 {small} {all} {users} train.global_batch=128 "
            "+plan.tables.item.sharding=row_wise +plan.tables.category.sharding=column_wise checkpoint.every_steps=8",
        )
    ),
    "towers": ReferenceRun(
        (
            "run experiment=demo run=towers hardware=laptop hardware.hosts=2 hardware.ranks_per_host=1 {small} {all} "
            "{clicks} {eight} partition=dmt partition.module=dcn partition.probe_steps=8",
        )
    ),
    "ssd": ReferenceRun(
        (
            "run experiment=demo run=ssd {small} {all} {here} {clicks} {eight} data.synthetic.ids_per_feature=400 "
            "hardware.ssd_gib=0.1 launch.limit_memory=never +plan.tables.C5.tier=ssd +plan.tables.C7.tier=ssd "
            "checkpoint.every_steps=8 \"checkpoint.quantise='4'\"",
        )
    ),
    "tasks": ReferenceRun(
        (
            "run experiment=demo run=tasks {small} {all} {here} {clicks} {eight} data.synthetic.conversion_rate=0.2 "
            "'+data.tasks.conversion={{given: click}}' model.tasks=mmoe +gate.tasks.conversion.max_ne=2 "
            "train.schedule=cosine train.average.kind=ema",
        )
    ),
    "nights": ReferenceRun(tuple(NIGHT.format(day=day) for day in ("01", "02", "03"))),
}


def run_lines(name: str) -> Iterator[tuple[str, str]]:
    """Do a reference run; the path in its store of every file that it leaves, with the hash of its meaning.

    Raises:
        RuntimeError: A command ended with another exit code than 0.
    """
    with tempfile.TemporaryDirectory(prefix="nightjar-fingerprint-") as folder:
        if log := RUNS[name].log:
            rows = log.read_text().splitlines(keepends=True)[:4000]
            Path(folder, "log.csv").write_text("".join(rows))
            os.utime(Path(folder, "log.csv"), (1_700_000_000, 1_700_000_000))  # a dataset's key covers it
        for command in RUNS[name].commands:
            _nightjar(command, Path(folder))
        store = Path(folder, "store")
        for path in sorted(path for path in store.rglob("*") if path.is_file()):
            place = FOLDER_HASH.sub(r"\1folder", path.relative_to(store).as_posix())
            yield place, digest(meaning(place, path.read_bytes()))


def _nightjar(command: str, folder: Path) -> None:
    module, function = _entry_point()
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    words = [sys.executable, "-c", code, *shlex.split(command.format(**SETTINGS))]
    done = subprocess.run(words, cwd=folder, text=True, capture_output=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise RuntimeError(f"nightjar {command} ended with {done.returncode}:\n{said}")


@functools.cache
def _entry_point() -> tuple[str, str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["nightjar"].partition(":")
    return module, function


def said(*arguments: str) -> str:
    """What ``nightjar`` with these arguments prints, and its exit code; it runs in this process."""
    module, function = _entry_point()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = getattr(importlib.import_module(module), function)(arguments)
        except SystemExit as end:  # of argparse
            code = end.code
    return f"{output.getvalue()}exit code {code}\n"


def help_lines() -> Iterator[tuple[str, str]]:
    """``--help`` of every command and of its actions; of ``run``, which prints a configuration, for all stages."""
    calls: list[tuple[str, ...]] = [(), *((name,) for name in INTERNAL)]
    for command in _listed(said("--help")):
        if command not in STAGES:
            calls += [(command,), *((command, action) for action in _listed(said(command, "--help")))]
    for call in calls:
        yield " ".join(("nightjar", *call)), digest(said(*call, "--help").encode())


def key_lines() -> Iterator[tuple[str, str]]:
    """``--help`` of every stage, and all keys of all groups."""
    for call in (("run", "--help", "all"), *((stage, "--help") for stage in STAGES)):
        yield " ".join(("nightjar", *call)), digest(said(*call).encode())


def _listed(text: str) -> list[str]:
    """Commands or actions that a help of argparse lists."""
    listed = text.partition("\npositional arguments:\n  ")[2].partition("\n\n")[0]
    return re.findall(r"^    ([a-z-]+)(?:  |$)", listed, re.M) if listed.startswith(("command\n", "action\n")) else []


def cfg_lines() -> Iterator[tuple[str, str]]:
    """What ``run --cfg job`` prints: of the defaults, and of every experiment."""
    yield "defaults", digest(said("run", "--cfg", "job").encode())
    for name in sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")):
        yield name, digest(said("run", f"experiment={name}", "data.path=logs", "--cfg", "job").encode())


def explain_lines() -> Iterator[tuple[str, str]]:
    """What ``explain`` prints of every setting, and its JSON of every group."""
    groups = [each["group"] for each in json.loads(_json_of("explain")) if "group" in each]
    for group in ("", *groups):
        words = ("explain", group) if group else ("explain",)
        yield f"{' '.join(words)} --json", digest(_json_of(*words).encode())
        for text in re.split(r"^(?=\S+: )", said(*words), flags=re.M):
            name = text.partition(": ")[0]
            if text and (group or name not in groups):  # without a name, explain has a line for each group, too
                yield name, digest(text.encode())


def _json_of(*words: str) -> str:
    return said(*words, "--json").rpartition("exit code 0")[0]


def schema_lines() -> Iterator[tuple[str, str]]:
    """The committed schemas of records."""
    for path in sorted((ROOT / "docs" / "schemas").iterdir()):
        yield path.name, digest(path.read_bytes())


CHEAP: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "help": help_lines,
    "keys": key_lines,
    "cfg": cfg_lines,
    "explain": explain_lines,
    "schemas": schema_lines,
}
PARTS = (*CHEAP, *RUNS)


@dataclass
class Record:
    """All lines of one state of the code: ``lines[part][name]`` is a hash.

    Attributes:
        machine: The kind of machine that computed the reference runs.
        skipped: Parts without lines, and why.
    """

    machine: str
    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """As it is written into a file: comments first, then a line for each hash."""
        text = [f"# machine {self.machine}", *(f"# skipped {part}: {why}" for part, why in self.skipped.items())]
        for part, lines in self.lines.items():
            text += [f"{part} {name} {value}" for name, value in lines.items()]
        return "\n".join([*text, ""])

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file."""
        record = cls("")
        for line in path.read_text().splitlines():
            part, _, rest = line.partition(" ")
            if line.startswith("# machine "):
                record.machine = rest.partition(" ")[2]
            elif line.startswith("# skipped "):
                name, _, why = rest.partition(" ")[2].partition(": ")
                record.skipped[name] = why
            else:
                name, _, value = rest.rpartition(" ")
                record.lines.setdefault(part, {})[name] = value
        return record


def machine() -> str:
    """Its architecture, and the widest instructions on which a trained number's last bit may depend."""
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text())) if info.exists() else set()
    widest = next((each for each in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if each in flags), "none")
    return f"{platform.machine()} {widest}"


def recorded(parts: Sequence[str]) -> Record:
    """All lines of ``parts``, printed one by one as they come."""
    record = Record(machine())
    for part in parts:
        if part in RUNS and (why := RUNS[part].skipped()):
            record.skipped[part] = why
            print(f"# skipped {part}: {why}", flush=True)
            continue
        lines = record.lines.setdefault(part, {})
        for name, value in CHEAP[part]() if part in CHEAP else run_lines(part):
            lines[name] = value
            print(part, name, value, flush=True)
    return record


def differences(before: Record, after: Record, parts: Sequence[str]) -> Iterator[str]:
    """A line for each thing of ``parts`` that was added, is gone or has changed."""
    for part in parts:
        if part in before.skipped or part in after.skipped:
            continue
        names_only = part in RUNS and before.machine != after.machine
        old, new = before.lines.get(part, {}), after.lines.get(part, {})
        for name in sorted({*old, *new}):
            if name not in old:
                yield f"added {part} {name}"
            elif name not in new:
                yield f"gone {part} {name}"
            elif old[name] != new[name] and not names_only:
                yield f"changed {part} {name}"


def compare(file: Path, against: Path | None, parts: Sequence[str]) -> int:
    """Print what differs between a record and another one, or the code as it is now; returns the exit code."""
    before = Record.read(file)
    after = Record.read(against) if against else recorded(parts)
    for part, why in {**before.skipped, **after.skipped}.items():
        if part in parts:
            print(f"not compared: {part}, as {why}")
    if before.machine != after.machine:
        print(f"of reference runs only names are compared: one was made on {before.machine}, one on {after.machine}")
    found = list(differences(before, after, parts))
    print(*found, f"{len(found)} differences", sep="\n")
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True)
    record = actions.add_parser("record", allow_abbrev=False, help="write all lines into a file")
    record.add_argument("file", type=Path)
    compared = actions.add_parser(
        "compare", allow_abbrev=False, help="compare a file with the code as it is; exit code 1: they differ"
    )
    compared.add_argument("file", type=Path)
    compared.add_argument("--against", type=Path, help="another file, in place of the code")
    golden = actions.add_parser("golden", allow_abbrev=False, help=f"write {GOLDEN.relative_to(ROOT)} anew")
    for each in (record, compared, golden):
        each.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    given = parser.parse_args(arguments)
    parts = tuple(given.only or PARTS)
    if given.action == "compare":
        file, against = given.file.resolve(), given.against and given.against.resolve()
        with surroundings():
            return compare(file, against, parts)
    file = GOLDEN if given.action == "golden" else given.file.resolve()
    with surroundings():
        made = recorded(parts)
    if given.only and file.exists():  # the other parts stay
        made.lines = {**Record.read(file).lines, **made.lines}
    file.write_text(made.text())
    return 0


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """An empty folder, and an environment that every machine has: for what runs here and in child processes."""
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="nightjar-fingerprint-") as folder, contextlib.chdir(folder):
        os.environ.update(SURROUNDINGS, XDG_CONFIG_HOME=folder, XDG_CACHE_HOME=folder)
        yield


if __name__ == "__main__":
    sys.exit(main())
