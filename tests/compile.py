"""The package's C libraries, built as an installation builds them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def built(name: str, folder: Path) -> Path | None:
    """The extension module ``name``, built into ``folder`` with CFLAGS; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (module,) = (each for each in modules if each["name"].endswith(f".{name}"))
    path = folder / f"{name}.so"
    own = shlex.split(os.environ.get("CFLAGS", ""))  # of tests/project/test_sanitised.py
    strict = [] if own else ["-Werror"]  # sanitisers make GCC warn of what it cannot follow any more
    command = [compiler, *module["extra-compile-args"], *own, "-Wall", *strict, "-shared", "-fPIC", "-o", str(path)]
    sources = [str(ROOT / source) for source in module["sources"]]
    subprocess.run([*command, *sources, *(f"-l{each}" for each in module.get("libraries", ()))], check=True)
    return path
