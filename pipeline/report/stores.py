"""What ``nightjar store gc`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units

_NOUNS = {"dataset": "dataset", "run": "run", "plan": "plan", "towers": "towers artifact", "remains": "remain"}


def collected(result: Mapping[str, Any]) -> str:
    """A line for each thing that went, and for each that stays against expectation; then how much, and why the rest."""
    verb = "would remove" if result["dry_run"] else "removed"
    removed, kept = result["removed"], result["kept"]
    lines = [f"{verb} {each['path']}  {units.size(each['bytes'])}  {each['reason']}" for each in removed]
    lines += [f"keep {each['path']}  {each['reason']}" for each in kept if each["path"] in result["noticed"]]
    lines.append(f"{verb} {_counted(removed)}: {units.size(result['bytes'])}" if removed else "nothing to remove")
    lines.append(f"kept {_counted(kept)}, for {units.plural(result['versions'], 'version')}")
    young = f"less than {result['keep_days']:g} days old (--keep-days)"
    for reason in Counter(each["reason"] for each in kept):
        same = [each for each in kept if each["reason"] == reason]
        lines.append(f"  {_counted(same)}: {young if reason == 'young' else reason}")
    return "\n".join(lines)


def _counted(entries: Sequence[Mapping[str, Any]]) -> str:
    """``3 datasets, 2 runs``; "nothing" for none."""
    kinds = Counter(each["kind"] for each in entries)
    return ", ".join(units.plural(kinds[kind], noun) for kind, noun in _NOUNS.items() if kinds[kind]) or "nothing"
