"""Every setting has its line in the list of keys; ``tests/launch/test_keys.py`` tries what the lines say."""

from fnmatch import fnmatchcase

from pipeline.stages.keys import KEYS, SETTINGS
from tests.setting_paths import LEAVES


def test_every_setting_is_in_the_list_and_nothing_else_is() -> None:
    listed = [path for path in LEAVES if any(use.holds(path) for use in SETTINGS)]
    idle = [path for use in SETTINGS for path in use.paths if not any(fnmatchcase(leaf, path) for leaf in LEAVES)]
    undecided = "a setting that pipeline/stages/keys.py says nothing about: which keys' output can it change?"
    assert sorted(set(LEAVES) - set(listed)) == [], undecided
    assert idle == [], "pipeline/stages/keys.py lists what is no setting"


def test_a_setting_is_said_to_belong_to_no_key_or_to_some_but_not_both() -> None:
    for path in LEAVES:
        lines = [use for use in SETTINGS if use.holds(path)]
        assert len(lines) == 1 or all(use.keys for use in lines), path
        assert all(set(use.keys) <= set(KEYS) for use in lines), path
