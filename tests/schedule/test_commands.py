"""``nightjar nightly`` and ``nightjar backfill``: mistakes, and two launchers at once."""

from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.schedule.lock import night_lock
from pipeline.store import Store

SCHEDULED = ["launch=kubernetes", f"launch.pods.image=r/nightjar@sha256:{'ab' * 32}", "store=s3://b/s"]
MISTAKES = [
    (["nightly", "date=tomorrow"], "date is 'tomorrow', expected YYYY-MM-DD, yesterday or today"),
    (
        ["nightly", "date=2026-01-01", "data.day=2026-01-02"],
        "data.day=2026-01-02 is given, but a night takes it from its date",
    ),
    (["nightly", "run=x"], "run=x is given, but a night's run is called <model>-<date>"),
    (["nightly", "stages=[train]"], "stages=[train] is given, but a night runs all stages"),
    (["backfill", "from=2026-01-01"], "to= is missing"),
    (["backfill", "from=2026-01-02", "to=2026-01-01"], "from=2026-01-02 is after to=2026-01-01"),
    (["nightly", "nightly.webhook=ftp://host/x"], "nightly.webhook is not an http or https URL"),
    (["nightly", "nightly.time_zone=Mars/Base"], "nightly.time_zone is 'Mars/Base', expected the name of a time zone"),
    (["nightly", "nightly.wait_minutes=-1"], "nightly.wait_minutes is -1"),
    (["nightly", "--date", "2026-01-01"], "nightjar nightly does not know --date"),
    (["schedule", "render", "run=x"], "run=x is given, but a night's run is called <model>-<date>"),
    (["schedule", "apply", "date=2026-01-01"], "date=2026-01-01 is given, but every night of a schedule has its own"),
    (["schedule", "apply", *SCHEDULED, "gate.force='a new app'"], "in a schedule it would publish every model"),
    (["schedule", "status", "-cd", "my"], "nightjar schedule status does not know -cd"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[" ".join(each[0]) for each in MISTAKES])
def test_a_mistake_is_one_clear_message_and_nothing_is_left_behind(
    tmp_path: Path, capsys, arguments: list[str], words: str
) -> None:
    elsewhere = [] if any("store=" in each for each in arguments) else [f"store={tmp_path}/s"]
    assert cli.main([*arguments, *elsewhere]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "hint:" in said
    assert "Traceback" not in said
    assert not (tmp_path / "s").exists()


def test_a_schedule_of_logs_that_lie_by_day_leaves_the_day_to_its_nights(capsys) -> None:
    logs = 'data.path="s3://logs/{day}/*.tsv.gz"'
    assert cli.main(["schedule", "render", *SCHEDULED, "data=criteo", logs]) == 0
    (cron,) = (each for each in yaml.safe_load_all(capsys.readouterr().out) if each["kind"] == "CronJob")
    command = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "date=yesterday" in command and logs in command
    assert not any("data.day" in part for part in command)


def test_the_second_of_two_launchers_ends_with_8_and_names_the_first(tmp_path: Path, capsys) -> None:
    store = Store(str(tmp_path))
    with night_lock(store, "clicks", 0.6, "backfill 2026-01-01 to 2026-01-09"):
        code = cli.main(["nightly", "date=2026-01-10", "publish.model=clicks", f"store={tmp_path}"])
    assert code == 8
    said = capsys.readouterr().err
    assert "model 'clicks' is already being worked on: host " in said
    assert "(backfill 2026-01-01 to 2026-01-09) holds " in said
    assert store.names("runs") == []
