"""No setting holds a secret: records, manifests and pages show all settings of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import ConfigError

# The webhook's URL may be secret: it is recorded nowhere, and a schedule takes it from the environment.
WEBHOOK = "nightly.webhook"
# Names of variables and options whose values are secret.
SECRETIVE = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASS_?PHRASE|TOKEN(?!IZER)|CREDENTIAL|(PRIVATE|ACCESS|STORAGE|ACCOUNT)_?KEY|KEY_PEM$|WEBHOOK"
    r"|JWT|BEARER|JAAS|CONN(ECTION)?_?STR(ING)?|(^|_)((API)?KEY(_?(JSON|B(ASE)?64))?|API_?KEYS|LICEN[CS]E_?KEY)$|(^|_)AUTH(ORIZATION)?(_|$)"
    r"|(?<!COM)(?<!BY)PASS$|(^|_)(CREDS?|OAUTH|PAT|TOK|PW|PWD|DSN|SAS|COOKIES?|SIGNATURE)$|DBPW$|SSH_KEY(_DATA)?$"
    r"|SERVICE_?ACCOUNT_?JSON|KUBECONFIG_(DATA|CONTENT|YAML|B(ASE)?64)",
    re.IGNORECASE,
)
# Variables that give the path of a secret: GOOGLE_APPLICATION_CREDENTIALS, AWS_WEB_IDENTITY_TOKEN_FILE.
_FILE = re.compile(r"(FILE|PATH|DIR|LOCATION|CREDENTIALS|JSON)$", re.IGNORECASE)
# Options of libraries that give a location: sasl.oauthbearer.token.endpoint.url, ssl.key.location.
_PLACE = re.compile(r"(URL|URI|ENDPOINT|FILE|PATH|DIR|LOCATION)$", re.IGNORECASE)
# Values that are never secret, whatever the name.
_PLAIN = re.compile(r"|true|false|none|null|anonymous", re.IGNORECASE)
# A user name alone may be a token, too: https://<token>@github.com, a DSN. Passwords are not always quoted, so they may
# contain a slash; what follows a host's port is a path.
_WITH_PASSWORD = re.compile(r"://[^/@\s:\[]*:(?!\d{1,5}([/?#,;]|$))[^@\s]+@|https?://[^/@\s:]+@")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY")
# Parameters that sign a URL.
_SIGNED = re.compile(
    r"[?&;#](sig|signature|x-amz-signature|x-goog-signature|(access_?)?token|api[-_]?key|key|code|secret)=[^&;\s]",
    re.IGNORECASE,
)
# Tokens that their prefix identifies: GitHub, Slack, AWS, an HTTP header, a Telegram bot.
_TOKEN = re.compile(
    r"^Bearer\s+\S|\bgh[pousr]_[A-Za-z0-9]{20}|\bgithub_pat_|\bxox[abpr]-|\bAKIA[0-9A-Z]{12}|api\.telegram\.org/bot"
)
# A password in a connection string of ADO, of Azure, or of libpq, which separates its parts by blanks.
_CONNECTION = re.compile(
    r"(^|[?&;\s])(password|passwd|pwd|accountkey|sharedaccesskey|sharedaccesssignature)\s*=\s*[^&;\s]", re.IGNORECASE
)
_WEBHOOKS = re.compile(r"https?://(hooks\.|[^/\s]*(hooks\.slack\.|webhook))|/api/webhooks/")
# A schedule's override may set the webhook to nothing, or to an environment variable without another default.
_OF_ENVIRONMENT = re.compile(
    r"|null|''|\"\"|(?P<quote>['\"]?)\$\{oc\.env:\s*\w+\s*(,\s*(null|''|\"\")?\s*)?\}(?P=quote)", re.IGNORECASE
)


def is_secret(text: str) -> bool:
    """Whether ``text`` is a private key, a connection string with a key, or a URL with a password or a signature."""
    patterns = (_WITH_PASSWORD, _SIGNED, _CONNECTION, _PRIVATE_KEY, _TOKEN)
    return any(pattern.search(text) for pattern in patterns)


def recorded(config: Config) -> dict[str, Any]:
    """Return all settings of ``config`` for files and trackers, without the webhook, whose URL may be secret."""
    # ``asdict`` copies the groups, so ``config`` keeps its webhook.
    tree = asdict(config)
    tree["nightly"]["webhook"] = None
    return tree


def without_secret(override: str) -> str:
    """Return ``override`` for messages: without its value if that is a webhook or holds a secret."""
    key = override.partition("=")[0]
    # Hide every webhook, even if its URL is not recognised as a secret: many services put a token into the path.
    if key.lstrip("+") == WEBHOOK or is_secret(override):
        return f"{key}=<its value>"
    return override


def check_secrets(config: Config) -> None:
    """Raise ConfigError for a setting of any launcher that holds a secret; its value is in no message."""
    for path, value in _texts("", asdict(config)):
        if path != WEBHOOK and is_secret(value):
            raise ConfigError(
                f"{path} holds a password or a signature, which manifests and the run's records would show",
                hint="leave it out of the setting: clients of stores find credentials in the environment and in their "
                "own files; launch.pods.secret_env and launch.pods.env_from give them to pods",
            )
    for name, value in config.launch.pods.env.items():
        if _tells_secret(name, value):
            raise ConfigError(
                f"launch.pods.env sets {name}, whose value manifests and the run's records would show",
                hint=f"~launch.pods.env.{name} launch.pods.secret_env={{{name}:<secret>/<key>}}",
            )
    for path, name, value in _variables("launch.pods.patch", config.launch.pods.patch):
        if _tells_secret(name, value):
            raise ConfigError(
                f"{path} sets {name}, whose value manifests and the run's records would show",
                hint=f"leave it out of the patch: launch.pods.secret_env={{{name}:<secret>/<key>}}",
            )
    # Option names have dots and dashes, but the pattern is for variable names, which have underscores.
    for name, value in config.data.options.items():
        plain = _PLAIN.fullmatch(value) or _PLACE.search(name)
        if SECRETIVE.search(re.sub(r"[^A-Za-z0-9]", "_", name)) and not plain:
            raise ConfigError(
                f"data.options sets {name}, whose value the run's records and the dataset's manifest would show",
                hint="leave it out of data.options: a file of properties has it for Kafka ('data.options={config.file: "
                "<file>}'), .pyiceberg.yaml for Iceberg, the environment for the others",
            )


def check_overrides_of_schedule(overrides: list[str]) -> None:
    """Raise ConfigError if an override of a schedule, which its manifest shows, spells a webhook out."""
    for text in overrides:
        name, _, value = text.lstrip("+").partition("=")
        # nightly={webhook: ..} is refused whatever its value, because mappings are not parsed here.
        of_group = name == "nightly" and "webhook" in value
        if of_group or name == WEBHOOK and not _OF_ENVIRONMENT.fullmatch(value):
            raise ConfigError(
                f"{WEBHOOK} is given as it is, and the schedule's manifest would show it",
                hint="'nightly.webhook=${oc.env:NIGHTJAR_WEBHOOK}' launch.pods.secret_env={NIGHTJAR_WEBHOOK:"
                "<secret>/<key>}",
            )


def _tells_secret(name: str, value: str) -> bool:
    # Whether ``value`` of variable ``name`` is a secret; the path of a mounted file is not.
    is_path = _FILE.search(name) is not None and value.startswith("/")
    # Recognise webhooks by their URL, because the variable's name need not say that it is one.
    return SECRETIVE.search(name) is not None and not is_path or _WEBHOOKS.search(value) is not None


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    # Yield all strings below ``value`` with their paths.
    if isinstance(value, str):
        yield path, value
    for name, each in _entries(value):
        yield from _texts(f"{path}.{name}".lstrip("."), each)


def _variables(path: str, value: Any) -> Iterator[tuple[str, str, str]]:
    # Yield path, name and value of every mapping below ``value`` that has both, as variables in a pod's manifest have.
    if isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
        yield path, value["name"], value["value"]
    for name, each in _entries(value):
        yield from _variables(f"{path}.{name}", each)


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    return ()
