"""The webhook against a real server: what it gets, how often it is asked, what is said when it cannot be told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pipeline.schedule.webhook import deliver


class Hook(BaseHTTPRequestHandler):
    """Answers with the codes it was given, one a request."""

    codes: list[int] = []
    bodies: list[dict] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.bodies.append({"type": self.headers["Content-Type"], **json.loads(body)})
        self.send_response(self.codes.pop(0))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing on the console."""


@contextmanager
def serving(*codes: int) -> Iterator[str]:
    """URL of a server that answers with ``codes``; what it got is in Hook.bodies."""
    Hook.codes, Hook.bodies = list(codes), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook/secret"
        server.shutdown()
        thread.join()


def test_the_verdict_is_posted_as_json() -> None:
    said: list[str] = []
    with serving(200) as url:
        assert deliver(url, {"verdict": "HOLD", "reasons": ["NE"]}, said.append)
    assert Hook.bodies == [{"type": "application/json", "verdict": "HOLD", "reasons": ["NE"]}]
    assert said == []


def test_it_is_tried_three_times() -> None:
    said: list[str] = []
    with serving(503, 500, 204) as url:
        assert deliver(url, {}, said.append, pause=0.0)
    assert len(Hook.bodies) == 3
    assert said == []


def test_a_failure_is_said_without_the_secret_in_the_url() -> None:
    said: list[str] = []
    with serving(503, 503, 503) as url:
        assert not deliver(url, {}, said.append, pause=0.0)
    assert len(Hook.bodies) == 3
    assert not deliver(url, {}, said.append, pause=0.0)  # the server is gone
    assert "nightly.webhook at 127.0.0.1 was not told, in 3 tries: it answers 503" in said[0]
    assert "refused" in said[1]
    assert not any("secret" in text for text in said)
