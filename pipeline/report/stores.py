"""What ``nightjar store gc`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline import units
from pipeline.records import Removed, RemovedFromStore

_PLURALS = {
    "dataset": "datasets",
    "run": "runs",
    "plan": "plans",
    "towers": "towers artifacts",
    "study": "studies",
    "search": "searches",
    "unfinished search": "unfinished searches",
    "remains": "leftovers",
}
_SINGULARS = {"towers": "towers artifact", "remains": "leftover"}  # the others are those of the kind


def collected(result: RemovedFromStore) -> str:
    """A line for everything removed, and for what is kept against expectation; then totals, and why the rest stays."""
    verb = "would remove" if result.dry_run else "removed"
    lines = [f"{verb} {each.path}  {units.size(each.bytes)}  {each.reason}" for each in result.removed]
    lines += [f"keep {each.path}  {each.reason}" for each in result.kept if each.path in result.noticed]
    total = f"{verb} {_counted(result.removed)}: {units.size(result.bytes)}"
    lines.append(total if result.removed else "nothing to remove")
    lines.append(f"kept {_counted(result.kept)}, for {units.plural(result.versions, 'version')}")
    young = f"less than {result.keep_days:g} days old (--keep-days)"
    for reason in dict.fromkeys(each.reason for each in result.kept):
        same = [each for each in result.kept if each.reason == reason]
        lines.append(f"  {_counted(same)}: {young if reason == 'young' else reason}")
    return "\n".join(lines)


def _counted(entries: Sequence[Removed]) -> str:
    """``3 datasets, 2 runs``; "nothing" for none."""
    kinds = Counter(each.kind for each in entries)
    shown = [
        f"{units.count(kinds[kind])} {_SINGULARS.get(kind, kind) if kinds[kind] == 1 else nouns}"
        for kind, nouns in _PLURALS.items()
        if kinds[kind]
    ]
    return ", ".join(shown) or "nothing"
