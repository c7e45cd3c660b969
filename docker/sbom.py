"""Writes a CycloneDX bill of materials of the image it runs in: Python packages and Debian packages.

python sbom.py > sbom.cdx.json
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")
NAME = "nightjar"


def component(kind: str, name: str, version: str, licence: str = "") -> dict[str, Any]:
    """A component; ``kind``: of its package URL, pypi or deb/debian."""
    entry: dict[str, Any] = {"type": "library", "name": name, "version": version}
    entry["purl"] = f"pkg:{kind}/{name}@{version.replace('+', '%2B')}"
    if licence:
        entry["licenses"] = [{"license": {"name": licence}}]
    return entry


def python_packages() -> list[dict[str, Any]]:
    """The distributions of this Python, sorted by name."""
    found = {}
    for each in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower()
        licence = each.metadata.get("License-Expression") or (each.metadata.get("License") or "").split("\n")[0]
        found[name] = component("pypi", name, each.version, licence[:100])
    return [found[name] for name in sorted(found)]


def debian_packages(status: Path = DPKG) -> list[dict[str, Any]]:
    """The installed packages of the base image; none where it is not Debian."""
    if not status.exists():
        return []
    packages = []
    for block in status.read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Status): (.*)$", block, re.M))
        if fields.get("Status", "").endswith(" installed"):
            packages.append(component("deb/debian", fields["Package"], fields["Version"]))
    return packages


def bill() -> dict[str, Any]:
    """The document; no time and no serial number, so that equal images have equal ones."""
    libraries = [each for each in python_packages() if each["name"] != NAME]
    own = {"type": "application", "name": NAME, "version": metadata.version(NAME)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": [*libraries, *debian_packages()],
    }


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    sys.stdout.write("\n")
