"""Every command of the README: `make` targets exist, `nightjar` and `torchx` lines are understood, and they run.

`make test` proves that each line parses, that its overrides compose and that TorchX knows its component; it takes
seconds. `make test-all` runs all of them in turn, as a reader does, on small data.
"""

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config.compose import compose, sweep
from pipeline.core.errors import NightjarError
from pipeline.plugins.tuning.space import edges, split
from tests.commands import nightjar
from tests.waits import PATIENCE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
NIGHTJAR = [line for line in LINES if line.startswith("nightjar ")]
# Those of blocks without a language take long, or name what only a reader has: they are not run.
SHOWN = re.findall(r"^nightjar .*$", re.sub(r"```bash\n.*?```", "", README, flags=re.S), re.M)
DAY = "logs/2026-01-01"  # of the walk with a log of one's own
SMALL = ["data.synthetic.rows=20000", "train.global_batch=1024"]


def runs_stages(line: str) -> bool:
    return line.startswith(("nightjar run", "nightjar what-if")) and "--cfg" not in line


def command(line: str) -> list[str]:
    """The line's arguments with a small data set in place of a big one; the store is the test's own folder."""
    words = shlex.split(line)[1:]
    if runs_stages(line) and "data.path" not in line and "data=clicks" not in line:
        words += SMALL
    if line.startswith("nightjar demo"):
        words += ["--nights", "3", "--rows", "20000"]
    if line.startswith("nightjar init"):
        words += ["--config-dir", "guessed"]  # beside the README's own schema
    if line.startswith(("nightjar run", "nightjar nightly")) and "--cfg" not in line:
        words.append("train.threads_per_rank=1")  # several wait for each other, where other tests run beside
    if line.startswith("nightjar run") and "hardware=" not in line:
        words.append("launch.inline=[ingest,plan,partition,train,evaluate,publish]")  # the others are launched
    return words


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


def block(language: str) -> str:
    """The README's only block in ``language``."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return str(text)


def write_own_schema(work: Path) -> None:
    """The schema of the walk with a log of one's own."""
    schema = work / "my/data/clicks.yaml"
    schema.parent.mkdir(parents=True)
    schema.write_text(block("yaml"))


def write_own_log(work: Path) -> None:
    """The README's CSV, made long enough for the gate."""
    (work / DAY).mkdir(parents=True)
    draw = random.Random(1)
    rows = []
    for number in range(20_000):
        user, ad = draw.randrange(200), draw.randrange(50)
        time, price = f"{number // 1000:02}:{number % 60:02}:00", 20 * draw.random()
        clicked = int(draw.random() < (0.6 if ad % 5 == 0 else 0.05))
        rows.append(f"2026-01-01 {time},u{user},a{ad},{draw.choice(['phone', 'tablet'])},{price:.2f},{clicked}\n")
    (work / DAY / "clicks.csv").write_text(block("csv") + "".join(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory of its own, with the real data where the README expects it, and a finished demo."""
    home = tmp_path_factory.mktemp("readme")
    work = home / "project"
    work.mkdir()
    for name in ("conf", "pipeline", "components", ".torchxconfig"):
        (work / name).symlink_to(ROOT / name)
    if (ROOT.parent / "shared").is_dir():
        (home / "shared").symlink_to(ROOT.parent / "shared")
    write_own_schema(work)
    write_own_log(work)
    demo = nightjar(*command("nightjar run experiment=demo run=demo")[:-1], cwd=work)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    return work


def test_the_readme_names_the_two_commands_first() -> None:
    assert [line.split()[:2] for line in LINES[:2]] == [["make", "demo"], ["make", "test"]]


def test_make_targets_exist() -> None:
    targets = [line.split()[1] for line in LINES if line.startswith("make ")]
    done = run(["make", "-n", *targets], ROOT)
    assert done.returncode == 0, done.stderr


# What a reader puts in place of a name in angle brackets, and what commands take besides overrides.
STAND_INS = {"<image by digest>": f"registry/nightjar@sha256:{'0' * 64}", "<host>": "host"}
OWN_WORDS = re.compile("(date|from|to|search|study)=")


def understand(line: str, composed: set[tuple[bool, tuple[str, ...]]]) -> None:
    """Parse a command line and compose all its overrides; NightjarError or SystemExit where that cannot be.

    ``composed``: what need not be composed again, to which this line's jobs are added.
    """
    for name, value in STAND_INS.items():
        line = line.replace(name, value)
    known = cli.find_commands()
    options, rest = cli._parser(known).parse_known_args(cli._flagged(shlex.split(line.split(" > ")[0])[1:], known))
    options.composing = [each.name for each in known if each.composes]
    overrides = [word for word in cli._positional(rest, options) if "=" in word and not OWN_WORDS.match(word)]
    if not overrides:
        return
    if options.command in ("nightly", "backfill", "schedule"):
        overrides.append("data.day=2026-01-01")
    if options.command == "tune":
        shared, space = split(overrides)
        jobs = [[*shared, *edge] for edge in edges(space)]
    else:
        jobs = sweep(overrides)
    for job in jobs:
        night = options.command == "nightly"
        if (night, tuple(job)) not in composed:
            compose(job, night=night)
            composed.add((night, tuple(job)))


def test_nightjar_lines_parse_and_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own_schema(tmp_path)
    monkeypatch.chdir(tmp_path)
    misunderstood: list[str] = []
    composed: set[tuple[bool, tuple[str, ...]]] = set()
    for line in [*NIGHTJAR, *SHOWN]:
        try:
            understand(line, composed)
        except (NightjarError, SystemExit) as error:
            misunderstood.append(f"{line}: {error}")
    assert len(NIGHTJAR) > 20 and len(SHOWN) > 5
    assert misunderstood == [], "\n".join(misunderstood)


def test_torchx_lines_name_components_and_overrides_that_there_are() -> None:
    from torchx.specs.finder import get_component

    lines = [line for line in LINES if line.startswith("torchx ")]
    assert len(lines) == 4
    for line in lines:
        submitted, _, overrides = line.partition(" -- ")
        assert get_component(str(ROOT / submitted.split()[4])).name
        compose(shlex.split(overrides))


@pytest.mark.slow
def test_nightjar_lines_run_one_after_the_other(folder: Path) -> None:
    """As a reader types them: what a line shows, an earlier one has made."""
    failed, shared = [], (folder.parent / "shared").exists()
    for line in NIGHTJAR:
        if "../shared/" in line and not shared:  # the real data sets are not beside this checkout
            continue
        done = nightjar(*command(line), cwd=folder)
        said = done.stdout + done.stderr
        if done.returncode or "Traceback" in said:
            failed.append(f"{line}\n{said}")
    assert failed == [], "\n".join(failed)


@pytest.mark.slow
def test_torchx_lines_run(folder: Path) -> None:
    torchx = Path(sys.executable).with_name("torchx")
    lines = [line for line in LINES if line.startswith("torchx ")]
    assert len(lines) == 4
    for line in lines:
        done = run([str(torchx), *shlex.split(line)[1:], *SMALL], folder)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_readme_line_is_one_that_is_tested() -> None:
    assert [line for line in LINES if not line.startswith(("make ", "nightjar ", "torchx "))] == []
