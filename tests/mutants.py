"""Mutation tests: small faults are put into the code, one at a time, and tests must find them: ``make mutants``.

    python -m tests.mutants [-m MARKERS] [--module NAME] [--sample 12] [--seed 0] [--workers 2] [--json FILE]
                            [--tree FOLDER] [--same-as FILE]

The faults are those of Cosmic Ray: another comparison, another operator, a number one higher, a condition turned round,
a loop of no rounds. Each is made in a copy of the tree, never in the tree. The files of tests in ``MODULES`` run on it,
nearest first, until one fails. What only informs is left alone (``silent_spans``): no test should hold it fast.

A mutant that takes five times as long as the code it was made from, and a minute more, counts as killed: it hangs. What
survives is printed with the change, for whoever writes the missing test; some mutants are equivalent to the code.

To compare two commits, run the same mutants on both: ``--json`` writes them, ``--same-as`` takes those of such a file
that the tree has too, and ``--tree`` is the checkout of the other commit, whose own ``.venv`` is used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[1]
# What runs and tools leave in a tree; the second ones at its top.
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
RUNS = ("store", "out", "outputs", "multirun", "build", "dist")
# A test that takes long enough for this is one that waits for what a mutant never does.
PATIENCE, GRACE_S = 5, 60
NO_TESTS = 5  # pytest's exit code where all tests of the files are left out

COMPARISONS = ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")
ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul")
BITS = ("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr")
OPERATORS = (
    *(f"ReplaceComparisonOperator_{pair}" for pair in (*COMPARISONS, "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in (*ARITHMETIC, *BITS)),
    *(f"ReplaceUnaryOperator_Delete_{sign}" for sign in ("USub", "Not", "Invert")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    "ZeroIterationForLoop",
)

# How calls that only inform begin, and arguments that change no result of a correct program.
INFORMING = ("log.", "once", "warnings.", "sys.stderr")
UNSEEN = ("strict", "hint", "maxsize", "thread_name_prefix")


@dataclass(frozen=True)
class Module:
    """A part of the pipeline whose faults cost most, and the tests that must find them.

    Attributes:
        files: Its sources, below ``pipeline/``.
        tests: Files of tests, below ``tests/``; one call of pytest for each group, the nearest and fastest first.
    """

    files: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]


MODULES = {
    "order": Module(
        ("training/sampler.py",),
        (
            ("training/test_multiset.py", "training/test_lanes.py", "training/test_data.py"),
            ("training/test_fetched.py", "training/test_event_parts.py", "training/test_same_bytes.py"),
        ),
    ),
    "quantiser": Module(
        ("checkpoint/quantise.py", "checkpoint/codings.py"),
        (
            ("checkpoint/test_quantise.py", "checkpoint/test_chunks.py"),
            ("checkpoint/test_format_page.py", "publishing/test_tables.py", "checkpoint/test_files.py"),
            ("checkpoint/test_compact.py", "checkpoint/test_checkpointer.py"),
        ),
    ),
    "checkpoint": Module(
        ("checkpoint/index.py", "checkpoint/reader.py"),
        (
            ("checkpoint/test_index.py", "checkpoint/test_files.py", "checkpoint/test_restore.py"),
            ("checkpoint/test_passing.py", "checkpoint/test_compact.py", "checkpoint/test_warm.py"),
            ("checkpoint/test_checkpointer.py", "checkpoint/test_misuse.py", "checkpoint/test_commands.py"),
            ("checkpoint/test_s3.py", "checkpoint/test_start_from.py", "schedule/test_prune.py"),
        ),
    ),
    "gate": Module(
        (
            "evaluation/gate/gate.py",
            "evaluation/gate/power.py",
            "evaluation/gate/checks/soundness.py",
            "evaluation/gate/checks/reference_models.py",
            "evaluation/gate/checks/labels.py",
            "evaluation/gate/checks/serving.py",
        ),
        (
            ("evaluation/test_gate.py", "evaluation/test_gate_tasks.py", "evaluation/test_baseline.py"),
            ("publishing/test_judging.py", "publishing/test_importance.py", "report/test_gate_page.py"),
            ("evaluation/test_power.py",),
        ),
    ),
    "promotion": Module(
        ("publishing/promotion.py", "publishing/versions.py", "stages/release.py"),
        (
            ("publishing/test_line.py", "publishing/test_versions.py", "publishing/test_promoting.py"),
            ("publishing/test_swapping.py", "schedule/test_base.py", "cli/test_nights_ahead.py"),
            ("publishing/test_ensemble.py", "publishing/test_served.py"),
            ("faults/test_matrix.py", "publishing/test_nights.py"),
        ),
    ),
    "writes": Module(
        ("store/conditional.py",),
        (
            ("store/test_conditional.py",),
            ("schedule/test_lock.py", "schedule/test_lock_s3.py"),
            ("publishing/test_swapping.py", "publishing/test_versions.py", "faults/test_steady.py"),
            ("faults/test_matrix.py",),
        ),
    ),
    "ids": Module(
        (*("ingest/ids.py", "ingest/ids.py", "ingest/vocabulary.py", "ingest/id_mappings.py"),),
        (
            (
                "ingest/test_ids.py",
                "ingest/test_statistics_pass.py",
                "ingest/test_native_text.py",
                "ingest/test_crosses.py",
            ),
            ("ingest/test_columns.py",),
            ("ingest/test_binning.py", "ingest/test_vocabulary.py", "ingest/test_learned.py"),
            ("ingest/test_transforms.py", "ingest/test_engines.py", "publishing/test_translate.py"),
            ("ingest/test_own_mapping.py", "ingest/test_ingest.py"),
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        key: The same for the same change of the same line in any version of the file that has the line.
        before: The changed lines as they are.
        after: As they become.
    """

    module: str
    path: str
    line: int
    operator: str
    key: str
    before: str
    after: str
    text: str  # of the whole file


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``by`` is the test that failed, or why there was none; "" for one that survived."""

    by: str
    tested: tuple[str, ...]
    seconds: float


def silent_spans(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield what a test should not hold fast: types, decorators, assertions, raised errors, logged and other words."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.If(test=ast.Name("TYPE_CHECKING")):
                yield node
            case ast.AnnAssign(annotation=ast.expr() as types) | ast.arg(annotation=ast.expr() as types):
                yield types
            case ast.FunctionDef(decorator_list=decorators, returns=types):
                yield from decorators
                if types:
                    yield types
            case ast.ClassDef(decorator_list=decorators):
                yield from decorators
            case ast.Call(func=function) if ast.unparse(function).startswith(INFORMING):
                yield node
            case ast.keyword(arg=name, value=value) if name in UNSEEN:
                yield value


def is_within(place: tuple[int, int], span: ast.expr | ast.stmt) -> bool:
    """Whether the place (line, column) lies in the source of ``span``."""
    assert span.end_lineno is not None and span.end_col_offset is not None
    return (span.lineno, span.col_offset) <= place < (span.end_lineno, span.end_col_offset)


def find_mutants(tree: Path, name: str) -> Iterator[tuple[str, tuple[str, int, int], Any]]:
    """Yield the key of each mutant of module ``name``, its place (file, line, column) and what makes it."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    for path in (f"pipeline/{file}" for file in MODULES[name].files if (tree / "pipeline" / file).exists()):
        source = (tree / path).read_text()
        lines = source.splitlines()
        silent = list(silent_spans(ast.parse(source)))
        seen: Counter[str] = Counter()
        nodes = list(ast_nodes(get_ast(source)))
        for operator in OPERATORS:
            find = get_operator(f"core/{operator}")().mutation_positions
            places = [place for node in nodes for place, _ in find(node)]
            for occurrence, place in enumerate(places):
                same = f"{path} {lines[place[0] - 1].strip()} {operator} {place[1]}"
                seen[same] += 1
                if not any(is_within(place, span) for span in silent):
                    key = hashlib.sha256(f"{same} {seen[same]}".encode()).hexdigest()[:16]
                    yield key, (path, *place), (operator, occurrence)


def make(tree: Path, name: str, key: str, place: tuple[str, int, int], how: tuple[str, int]) -> Mutant | None:
    """Return the mutant, or None where the change is none or no Python."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    (path, line, _), (operator, occurrence) = place, how
    source = (tree / path).read_text()
    text = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
    try:
        if text is None or ast.dump(ast.parse(text)) == ast.dump(ast.parse(source)):
            return None
    except SyntaxError:
        return None
    old, new = source.splitlines(), text.splitlines()
    last = line + len(old) - len(new)  # a condition of several lines may become one
    before = "\n".join(old[line - 1 : max(last, line)]).strip()
    return Mutant(name, path, line, operator, key, before, new[line - 1].strip(), text)


def draw(tree: Path, name: str, sample: int, seed: int, only: Collection[str] | None = None) -> list[Mutant]:
    """Return ``sample`` mutants of a module, at most one of a place; with ``only``, all of these keys that it has.

    A mutant's turn follows its line, so that an edit elsewhere in the file does not change which are drawn.
    """
    found = sorted(find_mutants(tree, name), key=lambda each: hashlib.sha256(f"{seed} {each[0]}".encode()).digest())
    drawn: list[Mutant] = []
    taken: set[tuple[str, int, int]] = set()
    for key, place, how in found:
        if (key not in only) if only is not None else (place in taken or len(drawn) == sample):
            continue
        mutant = make(tree, name, key, place, how)
        if mutant is not None:
            taken.add(place)
            drawn.append(mutant)
    return drawn


class Copy:
    """A copy of a tree in which tests run; what lies beside the tree lies beside the copy."""

    def __init__(self, tree: Path, folder: Path, markers: str) -> None:
        self.root, self._folder, self._markers = folder / "tree", folder, markers
        python = tree / ".venv/bin/python"
        self._python = str(python if python.exists() else sys.executable)
        shutil.copytree(
            tree,
            self.root,
            symlinks=True,
            ignore=lambda at, names: {*LEFT_OUT(at, names), *(RUNS if Path(at) == tree else ())},
        )
        if (tree.parent / "shared").exists():
            (folder / "shared").symlink_to((tree.parent / "shared").resolve())

    def put(self, path: str, text: str) -> str:
        """Write a source and return the former one, whose size and second may be the same: what was compiled goes."""
        former = (self.root / path).read_text()
        (self.root / path).write_text(text)
        Path(importlib.util.cache_from_source(str(self.root / path))).unlink(missing_ok=True)
        return former

    def failed(self, files: Collection[str], timeout: float | None = None) -> str:
        """Run files of tests up to the first failure and return which it was; "" where all pass."""
        temporary = self._folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        # Before the installed package, for processes that tests start as well.
        environment = {**os.environ, "PYTHONPATH": str(self.root), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", self._markers]
        log = self._folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self._python, "-m", "pytest", *options, *files],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            with suppress(ProcessLookupError):  # servers that a test has left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code in (0, NO_TESTS):
            return ""
        if code is None:
            return f"more than {timeout:.0f} s"
        lines = log.read_text(errors="replace").splitlines()
        return first_failure(lines) or f"exit code {code}: {lines[-1] if lines else ''}"

    def killer(self, files: Collection[str], timeout: float | None = None) -> str:
        """Return the test of ``files`` that fails, twice: one that fails by luck alone finds nothing. "" for none."""
        left_out: list[str] = []
        while True:
            failure = self.failed([*files, *left_out], timeout)
            if "::" not in failure or self.failed([failure], timeout):
                return failure
            print(f"{failure} failed once and then passed: it is left out", flush=True)
            left_out += ["--deselect", failure]


def first_failure(lines: list[str]) -> str:
    """Return the first test that pytest's summary, among the ``lines`` of its output, says has failed; "" for none.

    Lines that tests log, which are shown before it, begin with ERROR too.
    """
    heads = [number for number, line in enumerate(lines) if "short test summary info" in line]
    told = lines[heads[-1] :] if heads else []
    said = [line.split(" ", 1)[1] for line in told if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    return said[0].split(" - ")[0] if said else ""


class Bench:
    """Runs tests of mutants on copies of ``tree``, as many at a time as there are ``workers``."""

    def __init__(self, tree: Path, folder: Path, markers: str, workers: int) -> None:
        self._tree, self._free = tree, SimpleQueue[Copy]()
        for number in range(workers):
            self._free.put(Copy(tree, folder / str(number), markers))
        self._limits: dict[tuple[str, ...], float] = {}

    @contextmanager
    def _copy(self) -> Iterator[Copy]:
        """A copy that nobody else uses meanwhile."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def groups(self, name: str) -> list[tuple[str, ...]]:
        """The groups of a module's tests, without files that the tree does not have."""
        groups = (tuple(f"tests/{file}" for file in group) for group in MODULES[name].tests)
        there = (tuple(file for file in group if (self._tree / file).exists()) for group in groups)
        return [group for group in there if group]

    def prepare(self, name: str) -> None:
        """Run a module's tests on the code as it is, to see that they pass and how long they take.

        Raises:
            RuntimeError: A test fails, so that a failure would say nothing of a mutant.
        """
        with self._copy() as copy:
            for group in self.groups(name):
                if group not in self._limits:
                    begun = time.monotonic()
                    if failure := copy.killer(group):
                        raise RuntimeError(f"{failure} fails without a mutant")
                    seconds = time.monotonic() - begun
                    self._limits[group] = GRACE_S + PATIENCE * seconds
                    print(f"{name}: {' '.join(group)} in {seconds:.0f} s", flush=True)

    def judge(self, mutant: Mutant) -> Outcome:
        """Run a mutant's tests until one fails."""
        begun, failure = time.monotonic(), ""
        tested: list[str] = []
        with self._copy() as copy:
            former = copy.put(mutant.path, mutant.text)
            try:
                for group in self.groups(mutant.module):
                    tested += group
                    failure = copy.killer(group, self._limits[group])
                    if failure:
                        break
            finally:
                copy.put(mutant.path, former)
        outcome = Outcome(failure, tuple(tested), time.monotonic() - begun)
        said = f"killed by {failure}" if failure else "SURVIVED"
        print(f"{mutant.path}:{mutant.line} {mutant.operator}: {said}, {outcome.seconds:.0f} s", flush=True)
        return outcome


def summarise(outcomes: list[tuple[Mutant, Outcome]]) -> str:
    """Return the survivors with their changes, and a table by module."""
    lines = []
    for mutant, outcome in outcomes:
        if not outcome.by:
            lines += [f"{mutant.path}:{mutant.line} survived ({mutant.operator})"]
            lines += [f"  - {line}" for line in mutant.before.splitlines()] + [f"  + {mutant.after}"]
            lines += [f"  passed: {' '.join(outcome.tested)}", ""]
    lines.append(f"{'module':10} mutants killed survived seconds")
    for name in dict.fromkeys(mutant.module for mutant, _ in outcomes):
        own = [outcome for mutant, outcome in outcomes if mutant.module == name]
        killed, seconds = sum(bool(outcome.by) for outcome in own), sum(outcome.seconds for outcome in own)
        lines.append(f"{name:10} {len(own):7} {killed:6} {len(own) - killed:8} {seconds:7.0f}")
    return "\n".join(lines)


def write(file: Path, options: argparse.Namespace, outcomes: list[tuple[Mutant, Outcome]]) -> None:
    """Write what ran as JSON, for people and for ``--same-as``."""
    mutants = [{**asdict(mutant), **asdict(outcome)} for mutant, outcome in outcomes]
    for each in mutants:
        del each["text"]
    record = {"seed": options.seed, "markers": options.markers, "mutants": mutants}
    file.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Draw mutants, run their tests, print what survived."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("-m", dest="markers", default="", help="tests by their markers, as pytest takes them")
    parser.add_argument("--module", action="append", choices=MODULES, help="one of the modules; may be repeated")
    parser.add_argument("--sample", type=int, default=12, help="mutants of a module (12)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (0)")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the outcomes are written")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="another checkout to test")
    parser.add_argument("--same-as", type=Path, metavar="FILE", help="the mutants of an earlier --json, no others")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()
    tree = options.tree.resolve()
    former = json.loads(options.same_as.read_text())["mutants"] if options.same_as else []
    only = {each["key"] for each in former} if options.same_as else None
    names = options.module or list(MODULES)
    drawn = {name: draw(tree, name, options.sample, options.seed, only) for name in names}
    if only is not None:
        missing = only - {mutant.key for mutants in drawn.values() for mutant in mutants}
        print(f"{len(missing)} of the {len(only)} mutants of {options.same_as} are not in this tree", flush=True)
    if options.list:
        for mutant in (mutant for mutants in drawn.values() for mutant in mutants):
            print(f"{mutant.path}:{mutant.line} {mutant.operator}\n  - {mutant.before}\n  + {mutant.after}")
        return 0
    outcomes: list[tuple[Mutant, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.workers) as pool:
        bench = Bench(tree, Path(folder), options.markers, options.workers)
        for name, mutants in drawn.items():
            if mutants:
                bench.prepare(name)
            outcomes += zip(mutants, pool.map(bench.judge, mutants), strict=True)
            if options.json:
                write(options.json, options, outcomes)
    print(f"\n{summarise(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
