"""No setting that is recorded holds a secret, whatever starts the run; text from outside is shown as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline import cli
from pipeline.config.compose import compose, to_yaml
from pipeline.core.errors import ConfigError
from pipeline.core.units import for_chat, printable
from pipeline.plugins.kubernetes.schedule import schedule_config
from pipeline.plugins.tuning import study
from pipeline.training.config_settings import select_training_settings
from tests.launch.cluster_cases import CLUSTER
from tests.plugins.tuning.test_study import RATES, SMALL

SECRET = "hunter2hunter2"
HELD = [
    f"data.path=https://user:{SECRET}@logs/day.csv",
    f"store=s3://key:{SECRET}@bucket/store",
    f'data.path="https://x.blob.core.windows.net/c/day.csv?sv=2024&sig={SECRET}"',
    f'data.path="https://x.s3.amazonaws.com/day.csv?X-Amz-Signature={SECRET}"',
    f'data.path="https://x/day.csv?access_token={SECRET}"',
    f'+launch.pods.env.PLACE="AccountName=x;AccountKey={SECRET}"',
    f'+launch.pods.env.PLACE="AccountKey={SECRET};AccountName=x"',
    f'+launch.pods.env.PLACE="host=db password={SECRET}"',
    f"data.path=https://{SECRET}@github.com/logs.csv",
    f"data.path=https://user:a/{SECRET}@logs/day.csv",
    f'data.path="https://x/day.csv?api-key={SECRET}"',
    f'data.path="https://x/day.csv?code={SECRET}"',
    f'data.path="https://x/day.csv#token={SECRET}"',
    f'+launch.pods.env.PLACE="Bearer {SECRET}"',
    f'+launch.pods.env.PLACE="ghp_{SECRET}{SECRET}"',
    f'+launch.pods.env.PLACE="https://api.telegram.org/bot1:{SECRET}/sendMessage"',
    f'+launch.pods.env.PLACE="-----BEGIN PRIVATE KEY-----{SECRET}"',
]


@pytest.mark.parametrize("setting", HELD)
def test_a_secret_in_a_setting_is_refused_wherever_the_run_is_started(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"(data\.path|store|launch\.pods\.env\.PLACE) holds a password") as caught:
        compose(["data=csv", "data.name=d", "data.path=log.csv", "+data.sparse.a={}", setting])
    assert SECRET not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASS",
        "SLACK_WEBHOOK",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AUTH_HEADER",
        "DB_PASSWORD",
        "GITHUB_TOKEN",
        "API_KEY",
        "SENTRY_DSN",
        "SAS",
        "PGPASS",
        "DBPASS",
        "GCP_CREDS",
        "X_JWT",
        "BEARER",
        "SSH_PRIVATEKEY",
        "STORAGEKEY",
        "AZURE_ACCOUNT_KEY",
        "MYSQL_ROOT_PW",
        "DBPW",
        "COOKIES",
        "SSH_KEY_DATA",
        "SERVICE_ACCOUNT_JSON",
        "KUBECONFIG_CONTENT",
        "HF_TOK",
        "DB_PASS_PHRASE",
        "GOOGLE_KEY_JSON",
        "ENC_KEY_BASE64",
        "LICENSEKEY",
        "APIKEYS",
        "OAUTH",
    ],
)
def test_variables_of_pods_whose_names_tell_a_secret_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.pods.env sets {name}"):
        compose([f"+launch.pods.env.{name}=x"])


def test_other_variables_and_urls_are_not() -> None:
    names = (
        "COMPASS",
        "BYPASS",
        "SACRED",
        "AUTHOR",
        "MONKEY",
        "PARTITION_KEYS",
        "TZ",
        "HOOKED",
        "TOKENIZERS_PARALLELISM",
        "SSH_KEY_TYPE",
        "KUBECONFIG_CONTEXT",
    )
    compose([*(f"+launch.pods.env.{name}=x" for name in names), "store=s3://bucket/a:b@c", "run=r"])
    for url in ("https://host:8080/mail@day.csv", "http://[::1]:8080/a@b", "kafka://b1:9092,b2:9092/x@y"):
        compose(["run=r", "data=csv", "data.name=d", "+data.sparse.a={}", f"data.path='{url}'"])
    for place in ("hooks.slack.com/services/T0/B0/abc", "hooks.zapier.com/hooks/catch/1/abc"):
        with pytest.raises(ConfigError, match="launch.pods.env sets WHERE"):
            compose([f"+launch.pods.env.WHERE='https://{place}'"])


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
    assert for_chat("![x](http://evil/p.png) a\n# b") == "![x]\u200b(http://evil/p.png) a # b"
    assert for_chat("ops@here (@bob)") == "ops@\u200bhere (@\u200bbob)"
    copied = "launch.pods.image=repo@sha256:ab s3://b/a@b [0.1, 0.2]"
    assert for_chat(copied) == copied


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOOGLE_APPLICATION_CREDENTIALS", "/mnt/key.json"),
        ("SERVICE_ACCOUNT_JSON", "/mnt/key.json"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token"),
    ],
)
def test_a_variable_may_name_the_file_of_a_secret(name: str, value: str) -> None:
    compose([f"+launch.pods.env.{name}={value}"])
    with pytest.raises(ConfigError, match=f"launch.pods.env sets {name}"):
        compose([f"+launch.pods.env.{name}={SECRET}"])


def test_a_patch_of_pods_holds_no_secret_either() -> None:
    variable = f"{{name:DB_PASSWORD,value:{SECRET}}}"
    patch = f"launch.pods.patch={{train:{{spec:{{containers:[{{name:x,env:[{variable}]}}]}}}}}}"
    with pytest.raises(ConfigError, match=r"launch\.pods\.patch\.train\.spec\.\S+ sets DB_PASSWORD") as caught:
        compose([patch])
    assert SECRET not in caught.value.message + (caught.value.hint or "")
    compose([patch.replace("DB_PASSWORD", "TZ")])


@pytest.mark.parametrize(
    ("kind", "options", "refused"),
    [
        ("kafka", f"bootstrap.servers: b, sasl.password: {SECRET}", "sasl.password"),
        ("delta", f"AWS_SECRET_ACCESS_KEY: {SECRET}", "AWS_SECRET_ACCESS_KEY"),
        ("iceberg", f"s3.secret-access-key: {SECRET}", "s3.secret-access-key"),
        ("iceberg", f"token: {SECRET}", "token"),
        ("kafka", "bootstrap.servers: b, ssl.key.location: /mnt/key.pem", None),
        ("delta", "AWS_SKIP_SIGNATURE: 'true', AWS_REGION: x", None),
    ],
)
def test_options_of_a_library_hold_no_secret(kind: str, options: str, refused: str | None) -> None:
    settings = [f"data={kind}", "data.path=lake.ads.clicks", "+data.sparse.a={}", f"data.options={{{options}}}"]
    if refused is None:
        assert compose(settings).data.options
        return
    with pytest.raises(ConfigError, match=f"data.options sets {refused}") as caught:
        compose(settings)
    assert SECRET not in caught.value.message + (caught.value.hint or "")


def test_a_study_neither_records_nor_passes_on_what_is_for_nights() -> None:
    webhook = f"nightly.webhook=https://hooks/{SECRET}"
    given = ["train.lr=0.1", webhook, "nightly={webhook: 'https://hooks/x'}", "+schedule.retries=1", "store=./s"]
    assert study.split_recorded(given) == (["train.lr=0.1"], ["store=./s"])


@pytest.mark.slow
def test_a_study_does_not_record_the_webhook(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    webhook = f"nightly.webhook=https://hooks/{SECRET}"
    assert cli.main(["tune", *SMALL, RATES, "study=s", "tune.trials=1", f"store={tmp_path}", webhook]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert (tmp_path / "studies/s/study.json").is_file()


def test_the_webhook_reaches_who_posts_and_no_record() -> None:
    webhook = f"https://hooks/{SECRET}"
    config = compose([f"nightly.webhook={webhook}", "run=r"])
    assert config.nightly.webhook == webhook
    assert SECRET not in to_yaml(config) + str(select_training_settings(config).record)


@pytest.mark.parametrize(
    "setting",
    [
        f"nightly={{webhook: 'https://hooks/{SECRET}'}}",
        f"nightly.webhook=${{oc.env:NOBODY_SETS_IT,https://hooks/{SECRET}}}",
        f"++nightly.webhook=https://hooks/{SECRET}",
    ],
)
def test_a_schedule_takes_no_spelling_of_a_webhook(setting: str) -> None:
    with pytest.raises(ConfigError, match="nightly.webhook is given as it is"):
        schedule_config(["publish.model=clicks", "store=s3://bucket/s", *CLUSTER, setting])


@pytest.mark.parametrize(
    "setting",
    [
        f"nightly.webhook=https://x/y?a=1&sig={SECRET}",
        f"nightly.webhook=https://x/{SECRET},z",
        f"nightly.webhok=https://hooks/{SECRET}",
    ],
)
def test_an_override_that_cannot_be_read_shows_no_webhook(setting: str) -> None:
    with pytest.raises(ConfigError, match="nightly.webho") as caught:
        compose([setting])
    assert SECRET not in caught.value.message + (caught.value.hint or "")
