"""MLflow's REST API: the few calls that a tracker makes, with what the standard library has."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import LaunchError

TIMEOUT_SECONDS = 10.0
MISSING = "RESOURCE_DOES_NOT_EXIST"
EXISTS = "RESOURCE_ALREADY_EXISTS"


class MlflowError(LaunchError):
    """The server refused a call. ``code``: MLflow's word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, hint="track.mlflow.uri=<the server's URL>")
        self.code = code


def quoted(value: str) -> str:
    """Put ``value`` in quotes for a filter of MLflow; "" if it has quotes of both kinds."""
    # MLflow's filters have no escapes.
    if "'" not in value:
        return f"'{value}'"
    if '"' not in value:
        return f'"{value}"'
    return ""


class _OwnLogin(urllib.request.HTTPRedirectHandler):
    """Follows redirections, but sends the login only to its own server and never unencrypted."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request to follow, without the login if it leads elsewhere."""
        # urllib sends all headers along, the login among them, wherever the redirection leads.
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        same_server = (old.scheme, old.netloc) == (new.scheme, new.netloc)
        upgrade = (old.scheme, new.scheme) == ("http", "https") and old.hostname == new.hostname
        if request is not None and not same_server and not upgrade:
            request.remove_header("Authorization")
        return request


class MlflowServer:
    """The server at ``uri``. ``login``: a file with ``user:password`` or a bearer token; None: no login."""

    def __init__(self, uri: str, login: str | None = None) -> None:
        self.uri, self.login = uri.rstrip("/"), login

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """Post ``fields``, without those that are None, and return the answer."""
        return self._ask("POST", path, fields)

    def get(self, path: str, **fields: Any) -> dict[str, Any]:
        """Get ``path`` with ``fields``, without those that are None, and return the answer."""
        return self._ask("GET", path, fields)

    def pages(self, path: str, entries: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the ``entries`` of all pages of a query."""
        token: str | None = None
        while True:
            answer = self.get(path, page_token=token, **fields)
            yield from answer.get(entries, [])
            token = answer.get("next_page_token")
            if not token:
                return

    def _ask(self, method: str, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        url, body = f"{self.uri}/api/2.0/mlflow/{path}", None
        given = {name: value for name, value in fields.items() if value is not None}
        if method == "GET":
            url += f"?{urllib.parse.urlencode(given)}"
        else:
            body = json.dumps(given).encode()
        request = urllib.request.Request(url, data=body, method=method, headers=self._headers())
        try:
            with urllib.request.build_opener(_OwnLogin).open(request, timeout=TIMEOUT_SECONDS) as answer:
                response: dict[str, Any] = json.load(answer)
                return response
        except urllib.error.HTTPError as error:
            try:
                refusal = json.loads(error.read())
                message, code = str(refusal.get("message", "")), str(refusal.get("error_code", ""))
            except (ValueError, AttributeError, OSError):
                # A proxy in front of MLflow answers with its own page.
                message, code = str(error.reason), ""
            first_line = error.reason
            if message:
                first_line = message.splitlines()[0][:300]
            raise MlflowError(f"{path} was answered with {error.code}: {first_line}", code) from None

    def _headers(self) -> Mapping[str, str]:
        headers = {"Content-Type": "application/json", "User-Agent": "nightjar"}
        if self.login is None:
            return headers
        # Read the file for each call, since a token may be renewed during a training.
        try:
            secret = Path(self.login).read_text().strip()
        except OSError as error:
            raise LaunchError(
                f"track.mlflow.login_file={self.login} cannot be read: {error.strerror}",
                hint="track.mlflow.login_file=<file with user:password, or with a token>",
            ) from None
        headers["Authorization"] = f"Bearer {secret}"
        # Bearer tokens have no colon (RFC 6750).
        if ":" in secret:
            login = base64.b64encode(secret.encode()).decode()
            headers["Authorization"] = f"Basic {login}"
        return headers
