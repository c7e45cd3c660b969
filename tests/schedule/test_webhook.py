"""The webhook against a real server: what it gets, how often it is asked, what is said when it cannot be told."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from pipeline.schedule.night_summary import deliver
from tests import servers
from tests.logged import listen
from tests.waits import PATIENCE


class Hook(BaseHTTPRequestHandler):
    """Answers with the codes it was given, one a request."""

    codes: list[int] = []
    bodies: list[dict] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append({"type": self.headers["Content-Type"], **json.loads(body)})
        self.send_response(self.codes.pop(0))
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing on the console."""


@contextmanager
def serving(*codes: int) -> Iterator[str]:
    """URL of a server that answers with ``codes``; what it got is in Hook.bodies."""
    Hook.codes, Hook.bodies = list(codes), []
    with servers.serving(Hook) as url:
        yield f"{url}/hook/secret"


def test_the_verdict_is_posted_as_json() -> None:
    said = listen()
    with serving(200) as url:
        assert deliver(url, {"verdict": "HOLD", "reasons": ["NE"]})
    assert Hook.bodies == [{"type": "application/json", "verdict": "HOLD", "reasons": ["NE"]}]
    assert said == []


def test_it_is_tried_three_times() -> None:
    said = listen()
    with serving(503, 500, 204) as url:
        assert deliver(url, {}, pause=0.0)
    assert len(Hook.bodies) == 3
    assert said == []


def test_a_failure_is_said_without_the_secret_in_the_url() -> None:
    said = listen()
    with serving(503, 503, 503) as url:
        assert not deliver(url, {}, pause=0.0)
    assert len(Hook.bodies) == 3
    with servers.refusing() as url:
        assert not deliver(f"{url}/hook/secret", {}, pause=0.0)
    assert "the verdict was not delivered to nightly.webhook at 127.0.0.1 in 3 tries: it answered 503" in said[0]
    assert "refused" in said[1]
    assert not any("secret" in text for text in said)


def test_a_redirection_has_not_taken_the_verdict() -> None:
    said = listen()
    with serving(301, 302, 307) as url:
        assert not deliver(url, {}, pause=0.0)
    assert len(Hook.bodies) == 3
    assert "it answered 307" in said[0]


@pytest.mark.parametrize(
    "url", ["http://[::1/secret", "https://host/a secret", "http://host:secret/", "http://?secret"]
)
def test_no_url_breaks_the_night_or_is_quoted(url: str) -> None:
    said = listen()
    assert not deliver(url, {}, pause=0.0)
    assert "the verdict was not delivered to nightly.webhook" in said[0]
    assert "secret" not in said[0]


def test_a_server_that_speaks_no_http_is_only_a_warning() -> None:
    said = listen()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble() -> None:
            for _ in range(3):
                peer, _address = server.accept()
                peer.recv(1 << 16)
                peer.sendall(b"hello\r\n\r\n")
                peer.close()

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        assert not deliver(f"http://127.0.0.1:{server.getsockname()[1]}/secret", {}, pause=0.0)
        thread.join(PATIENCE)
    assert "in 3 tries" in said[0]
