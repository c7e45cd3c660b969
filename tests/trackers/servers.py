"""Servers that tests start on this machine, and one between them and a client that loses answers."""

import http.client
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.waits import PATIENCE, until


@contextmanager
def refusing():
    """A URL on this machine that refuses every connection while the context lasts."""
    with socket.socket() as bound:  # and never listens
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def listening_port(process: subprocess.Popen, log: Path) -> int:
    """The port that ``process``, told to listen on port 0, or a child of it got; ``log``: what it writes."""

    def find() -> int | None:
        assert process.poll() is None, log.read_text()
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            for each in [first, *first.children(recursive=True)]:
                for connection in each.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        return connection.laddr.port
        return None

    return until(find, log.read_text)


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
            connection = http.client.HTTPConnection(urlsplit(target).netloc, timeout=PATIENCE)
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
