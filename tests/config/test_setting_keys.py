"""Every setting is decided: it belongs to keys or to none; ``tests/launch/test_keys.py`` tries what the lines say."""

from pipeline.stages.artifact_keys import NO_KEY
from tests.keys import LISTS
from tests.setting_paths import LEAVES

KEYED = [use for uses in LISTS.values() for use in uses]


def test_every_setting_is_in_a_list_and_nothing_else_is() -> None:
    undecided = "settings in no stage's list and not in stages/artifact_keys.py: which artifacts can they change?"
    assert [path for path in LEAVES if not any(use.covers(path) for use in (*KEYED, *NO_KEY))] == [], undecided
    known = {prefix for path in LEAVES for prefix in (path, f"{path.rpartition('.')[0]}.*")}
    listed = {path for use in (*KEYED, *NO_KEY) for path in use.paths}
    assert sorted(listed - known) == [], "lists name what is no setting"


def test_a_setting_is_said_to_belong_to_no_key_or_to_some_but_not_both() -> None:
    both = [path for path in LEAVES if any(u.covers(path) for u in KEYED) and any(u.covers(path) for u in NO_KEY)]
    assert both == []
