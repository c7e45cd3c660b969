"""Requests to the API server as plain dictionaries, and what its refusals mean to a user (LaunchError, exit code 8)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from pipeline.errors import LaunchError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Object = dict[str, Any]
TIMEOUT_SECONDS = 20.0
MOST_SKEW_SECONDS = 120.0
ROLE_HINT = "nightjar schedule render with the same settings shows the Role that the launcher needs"


class RefusedError(LaunchError):
    """The API server answered with an error; ``status``: of HTTP, 0 where it is not known."""

    status = 0

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class UnansweredError(LaunchError):
    """The API server did not answer."""


class Api:
    """The API server as ``client`` reaches it. Paths are absolute: ``/api/v1/namespaces/<name>/pods``."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self.server = str(client.configuration.host)

    def get(self, path: str, **query: str) -> Object:
        """Read an object, or a list of them."""
        return self._call("GET", path, None, query)

    def find(self, path: str) -> Object | None:
        """Read an object; None where it does not exist."""
        try:
            return self.get(path)
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def create(self, path: str, body: Mapping[str, Any], **query: str) -> Object:
        """Create an object under the collection ``path``."""
        return self._call("POST", path, body, query)

    def replace(self, path: str, body: Mapping[str, Any]) -> Object:
        """Replace an object."""
        return self._call("PUT", path, body)

    def merge(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change some fields of an object."""
        return self._call("PATCH", path, body, content="application/merge-patch+json")

    def delete(self, path: str) -> None:
        """Delete an object and in the background what it owns; nothing happens where it does not exist."""
        try:
            self._call("DELETE", path, {"propagationPolicy": "Background"})
        except RefusedError as error:
            if error.status != 404:
                raise

    def lines(self, path: str, **query: str) -> Iterator[bytes]:
        """The lines of a log as they come; ends when the server ends it."""
        response = self._request("GET", path, None, query, timeout=(TIMEOUT_SECONDS, 3600.0))
        raw, rest = response.response, b""
        with answers(self.server):
            for chunk in raw.stream(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
        if rest:
            yield rest

    def skew(self) -> float:
        """Seconds that this machine's clock is ahead of the API server's."""
        headers = self._request("GET", "/version", None, {}).getheaders()
        stated = headers.get("Date")
        return time.time() - parsedate_to_datetime(stated).timestamp() if stated else 0.0

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:
        answer: Object = json.loads(self._request(method, path, body, query or {}, content).read() or b"{}")
        return answer

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        content: str = "application/json",
        timeout: Any = TIMEOUT_SECONDS,
    ) -> Any:
        serialized = self.client.param_serialize(
            method, path, query_params=list(query.items()), body=body, auth_settings=["BearerToken"],
            header_params={"Accept": "application/json, */*", "Content-Type": content},
        )  # fmt: skip
        with answers(self.server):
            response = self.client.call_api(*serialized, _request_timeout=timeout)
            if 200 <= response.status < 300:
                return response
            text = (response.read() or b"").decode(errors="replace")
        raise refusal(response.status, text, f"{method} {path}")


@contextmanager
def answers(server: str) -> Iterator[None]:
    """Turn a failed connection into UnansweredError."""
    import urllib3

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnansweredError(
            f"the Kubernetes API server {server} does not answer: {reason}",
            hint="kubectl cluster-info; launch.context=<a context of the kubeconfig> for another cluster",
        ) from None


def refusal(status: int, text: str, request: str) -> RefusedError:
    """The error of an answer with HTTP ``status`` and body ``text``."""
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip() or request
    if status == 401:
        return RefusedError(
            status, f"the API server does not accept the credentials: {message}",
            hint="a token may have expired, or a clock be wrong: kubectl auth whoami",
        )  # fmt: skip
    if status == 403:
        return RefusedError(status, f"the API server denies it: {message}", hint=ROLE_HINT)
    if status == 404 and "batch.volcano.sh" in request:
        return RefusedError(
            status, f"the cluster knows no Volcano jobs, or not this one: {message}",
            hint="install Volcano, or launch.job=indexed",
        )  # fmt: skip
    if status == 404 and "requested resource" in message:
        return RefusedError(
            status, f"the cluster knows no such objects: {request}: {message}",
            hint="a cluster of version 1.27 or newer (docs/kubernetes.md)",
        )  # fmt: skip
    if status == 404 and "namespaces" in message:
        return RefusedError(status, message, hint="kubectl create namespace, or launch.namespace=<one that exists>")
    return RefusedError(status, f"the API server refuses it ({status}): {message}", hint="nightjar launch render")


def check_clock(api: Api) -> None:
    """LaunchError where this machine's clock and the API server's differ so much that tokens and dates go wrong."""
    skew = api.skew()
    if abs(skew) > MOST_SKEW_SECONDS:
        raise LaunchError(
            f"this machine's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the API server's, "
            f"expected at most {MOST_SKEW_SECONDS:.0f} s: tokens, signatures of requests and the night's date go wrong",
            hint="set the clocks by NTP: timedatectl, chronyc tracking",
        )
