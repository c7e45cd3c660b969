"""A real S3 endpoint (moto's server) and, in front of it, a proxy that fails the way object stores do."""

import http.client
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW_DOWN = b"<Error><Code>%s</Code><Message>told to by the test</Message></Error>"
CODES = {500: b"InternalError", 503: b"SlowDown"}


class Fault:
    """Fails requests of ``method`` whose path holds ``part``: the first ``count`` for each path (None: all of them).

    ``kind``: 500, 503, "timeout": the answer never comes, or "cut": it ends in the middle.
    """

    def __init__(self, kind, method, part="", count=None):
        self.kind, self.method, self.part, self.count = kind, method, part, count
        self.seen = {}

    def hits(self, method, path):
        """Whether this request fails; it is counted."""
        if method != self.method or self.part not in path:
            return False
        self.seen[path] = self.seen.get(path, 0) + 1
        return self.count is None or self.seen[path] <= self.count


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``port``, except those that ``fault`` picks."""

    daemon_threads = True

    def __init__(self, port):
        self.behind, self.fault, self.ended = port, None, threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self):
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that gave up waiting is what the test wants."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault
        if fault is None or not fault.hits(self.command, self.path):
            self._pass_on(body)
        elif fault.kind == "cut":
            self._pass_on(body, cut=True)
        elif fault.kind == "timeout":
            self.server.ended.wait()
            self.close_connection = True
        else:
            answer = SLOW_DOWN % CODES[fault.kind]
            self.send_response(fault.kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def _pass_on(self, body, *, cut=False):
        inner = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        inner.request(self.command, self.path, body, dict(self.headers))
        answer = inner.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut
        inner.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def log_message(self, *args):
        """Quiet."""


@contextmanager
def served(server):
    """moto's S3 behind a proxy that makes faults; ``server``: the module ``moto.server``."""
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    proxy = Proxy(moto.get_host_and_port()[1])
    try:
        yield proxy
    finally:
        proxy.stop()
        moto.stop()
