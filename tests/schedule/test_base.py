"""What a night starts from, on a store whose versions are only manifests."""

import json
import threading
from datetime import date
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.plugins.kubernetes.schedule import schedule_config
from pipeline.publishing.model_commands import collect
from pipeline.publishing.promotion import promote, roll_back
from pipeline.publishing.versions import version_path
from pipeline.schedule.night_config import find_base, night_config, run_name
from pipeline.schedule.nightly import read_record, run_night
from pipeline.store import Store
from tests.schedule.test_webhook import Hook, serving
from tests.waits import PATIENCE


def publish(store: Store, number: int, again: int = 0) -> str:
    """A version of the night of January ``number``, which serves from now on; ``again``: one that was forced."""
    version, day = f"v{number + again:05d}-0000000{number + again}", date(2026, 1, number)
    training = chr(ord("b") + number)
    path = version_path("clicks", version)
    with store.draft(path, kind="model", key=f"k{number}", config={}, inputs={"plan": f"p{number}"}) as draft:
        draft.commit(
            {
                "run": run_name("clicks", day),
                "dataset": f"datasets/d/{day}/key{number}",
                "checkpoint": f"runs/clicks-{day}/checkpoints/{training}/step-00000009",
            }
        )
    promote(store, "clicks", version, by="publish")
    return version


def test_a_night_starts_from_what_serves_but_never_from_itself(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert find_base(store, "clicks", date(2026, 1, 1)) is None
    first, second = publish(store, 1), publish(store, 2)
    third = find_base(store, "clicks", date(2026, 1, 3))
    assert third is not None
    assert third.version == second
    assert third.day == "2026-01-02"
    assert third.plan == "plans/p2"
    again = find_base(store, "clicks", date(2026, 1, 2))
    assert again is not None
    assert again.version == first
    roll_back(store, "clicks", "complaints")
    back = find_base(store, "clicks", date(2026, 1, 3))
    assert back is not None
    assert back.version == first


def test_a_night_forced_again_starts_from_what_it_began_with_though_that_version_is_gone(tmp_path: Path) -> None:
    store, day, starts = Store(str(tmp_path)), date(2026, 1, 2), []
    first = publish(store, 1)

    def run(config: Config) -> int:
        starts.append(config.checkpoint.init_from)
        publish(store, 2, again=len(starts) - 1)
        return 0

    config = compose(["publish.model=clicks", "data.day=2026-01-02", "force=true"])
    for _ in range(3):
        run_night(config, store, day, run, 0.0)
    assert collect(store, "clicks", 0, 0.0, dry_run=False) == [], "all but the first are one model"
    store.fs.rm(store.full(version_path("clicks", first)), recursive=True)
    assert run_night(config, store, day, run, 0.0).exit_code == 0
    assert starts == ["runs/clicks-2026-01-01/checkpoints/c/step-00000009"] * 4
    assert find_base(store, "clicks", day) is None  # nothing is known of what there was


def test_nights_go_forwards(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, 1)
    version = publish(store, 5)
    with pytest.raises(ConfigError) as error:
        find_base(store, "clicks", date(2026, 1, 4))
    assert f"the serving version {version} of model 'clicks' was trained on 2026-01-05" in error.value.message
    assert "nightjar rollback clicks" in error.value.hint


def test_the_run_of_a_night_goes_on_from_the_base_and_keeps_no_secret(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    publish(store, 1)
    hook = "nightly.webhook=https://example.org/secret"
    config = compose(["publish.model=clicks", "data.day=2026-01-02", hook])
    night = night_config(config, date(2026, 1, 2), find_base(store, "clicks", date(2026, 1, 2)))
    assert night.run == "clicks-2026-01-02"
    assert night.data.day == "2026-01-02"
    assert night.data.mapping_from == "datasets/d/2026-01-01/key1"
    assert night.checkpoint.init_from == "runs/clicks-2026-01-01/checkpoints/c/step-00000009"
    assert night.plan.former == "plans/p1"
    assert night.nightly.webhook is None
    assert config.data.mapping_from is None
    off = compose(["publish.model=clicks", "data.day=2026-01-02", "nightly.reuse_plan=false"])
    assert night_config(off, date(2026, 1, 2), find_base(store, "clicks", date(2026, 1, 2))).plan.former is None


def test_a_night_that_was_killed_goes_on_from_the_model_it_began_with(tmp_path: Path) -> None:
    store, starts, codes = Store(str(tmp_path)), [], [143, 5, 0]
    publish(store, 1)
    publish(store, 2)

    def run(config: Config) -> int:
        starts.append(config.checkpoint.init_from)
        return codes[len(starts) - 1]

    day = date(2026, 1, 3)
    config = compose(["publish.model=clicks", "data.day=2026-01-03"])
    assert run_night(config, store, day, run, 0.0).exit_code == 143
    record = read_record(store, "clicks", day)
    assert record is not None
    assert record.outcome == "running"
    roll_back(store, "clicks", "complaints")
    assert run_night(config, store, day, run, 0.0).exit_code == 5
    assert run_night(config, store, day, run, 0.0).exit_code == 0  # it failed: the next try begins anew
    assert [str(start).split("/")[1] for start in starts] == [
        "clicks-2026-01-02",
        "clicks-2026-01-02",
        "clicks-2026-01-01",
    ]


def test_a_night_that_cannot_begin_is_told_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nobody is awake: a damaged current.json, or a day before the one that serves, must reach the webhook too."""
    store, told = Store(str(tmp_path)), list[bytes]()
    publish(store, 2)

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        for code, words in ((2, "nights run forward in time"), (7, "does not say which version serves")):
            thread = threading.Thread(target=server.handle_request, daemon=True)
            thread.start()
            url = f"nightly.webhook=http://127.0.0.1:{server.server_port}/secret"
            config = compose(["publish.model=clicks", "data.day=2026-01-01", url], night=True)
            record = run_night(config, store, date(2026, 1, 1), lambda config: 0, 0.0)
            thread.join(PATIENCE)
            assert (record.outcome, record.exit_code) == ("failed", code)
            error = capsys.readouterr().err
            assert error.startswith("nightjar: ") and words in error and "hint" in error
            assert words in json.loads(told[-1])["text"]
            store.write_json("models/clicks/current.json", {})
    kept = read_record(store, "clicks", date(2026, 1, 1))
    assert kept is not None and (kept.outcome, kept.exit_code) == ("failed", 7), "the day has no verdict yet"


def test_a_fault_that_nobody_expected_is_recorded_and_told(tmp_path: Path, capsys) -> None:
    """A night must not stay ``running`` in silence: its record, page and webhook say what it was."""
    store, day = Store(str(tmp_path)), date(2026, 1, 1)

    def run(config: Config) -> int:
        raise KeyError("c14")

    with serving(204) as url:
        config = compose(["publish.model=clicks", f"data.day={day}", f"nightly.webhook={url}"], night=True)
        assert run_night(config, store, day, run, 0.0).exit_code == 1
    record = read_record(store, "clicks", day)
    assert record is not None
    assert (record.outcome, record.exit_code, record.message) == ("failed", 1, "unexpected KeyError: 'c14'")
    assert ">Error<" in (page := (tmp_path / record.summary).read_text()) and "KeyError" in page
    (told,) = Hook.bodies
    assert (told["outcome"], told["exit_code"]) == ("failed", 1)
    assert "FAILED; unexpected KeyError: 'c14'" in told["text"] and "bug in Nightjar" in told["hint"]
    assert "Traceback" in capsys.readouterr().err


def test_a_verdict_whose_page_cannot_be_written_stands_and_is_told(tmp_path: Path) -> None:
    store, day = Store(str(tmp_path)), date(2026, 1, 1)

    def run(config: Config) -> int:
        (tmp_path / "runs/clicks-2026-01-01/nightly.html").mkdir()
        return 5

    with serving(204) as url:
        config = compose(["publish.model=clicks", f"data.day={day}", f"nightly.webhook={url}"], night=True)
        assert run_night(config, store, day, run, 0.0).exit_code == 5
    record = read_record(store, "clicks", day)
    assert record is not None and record.outcome == "failed"
    assert "page cannot be written: unexpected IsADirectoryError" in Hook.bodies[0]["message"]


def test_a_night_may_say_what_its_warm_start_allows(tmp_path: Path) -> None:
    store, overrides = Store(str(tmp_path)), ["checkpoint.init_tables_only=true", "checkpoint.allow=[train.lr]"]
    publish(store, 1)
    with pytest.raises(ConfigError, match="init_from is null"):
        compose(overrides)
    config = compose(["publish.model=clicks", *overrides], night=True)
    night = night_config(config, date(2026, 1, 2), find_base(store, "clicks", date(2026, 1, 2)))
    assert night.checkpoint.init_from == "runs/clicks-2026-01-01/checkpoints/c/step-00000009"
    assert night.checkpoint.init_tables_only and night.checkpoint.allow == ["train.lr"]
    assert schedule_config(overrides).checkpoint.init_tables_only, "a schedule composes as its nights do"
