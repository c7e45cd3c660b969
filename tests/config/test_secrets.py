"""No setting that is recorded holds a secret, whatever starts the run; text from outside is shown as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.compose import compose
from pipeline.errors import ConfigError
from pipeline.schedule.manifests import schedule_config
from pipeline.units import for_chat, printable
from tests.launch.cluster_cases import CLUSTER

SECRET = "hunter2hunter2"
HELD = [
    f"data.path=https://user:{SECRET}@logs/day.csv", f"store=s3://key:{SECRET}@bucket/store",
    f'data.path="https://x.blob.core.windows.net/c/day.csv?sv=2024&sig={SECRET}"',
    f'data.path="https://x.s3.amazonaws.com/day.csv?X-Amz-Signature={SECRET}"',
    f'data.path="https://x/day.csv?access_token={SECRET}"',
    f'+launch.pods.env.PLACE="AccountName=x;AccountKey={SECRET}"',
]  # fmt: skip


@pytest.mark.parametrize("setting", HELD)
def test_a_secret_in_a_setting_is_refused_wherever_the_run_is_started(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"(data\.path|store|launch\.pods\.env\.PLACE) holds a password") as caught:
        compose(["data=csv", "data.name=d", "data.path=log.csv", "+data.sparse.a={}", setting])
    assert SECRET not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "SLACK_WEBHOOK", "AZURE_STORAGE_CONNECTION_STRING", "AUTH_HEADER", "DB_PASSWORD", "GITHUB_TOKEN",
     "API_KEY", "SENTRY_DSN", "SAS"],
)  # fmt: skip
def test_variables_of_pods_whose_names_tell_a_secret_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.pods.env sets {name}"):
        compose([f"+launch.pods.env.{name}=x"])


def test_other_variables_and_urls_are_not() -> None:
    names = ("COMPASS", "AUTHOR", "MONKEY", "TZ", "HOOKED")
    compose([*(f"+launch.pods.env.{name}=x" for name in names), "store=s3://bucket/a:b@c", "run=r"])
    with pytest.raises(ConfigError, match="launch.pods.env sets WHERE"):
        compose(["+launch.pods.env.WHERE='https://hooks.slack.com/services/T0/B0/abc'"])


def test_a_run_does_not_record_the_webhook(tmp_path: Path) -> None:
    webhook = f"nightly.webhook=https://hooks/{SECRET}"
    assert cli.main(["run", "stages=[ingest]", "run=r", f"store={tmp_path}", "data.synthetic.rows=500", webhook]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == [] and len(files) > 5
    assert yaml.safe_load((tmp_path / "runs/r/config.yaml").read_text())["nightly"]["webhook"] is None


def test_a_schedule_takes_the_webhook_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    night = ["publish.model=clicks", "store=s3://bucket/s", *CLUSTER]
    with pytest.raises(ConfigError, match="nightly.webhook is given as it is") as caught:
        schedule_config([*night, f"nightly.webhook=https://hooks/{SECRET}"])
    assert SECRET not in caught.value.message and "oc.env" in caught.value.hint
    monkeypatch.setenv("NIGHTJAR_WEBHOOK", f"https://hooks/{SECRET}")
    taken = schedule_config([*night, "nightly.webhook=${oc.env:NIGHTJAR_WEBHOOK}"])
    assert taken.nightly.webhook == f"https://hooks/{SECRET}"


def test_what_comes_from_outside_is_shown_and_does_nothing() -> None:
    assert printable("a\x1b[31mb\nc\u202e") == "a\\x1b[31mb\\nc\\u202e" and len(printable("x" * 500)) == 80
    assert printable("blå 7") == "blå 7"
    assert for_chat("<script> <!channel> & @everyone") == "&lt;script&gt; &lt;!channel&gt; &amp; @\u200beveryone"
