"""The workflows of GitHub: what others could change does not run."""

import re
from pathlib import Path

WORKFLOWS = Path(__file__).parents[2] / ".github" / "workflows"


def test_actions_are_named_by_digest() -> None:
    files = [path for end in ("yml", "yaml") for path in WORKFLOWS.glob(f"*.{end}")]
    used = [name for path in files for name in re.findall(r"uses:\s*(\S+)", path.read_text())]
    assert used and [name for name in used if not re.fullmatch(r"\S+@[0-9a-f]{40}", name)] == []
