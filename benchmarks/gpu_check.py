"""``make gpu-check``: the tests and runs that need a GPU, on a machine that has one but no package index.

``pack FOLDER`` downloads the wheels for a machine with Python 3.12 and torch for CUDA: everything but torch and what
NVIDIA has with it. ``run`` installs them into a folder of their own, runs the tests marked ``gpu`` and the demo on the
GPU in each precision, compiled and with CUDA graphs, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness import NIGHTJAR, finish, result_of

# What the torch of the machine goes with; pipeline/core/package_versions.py has the versions that CI runs.
TRIPLES = {"2.11": "1.6.0", "2.12": "1.7.0", "2.13": "1.8.0", "2.14": "1.9.0"}
PYTHON, PLATFORM = "3.12", "manylinux_2_28_x86_64"
# Installed with torch, and large.
WITH_TORCH = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==")
RUNS = {
    "fp32": ["train.precision=fp32"],
    "tf32": ["train.precision=tf32"],
    "bf16": ["train.precision=bf16"],
    "compiled": ["train.precision=bf16", "train.compile=true"],
    "graphs": ["train.precision=bf16", "train.cuda_graphs=true"],
}
MACHINE = """
import json, sys, torch
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
told = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda), "device": device}
print(json.dumps(told))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = options.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", allow_abbrev=False)
    packing.add_argument("folder", type=Path)
    packing.add_argument("--torch", default="2.11", choices=sorted(TRIPLES), help="torch of the machine")
    running = commands.add_parser("run", allow_abbrev=False)
    running.add_argument("--wheels", type=Path, help="the folder that pack filled; without it, packages are there")
    given = options.parse_args()
    if given.command == "pack":
        pack(given.folder, given.torch)
    else:
        run(given.wheels)


def wanted(lines: list[str], torch: str) -> list[str]:
    """The requirements to pack of a lock file's ``lines``, for a machine that has ``torch``."""
    pins = [line.split(";")[0].rstrip("\\ ") for line in lines if "==" in line and line[:1] not in "# "]
    pins = [re.sub(r"^(torchrec|fbgemm-gpu)==.*", rf"\1=={TRIPLES[torch]}", pin) for pin in pins]
    return [pin for pin in pins if not WITH_TORCH.match(pin)]


def pack(folder: Path, torch: str) -> None:
    """Download the wheels of the lock files into ``folder``."""
    lines = [line for name in ("cuda", "dev") for line in Path(f"requirements/{name}.txt").read_text().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(wanted(lines, torch)) + "\n")
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    download += ["--python-version", PYTHON, "--platform", PLATFORM, "--platform", "manylinux2014_x86_64"]
    subprocess.run([*download, "-d", str(folder), "-r", str(listed)], check=True)
    print(f"packed {len(list(folder.glob('*.whl')))} wheels into {folder}")


def run(wheels: Path | None) -> None:
    """Run what needs a GPU, with the packages of ``wheels``, and print the JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        packages, report = Path(folder, "packages"), Path(folder, "tests.xml")
        if wheels is not None:
            install = ["pip", "install", "-q", "--no-index", "--no-deps", "--find-links", str(wheels)]
            target = ["--target", str(packages), "-r", str(wheels / "requirements.txt")]
            subprocess.run([sys.executable, "-m", *install, *target], check=True)
            os.environ["PYTHONPATH"] = f"{Path.cwd()}{os.pathsep}{packages}"
        tests = ["pytest", "-q", "-m", "gpu", "tests", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", *tests], check=False)
        figures = {name: _demo(name, settings, f"{folder}/store") for name, settings in RUNS.items()}
        machine = json.loads(subprocess.check_output([sys.executable, "-c", MACHINE], text=True))
        finish("gpu_check", None, machine=machine, tests=outcome_of(report), runs=figures)


def outcome_of(report: Path) -> dict[str, Any]:
    """Counts and failed names of a JUnit ``report``; ``error`` where pytest wrote none."""
    if not report.exists():
        return {"error": "pytest wrote no report"}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = {name: [case for case in cases if case.find(name) is not None] for name in ("failure", "error", "skipped")}
    bad = kinds["failure"] + kinds["error"]
    return {
        "passed": len(cases) - len(bad) - len(kinds["skipped"]),
        "failed": len(bad),
        "skipped": len(kinds["skipped"]),
        "names": sorted(f"{case.get('classname')}::{case.get('name')}" for case in bad),
    }


def _demo(name: str, changed: list[str], store: str) -> dict[str, Any]:
    """Figures of the demo on the GPU, or what went wrong."""
    settings = ["experiment=demo", f"run={name}", f"store={store}", *changed, "hardware.device=cuda"]
    command = [sys.executable, *NIGHTJAR, "run", *settings, "train.global_batch=8192", "train.profile=true"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    place = Path(store, "runs", name)
    if done.returncode or not (place / "result.json").exists():
        return {"exit_code": done.returncode, "message": done.stderr[-500:]}
    record, table = result_of(store, name), place / "profile-rank0.txt"
    return {
        "samples_per_s": record["train"]["samples_per_s"],
        "phases": record["train"].get("phases"),
        "auc": record["eval"]["auc"],
        "profile": table.read_text().splitlines() if table.exists() else [],
    }


if __name__ == "__main__":
    main()
