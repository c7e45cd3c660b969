"""``nightjar nightly`` and ``nightjar backfill``: mistakes, and two launchers at once."""

from pathlib import Path

import pytest

from pipeline import cli
from pipeline.artifacts import Store
from pipeline.schedule.lock import held

MISTAKES = [
    (["nightly", "date=tomorrow"], "date is 'tomorrow', expected YYYY-MM-DD, yesterday or today"),
    (["nightly", "date=2026-01-01", "data.day=2026-01-02"], "data.day=2026-01-02 is given, but the night's date says"),
    (["nightly", "run=x"], "run=x is given, but a night's run is called <model>-<date>"),
    (["nightly", "stages=[train]"], "stages=[train] is given, but a night does all six"),
    (["backfill", "from=2026-01-01"], "to= is missing"),
    (["backfill", "from=2026-01-02", "to=2026-01-01"], "from=2026-01-02 lies after to=2026-01-01"),
    (["nightly", "nightly.webhook=ftp://host/x"], "nightly.webhook is no http or https URL"),
    (["nightly", "nightly.timezone=Mars/Base"], "nightly.timezone is 'Mars/Base', expected the name of a time zone"),
    (["nightly", "nightly.wait_minutes=-1"], "nightly.wait_minutes is -1"),
    (["nightly", "--date", "2026-01-01"], "nightjar nightly does not know --date"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(each[0]) for each in MISTAKES])
def test_a_mistake_is_one_clear_message_and_nothing_is_left_behind(
    tmp_path: Path, capsys, arguments: list[str], words: str
) -> None:
    assert cli.main([*arguments, f"store={tmp_path}/s"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "hint:" in said
    assert "Traceback" not in said
    assert not (tmp_path / "s").exists()


def test_the_second_of_two_launchers_ends_with_8_and_names_the_first(tmp_path: Path, capsys) -> None:
    store = Store(str(tmp_path))
    with held(store, "clicks", 0.6, "backfill 2026-01-01 to 2026-01-09", lambda text: None):
        code = cli.main(["nightly", "date=2026-01-10", "publish.model=clicks", f"store={tmp_path}"])
    assert code == 8
    said = capsys.readouterr().err
    assert "model 'clicks' is being worked on already: host " in said
    assert "(backfill 2026-01-01 to 2026-01-09) holds " in said
    assert store.names("runs") == []
