"""Prose in Markdown has lines of at most 120 characters; tables, code and headings are exempt."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 120
SKIPPED = {".venv", ".git", "store", "node_modules"}


def pages() -> list[Path]:
    """Every page that git knows; outside of a checkout every page there is."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")]
    return [ROOT / name for name in sorted(names) if not SKIPPED & set(Path(name).parts) and (ROOT / name).exists()]


def prose(text: str) -> list[tuple[int, str]]:
    """The numbered lines of ``text`` that are neither a table's, nor code, nor a heading, which cannot be wrapped."""
    fence, lines = "", []
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence and not line.lstrip().startswith(("|", "#")):
            lines.append((number, line))
    return lines


def test_lines_of_prose_are_short() -> None:
    found, long = pages(), []
    for page in found:
        lines = [(number, len(line)) for number, line in prose(page.read_text()) if len(line) > LONGEST]
        long += [f"{page.relative_to(ROOT)}:{number}: {length} characters" for number, length in lines]
    assert len(found) > 20
    assert long == [], "\n".join(long)


def test_tables_code_and_headings_are_exempt() -> None:
    text = f"a\n```bash\n{'b' * 200}\n```\n| {'c' * 200} |\n# {'e' * 200}\n{'d' * 200}\n"
    assert [number for number, line in prose(text) if len(line) > LONGEST] == [7]
