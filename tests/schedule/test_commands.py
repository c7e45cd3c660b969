"""``nightjar nightly`` and ``nightjar backfill``: mistakes, and two launchers at once."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.launch.locks import night_lock
from pipeline.store import Store
from pipeline.store.lease import CHECKS
from tests.schedule.test_webhook import Hook, serving
from tests.waits import TurnedClock

LEASE_SECONDS = 60.0
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
    (["schedule", "apply", *SCHEDULED, "force=true"], "every retry of a night would throw away what it has made"),
    (["schedule", "apply", *SCHEDULED, "nightly.time_zone=Asia/Tokyo"], "nightly.time_zone is Asia/Tokyo and schedule"),
    (
        [
            "schedule",
            "apply",
            *SCHEDULED,
            "data=criteo",
            'data.path="s3://logs/{day}/*.tsv"',
            "data.time_zone=Asia/Tokyo",
        ],
        "data.time_zone is Asia/Tokyo and schedule",
    ),
    (
        ["schedule", "render", *SCHEDULED, "nightly.webhook=https://u:secret@host/x"],
        "nightly.webhook is given as it is",
    ),
    (["schedule", "render", *SCHEDULED, "launch.pods.env={HF_PAT:x}"], "launch.pods.env sets HF_PAT, whose value"),
    (["schedule", "render", *SCHEDULED, "launch.pods.env={WANDB_API_KEY:x}"], "launch.pods.env sets WANDB_API_KEY"),
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


@pytest.fixture
def renewing(monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    """Within: time passes whenever the two threads of a lease and who waits for its renewal have nothing to do."""
    clock = TurnedClock(runs=False)
    clock.stand_in(monkeypatch)
    return clock.turning(LEASE_SECONDS / CHECKS, lambda: clock.waiting() == 3)


def test_the_second_of_two_launchers_ends_with_8_and_names_the_first(tmp_path: Path, capsys, renewing) -> None:
    store = Store(str(tmp_path))
    with night_lock(store, "clicks", LEASE_SECONDS, "backfill 2026-01-01 to 2026-01-09"), renewing:
        code = cli.main(["nightly", "date=2026-01-10", "publish.model=clicks", f"store={tmp_path}"])
    assert code == 8
    said = capsys.readouterr().err
    assert "model 'clicks' is already being worked on: host " in said
    assert "(backfill 2026-01-01 to 2026-01-09) holds " in said
    assert store.names("runs") == []


def test_a_schedule_leaves_the_shells_kubeconfig_out_and_warns_of_an_hour_that_a_day_does_not_have(capsys) -> None:
    shell = ["launch.context=laptop", "schedule.time_zone=Europe/Berlin", "schedule.cron='30 2 * * *'"]
    assert cli.main(["schedule", "render", *SCHEDULED, *shell]) == 0
    said = capsys.readouterr()
    objects = list(yaml.safe_load_all(said.out))
    assert "laptop" not in said.out and "has no 02:30 in Europe/Berlin" in said.err
    assert {each["metadata"]["labels"]["nightjar/schedule"] for each in objects} == {"nightjar-nightly"}
    assert [each["kind"] for each in objects].count("NetworkPolicy") == 1
    cron = objects[-1]["spec"]
    assert "suspend" not in cron  # or applying it again would resume a suspended schedule
    assert cli.main(["schedule", "render", *SCHEDULED]) == 0
    assert capsys.readouterr().err == ""


def test_what_ends_a_night_before_it_begins_is_posted_and_recorded(tmp_path: Path, capsys, renewing) -> None:
    """A wrong setting, and another launcher on the model; a date with a verdict would keep it."""
    store = Store(str(tmp_path / "s"))
    store.write_bytes("README", b"a store that exists")
    with serving(200, 200) as url:
        night = ["nightly", "date=2026-01-10", "publish.model=clicks", f"store={tmp_path}/s", f"nightly.webhook={url}"]
        assert cli.main([*night, "train.lr=fast"]) == 2
        record = store.read_json("runs/clicks-2026-01-10/nightly.json")
        assert (record["outcome"], record["exit_code"]) == ("failed", 2) and "train.lr" in record["message"]
        with night_lock(store, "clicks", LEASE_SECONDS, "backfill"), renewing:
            assert cli.main([*night, "data.synthetic.rows=2000"]) == 8
    assert [(body["outcome"], body["exit_code"]) for body in Hook.bodies] == [("failed", 2), ("failed", 8)]
    assert store.read_json("runs/clicks-2026-01-10/nightly.json") == record  # the other launcher's to write
    capsys.readouterr()


def test_a_refusal_leaves_a_verdict_and_a_record_that_cannot_be_read_alone(tmp_path: Path, capsys, renewing) -> None:
    """What is posted has nothing of the version that was published, and trackers keep the night's outcome."""
    store, gauges = Store(str(tmp_path / "s")), tmp_path / "gauges"
    gauges.mkdir()
    record = {"format": 1, "model": "clicks", "date": "2026-01-10", "run": "clicks-2026-01-10", "outcome": "published"}
    decided = {**record, "version": "v00001-aa", "verdict": "PASS", "ne": 0.7, "seconds": {"train": 1.0}}
    store.write_json("runs/clicks-2026-01-10/nightly.json", decided)
    store.write_json("runs/clicks-2026-01-11/nightly.json", {**decided, "format": 99})
    with serving(200, 200) as url:
        night = ["nightly", "publish.model=clicks", f"store={store.url}", f"nightly.webhook={url}"]
        night += ["track.to=[prometheus]", f"track.prometheus.folder={gauges}", "nightly.wait_minutes=0"]
        with night_lock(store, "clicks", LEASE_SECONDS, "backfill"), renewing:
            assert cli.main([*night, "date=2026-01-10"]) == 8
        assert list(gauges.iterdir()) == []
        assert cli.main([*night, "date=2026-01-11"]) == 7
    assert store.read_json("runs/clicks-2026-01-10/nightly.json") == decided
    assert store.read_json("runs/clicks-2026-01-11/nightly.json") == {**decided, "format": 99}
    posted, _ = Hook.bodies
    assert posted["text"].startswith("Nightjar: 2026-01-10 of model clicks: FAILED; model 'clicks' is already being")
    assert not {"version", "verdict", "ne", "seconds"} & {name for name, value in posted.items() if value}
    capsys.readouterr()
