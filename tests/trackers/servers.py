"""Servers that tests start on this machine, and one between them and a client that loses answers."""

import http.client
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(answer, seconds: float = 60.0):
    """What ``answer`` gives once it is true; AssertionError after ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if given := answer():
            return given
        threading.Event().wait(0.2)
    raise AssertionError(f"nothing within {seconds:g} s")


@contextmanager
def serving(handler):
    """A server with ``handler`` while the context lasts: its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Quiet(BaseHTTPRequestHandler):
    """A handler without a line of log for each request."""

    disable_nagle_algorithm = True  # as in tests/checkpoint/s3.py

    def log_message(self, *_):
        """Nothing."""

    def body(self) -> bytes:
        """What was sent."""
        return self.rfile.read(int(self.headers["Content-Length"] or 0))


def losing_answers(target: str, to: str):
    """A server before ``target`` that passes everything on, and loses every answer to paths with ``to``: its URL."""

    class Lossy(Quiet):
        def do_POST(self):
            """Pass on, and answer unless the path is one of those."""
            sent = self.body()
            connection = http.client.HTTPConnection(urlsplit(target).netloc, timeout=20)
            connection.request(self.command, self.path, sent or None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if to in self.path:
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST  # noqa: N815

    return serving(Lossy)
