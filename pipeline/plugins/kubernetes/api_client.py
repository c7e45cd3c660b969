"""Requests to the API server as plain dictionaries, and what its refusals mean to a user (LaunchError, exit code 8).

An answer that says nothing about the object that was asked for (403 and 404 while a server warms up, 429, 5xx, half a
body) is treated like silence: a patient ``Api`` asks again.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LaunchError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Object = dict[str, Any]
Answer = TypeVar("Answer")
TIMEOUT_SECONDS = 20.0
LOG_SECONDS = 120.0  # how long a log may be silent until it is asked for again
WARM_UP_SECONDS = 20.0  # how long a server that just started may deny what it grants and not know custom resources
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0  # seconds between two tries
MOST_SKEW_SECONDS = 120.0
MOST_CONNECTIONS = 512  # one for the log of every pod, and a few more
ROLE_HINT = "nightjar schedule render with the same settings shows the Role that the launcher needs"
log = logging.getLogger(__name__)


class RefusedError(LaunchError):
    """The API server answered with an error; ``status`` is that of HTTP, or 0 if it is unknown.

    ``passing_seconds``: how long the same request may get this answer before it counts; 0: it counts at once.
    """

    status, passing_seconds = 0, 0.0

    def __init__(self, status: int, message: str, *, hint: str = "", passing_seconds: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.status, self.passing_seconds = status, passing_seconds

    @property
    def passing(self) -> bool:
        """Whether the answer says nothing about the requested object."""
        return self.passing_seconds > 0


class UnansweredError(LaunchError):
    """The API server did not answer, or its answer is not one of the API."""

    passing, passing_seconds = True, float("inf")


class Api:
    """The API server as ``client`` reaches it. Paths are absolute: ``/api/v1/namespaces/<name>/pods``."""

    def __init__(
        self,
        client: ApiClient,
        *,
        outage_seconds: float = 0.0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        clock: Clock = CLOCK,
    ) -> None:
        self.client, self.outage_seconds, self.timeout_seconds = client, outage_seconds, timeout_seconds
        self.clock = clock
        self.server = str(client.configuration.host)

    def patient(self, outage_seconds: float) -> Api:
        """Return the same server, which is asked again for up to ``outage_seconds`` while it does not answer."""
        other = copy.copy(self)
        other.outage_seconds = outage_seconds
        return other

    def brisk(self, timeout_seconds: float) -> Api:
        """Return the same server, which is asked once and has ``timeout_seconds`` to answer."""
        other = self.patient(0.0)
        other.timeout_seconds = min(timeout_seconds, TIMEOUT_SECONDS)
        return other

    def get(self, path: str, **query: str) -> Object:
        """Read an object, or a list of them."""
        return self._call("GET", path, None, query)

    def find(self, path: str) -> Object | None:
        """Read an object; None if the answer says that this object does not exist."""
        try:
            return self.get(path)
        except RefusedError as error:
            # Not every 404 means that the object does not exist: a server that warms up says nothing about it. A job
            # that is wrongly taken for lost is submitted again, and both would write to the same checkpoints.
            if error.status == 404 and not error.passing:
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

    def apply(self, path: str, body: Mapping[str, Any], manager: str, **query: str) -> Object:
        """Create the object or set these fields of it as those of ``manager``, by server-side apply."""
        # Force, so that fields that somebody else has set become those of ``manager`` instead of a conflict.
        query = {"fieldManager": manager, "force": "true", **query}
        return self._call("PATCH", path, body, query, content="application/apply-patch+yaml")

    def delete(self, path: str, version: str = "") -> None:
        """Delete an object and, in the background, what it owns; nothing happens if it does not exist.

        ``version``: its resource version; RefusedError with status 409 if it has another one.
        """
        options: Object = {"propagationPolicy": "Background"}
        if version:
            options["preconditions"] = {"resourceVersion": version}
        try:
            self._call("DELETE", path, options)
        except RefusedError as error:
            if error.status != 404 or error.passing:
                raise

    def lines(self, path: str, **query: str) -> Iterator[bytes]:
        """Yield the lines of a log as they come; ends when the server ends it."""
        # Use one limit for connecting and one for silence: a quiet pod is no failure, but a connection may die
        # unnoticed.
        response = self._request("GET", path, None, query, timeout=(self.timeout_seconds, LOG_SECONDS))
        raw, rest = response.response, b""
        with answers(self.server):
            for chunk in raw.stream(1 << 16):
                # A chunk may end anywhere, so the beginning of a line waits for the next one.
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
        if rest:
            yield rest

    def skew(self) -> float:
        """Return the seconds by which this machine's clock is ahead of the API server's."""

        def ask() -> float:
            stated = self._request("GET", "/version", None, {}).getheaders().get("Date")
            # A proxy may remove the header. The skew is unknown then, which is not an error.
            if not stated:
                return 0.0
            return self.clock.time() - parsedate_to_datetime(stated).timestamp()

        return self._patiently(ask)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:
        return self._patiently(lambda: self._once(method, path, body, query or {}, content))

    def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], content: str
    ) -> Object:
        # Read and parse inside ``answers``: a truncated body is not JSON, and counts like a broken connection.
        with answers(self.server):
            text = self._request(method, path, body, query, content).read()
            answer = json.loads(text or b"{}")
        if not isinstance(answer, dict):
            # The answer probably comes from a proxy.
            raise UnansweredError(f"the Kubernetes API server {self.server} answers {str(answer)[:80]!r} to {path}")
        return answer

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """Return what ``ask`` returns, and repeat it while the server is silent; raise after ``outage_seconds``."""
        since, pause = self.clock.monotonic(), FIRST_PAUSE
        while True:
            try:
                answer = ask()
            except (UnansweredError, RefusedError) as error:
                silent = self.clock.monotonic() - since
                left = min(self.outage_seconds, error.passing_seconds) - silent
                if left <= 0:
                    if pause > FIRST_PAUSE:
                        error.message += f" (for {silent:,.0f} s)"
                    raise
                if pause == FIRST_PAUSE:
                    log.warning("%s; asking again for up to %.0f s", error.message, left)
                # Add jitter, so that the launchers of a cluster do not all ask at once when its server is back.
                self.clock.sleep(min(pause * random.uniform(0.8, 1.2), left))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if pause > FIRST_PAUSE:
                    log.info("the API server answers again, after %.1f s", self.clock.monotonic() - since)
                return answer

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        content: str = "application/json",
        timeout: Any = None,
    ) -> Any:
        # Logs are plain text, all other answers are JSON.
        serialized = self.client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            body=body,
            auth_settings=["BearerToken"],
            header_params={"Accept": "application/json, */*", "Content-Type": content},
        )
        with answers(self.server):
            response = self.client.call_api(*serialized, _request_timeout=timeout or self.timeout_seconds)
            if 200 <= response.status < 300:
                return response
            text = (response.read() or b"").decode(errors="replace")
        raise refusal(response.status, text, f"{method} {path}")


@contextmanager
def answers(server: str) -> Iterator[None]:
    """Turn a failed connection, or half an answer, into UnansweredError."""
    import urllib3

    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # urllib3's MaxRetryError has the cause in ``reason``; its message also repeats the host and the URL.
        reason = getattr(error, "reason", None) or error
        raise UnansweredError(
            f"the Kubernetes API server {server} does not answer: {reason}",
            hint="kubectl cluster-info; launch.context=<a context of the kubeconfig> for another cluster",
        ) from None


def refusal(status: int, text: str, request: str) -> RefusedError:
    """Return the error of an answer with HTTP ``status`` and body ``text``."""
    stated: Object = {}
    try:
        stated = dict(json.loads(text))
        message = str(stated["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip() or request
    words, hint = _in_words(status, message, request)
    return RefusedError(status, words, hint=hint, passing_seconds=_passing_seconds(status, message, stated, request))


def _passing_seconds(status: int, message: str, stated: Object, request: str) -> float:
    """Return for how many seconds this answer says nothing about the requested object."""
    if status == 403 and ("admission webhook" in message or "exceeded quota" in message):
        # Admission has judged the object, and would judge it the same way again.
        return 0.0
    # Any other 403 may come from a server that does not know the roles yet.
    if status in (401, 403, 408, 429) or status >= 500:
        return float("inf")
    # A 404 that names no object is about the path: custom resources become known some time after the server starts.
    named = stated.get("reason") == "NotFound" and (stated.get("details") or {}).get("name")
    if status == 404 and not named:
        return WARM_UP_SECONDS
    return 0.0


def _in_words(status: int, message: str, request: str) -> tuple[str, str]:
    """Return a refusal's message and hint."""
    if status == 401:
        text = f"the API server does not accept the credentials: {message}"
        return text, "a token may have expired, or a clock be wrong: kubectl auth whoami"
    if status == 403 and "exceeded quota" in message:
        return f"a quota of the namespace is full: {message}", "kubectl describe quota; ask for more, or for less"
    if status == 403:
        return f"the API server denies it: {message}", ROLE_HINT
    if status == 404 and "batch.volcano.sh" in request:
        text = f"the cluster knows no Volcano jobs, or not this one: {message}"
        return text, "install Volcano, or launch.job=indexed"
    if status == 404 and "requested resource" in message:
        text = f"the cluster knows no such objects: {request}: {message}"
        return text, "a cluster of version 1.27 or newer (docs/kubernetes.md)"
    if status == 404 and "namespaces" in message:
        return message, "kubectl create namespace, or launch.namespace=<one that exists>"
    return f"the API server refuses it ({status}): {message}", "nightjar launch render"


def check_clock(api: Api) -> None:
    """Raise LaunchError if this machine's clock and the API server's differ so much that tokens and dates fail."""
    skew = api.skew()
    if abs(skew) > MOST_SKEW_SECONDS:
        where = "ahead of" if skew > 0 else "behind"
        raise LaunchError(
            f"this machine's clock is {abs(skew):,.0f} s {where} the API server's, "
            f"expected at most {MOST_SKEW_SECONDS:.0f} s: tokens, signatures of requests and the night's date go wrong",
            hint="set the clocks by NTP: timedatectl, chronyc tracking",
        )


def connect(context: str | None = None) -> Api:
    """Return the API server, with the pod's service account or the kubeconfig's ``context`` (None: the current one).

    A named context comes from the kubeconfig even inside a cluster. Raises LaunchError without credentials.
    """
    # The client takes long to import, so only commands that talk to a cluster import it.
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
    from urllib3.util import Retry

    configuration = Configuration()
    configuration.connection_pool_maxsize = MOST_CONNECTIONS
    configuration.retries = Retry(0, redirect=3)  # ``Api`` asks again; hidden tries would multiply its time limits
    if context is None:
        try:
            load_incluster_config(client_configuration=configuration)
            return Api(ApiClient(configuration))
        except ConfigException:
            pass  # not in a pod
    try:
        load_kube_config(context=context, client_configuration=configuration)
    except Exception as error:  # a kubeconfig may be invalid in any way, and the client has no error class for that
        reason = " ".join(str(error).split())
        raise LaunchError(
            f"no way into a cluster: neither a pod's service account nor a kubeconfig that fits: {reason}",
            hint="run it in the cluster, or set KUBECONFIG, or launch.context=<a context of it>",
        ) from None
    return Api(ApiClient(configuration))
