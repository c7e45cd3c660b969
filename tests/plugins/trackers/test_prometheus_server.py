"""Prometheus itself scrapes the gauges, accepts the alert rules, and evaluates them."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.config import PrometheusConfig, TrackConfig
from pipeline.plugins.trackers.prometheus import PROMETHEUS
from pipeline.records import NightRecord, Result
from pipeline.store import Store
from tests.servers import Quiet, listening_port, serving
from tests.waits import until

SHIPPED = Path(__file__).parents[3] / "docs" / "prometheus"
RESULT = Result.from_json(
    {
        "run": "r",
        "status": "done",
        "eval": {"ne": 0.8, "auc": 0.75, "calibration": 1.3, "logloss": 0.5, "samples": 9},
        "stages": {"ingest": {"status": "done", "seconds": 1.5, "artifact": "a"}},
        "ingest": {"rows": 100, "rows_quarantined": 2},
        "train": {"ssd": {"ssd_hit_rate": 0.9}},
        "checkpoint": {"stall_share": 0.01, "bytes_written": 5},
    }
)
RECORD = {"step": 1, "steps_total": 9, "loss": 0.5, "ne_window": 0.9, "samples_per_s": 1.0, "data_wait_share": 0.1}


def written(folder: Path) -> str:
    """All gauges of a run and of a night, as text."""
    track = TrackConfig(prometheus=PrometheusConfig(folder=str(folder)))
    run = PROMETHEUS.run(track, Store(str(folder / "store")), "r", "ads")
    run.records([RECORD])
    run.ended(RESULT, {})
    night = NightRecord(
        model="ads",
        date="2026-01-31",
        run="r",
        outcome="failed",
        exit_code=3,
        finished=time.time() - 40 * 3600,
        ne=0.8,
        incumbent_ne=0.81,
        rows=90,
        rows_quarantined=10,
        rows_scored=20,
        seconds={"train": 3.0},
        seconds_waited=7200.0,
    )
    PROMETHEUS.night(track, Store(str(folder / "store")), night)
    return "".join((folder / f"nightjar_ads_{part}.prom").read_text() for part in ("run", "night"))


@pytest.mark.parametrize("file", ["alerts.yaml", "dashboard.json"])
def test_rules_and_dashboard_name_gauges_that_there_are(tmp_path: Path, file: str) -> None:
    used = set(re.findall(r"nightjar_\w+", (SHIPPED / file).read_text()))
    known = set(re.findall(r"^# TYPE (nightjar_\w+) gauge$", written(tmp_path), re.MULTILINE))
    assert len(used) >= 5
    assert used <= known


def test_the_dashboard_is_json_with_a_query_in_every_panel() -> None:
    panels = json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
    assert len(panels) == len({panel["id"] for panel in panels}) == 11
    assert all(target["expr"] for panel in panels for target in panel["targets"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the program promtool (Debian: prometheus)")
def test_two_held_nights_are_an_alert_and_one_that_was_done_again_is_none(tmp_path: Path) -> None:
    day, alert = "nightjar_night_day_timestamp_seconds", "NightHeldTwice"
    cases = [  # held from the second day on; the third day's night, or the second's once more
        ("0x23 86400x23 172800x30", "0x23 86400x23 172800x30", 1),
        ("0x23 86400x60", "0x23 86400x5 108000x60", 0),
    ]
    fired = {
        "exp_labels": {"severity": "page", "model": "ads", "outcome": "held"},
        "exp_annotations": {"summary": "The gate held ads two nights in a row"},
    }
    tests = [
        {
            "interval": "1h",
            "input_series": [
                {"series": 'nightjar_night_outcome{model="ads",outcome="held"}', "values": "0x23 1x60"},
                {"series": f'{day}{{model="ads"}}', "values": days},
                {"series": 'nightjar_night_finished_timestamp_seconds{model="ads"}', "values": finished},
            ],
            "alert_rule_test": [{"eval_time": "61h", "alertname": alert, "exp_alerts": firing * [fired]}],
        }
        for days, finished, firing in cases
    ]
    rules = {"rule_files": [str(SHIPPED / "alerts.yaml")], "evaluation_interval": "1h", "tests": tests}
    (tmp_path / "tests.yaml").write_text(json.dumps(rules))  # JSON is YAML
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "tests.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus (Debian: prometheus)")
def test_prometheus_scrapes_them_and_the_alerts_fire(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(written(tmp_path))
    command = [
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
        "--web.listen-address=127.0.0.1:0",
    ]
    with serving(partial(Files, directory=str(tmp_path))) as site:
        (tmp_path / "prometheus.yml").write_text(
            json.dumps(
                {  # JSON is YAML
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(SHIPPED / "alerts.yaml")],
                    "scrape_configs": [{"job_name": "n", "static_configs": [{"targets": [urlsplit(site).netloc]}]}],
                }
            )
        )
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            port = listening_port(process, tmp_path / "log")
            names = until(lambda: firing(port) if len(firing(port)) >= 5 else None)
            assert names == {"NightMissed", "NightFailed", "CalibrationOff", "DataLate", "RowsDropped"}
            (series,) = asked(port, 'nightjar_night_outcome{outcome="failed"}')
            assert (series["metric"]["model"], float(series["value"][1])) == ("ads", 1)
            assert float(asked(port, "nightjar_training_ne")[0]["value"][1]) == 0.9
        finally:
            process.kill()
            process.wait()


class Files(Quiet, SimpleHTTPRequestHandler):
    """Files as plain text."""

    def guess_type(self, path: object) -> str:
        return "text/plain; version=0.0.4"


def asked(port: int, query: str) -> list:
    """The instant vector of ``query``; none while the server starts."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def firing(port: int) -> set[str]:
    return {each["metric"]["alertname"] for each in asked(port, 'ALERTS{alertstate="firing"}')}
