"""Servers that tests start on this machine, their ports, and one before them that loses answers."""

import http.client
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.waits import PATIENCE, until


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of this machine for a server that is to listen there; while the context lasts, nobody else gets it.

    A socket is bound to it and never listens: connections are refused until the server is there. The kernel gives such
    a port to nobody who asks for any port, but to a server that asks for this one with SO_REUSEADDR, as servers do.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@contextmanager
def refusing():
    """A URL on this machine that refuses every connection while the context lasts."""
    with kept_port() as port:
        yield f"http://127.0.0.1:{port}"


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
