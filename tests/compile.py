"""The package's C libraries, built as an installation builds them."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def built(name: str, folder: Path) -> Path | None:
    """The extension module ``name``, built into ``folder``; None where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (module,) = (each for each in modules if each["name"].endswith(f".{name}"))
    path = folder / f"{name}.so"
    command = [compiler, *module["extra-compile-args"], "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path)]
    sources = [str(ROOT / source) for source in module["sources"]]
    subprocess.run([*command, *sources, *(f"-l{each}" for each in module.get("libraries", ()))], check=True)
    return path
