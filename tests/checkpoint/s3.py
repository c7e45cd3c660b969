"""A real S3 endpoint (moto's server) and, in front of it, a proxy that fails the way object stores do."""

import http.client
import re
import threading
import uuid
from collections import Counter
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.waits import no_waits

ANSWER = b"<Error><Code>%s</Code><Message>told to by the test</Message></Error>"
CODES = {
    403: b"AccessDenied",
    409: b"ConditionalRequestConflict",
    412: b"PreconditionFailed",
    500: b"InternalError",
    501: b"NotImplemented",
    503: b"SlowDown",
    507: b"XMinioStorageFull",
}
ERROR = b"<Error><Key>%s</Key><Code>InternalError</Code></Error>"


class Fault:
    """Fails requests of ``method`` whose path holds ``part``: the first ``count`` for each path (None: all of them).

    ``kind``: a status of ``CODES``, "timeout": the answer never comes, "cut": it ends in the middle, "lost": the
    request is done, but the connection ends before the answer, or "errors": a bulk request succeeds as a whole and
    fails for every object.
    """

    def __init__(self, kind, method, part="", count=None):
        self.kind, self.method, self.part, self.count = kind, method, part, count
        self.seen = {}
        self.counting = threading.Lock()  # a request is a thread

    def hits(self, method, path):
        """Whether this request fails; it is counted."""
        if method != self.method or self.part not in path:
            return False
        with self.counting:
            self.seen[path] = self.seen.get(path, 0) + 1
            return self.count is None or self.seen[path] <= self.count


class Between:
    """Fails nothing: calls ``act`` once, just before a request of ``method`` whose path holds ``part`` goes on."""

    def __init__(self, method, part, act):
        self.method, self.part, self.act, self.done = method, part, act, False

    def hits(self, method, path):
        """False; the first of those requests waits for ``act``."""
        if method == self.method and self.part in path and not self.done:
            self.done = True
            self.act()
        return False


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``port``, except those that ``fault`` picks."""

    daemon_threads = True

    def __init__(self, port):
        self.behind, self.fault, self.ended = port, None, threading.Event()
        self.read: Counter = Counter()  # how often each part of a path was asked for
        self.counting = threading.Lock()
        self.changing = threading.Lock()  # S3 looks at a condition and writes in one step; moto does not
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
    disable_nagle_algorithm = True  # an answer's body does not wait, 40 ms, for the client to acknowledge its head

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "GET":
            with self.server.counting:
                self.server.read[self.path, self.headers.get("Range")] += 1
        fault = self.server.fault
        if fault is None or not fault.hits(self.command, self.path):
            self._pass_on(body)
        elif fault.kind == "cut":
            self._pass_on(body, cut=True)
        elif fault.kind == "lost":
            self._ask(body)
            self.close_connection = True
        elif fault.kind == "timeout":
            self.server.ended.wait()
            self.close_connection = True
        elif fault.kind == "errors":
            keys = re.findall(rb"<Key>(.*?)</Key>", body)
            self._refuse(200, b"<DeleteResult>%s</DeleteResult>" % b"".join(ERROR % key for key in keys))
        else:
            self._refuse(fault.kind, ANSWER % CODES[fault.kind])

    def _refuse(self, status, answer):
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _ask(self, body):
        with nullcontext() if self.command in ("GET", "HEAD") else self.server.changing:
            return self._answer(body)

    def _answer(self, body):
        inner = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        inner.request(self.command, self.path, body, dict(self.headers))
        answer = inner.getresponse()
        data = answer.read()
        inner.close()
        return answer, data

    def _pass_on(self, body, *, cut=False):
        answer, data = self._ask(body)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def log_message(self, *args):
        """Quiet."""


@contextmanager
def served(server):
    """moto's S3 behind a proxy that makes faults; ``server``: the module ``moto.server``."""
    import fsspec

    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    proxy = Proxy(moto.get_host_and_port()[1])
    clients = fsspec.get_filesystem_class("s3")  # whose instances, a second each to make, know one endpoint
    clients.clear_instance_cache()
    try:
        yield proxy
    finally:
        clients.clear_instance_cache()
        proxy.stop()
        moto.stop()


@contextmanager
def bucket(proxy, monkeypatch, retries=1):
    """The URL of a new bucket behind ``proxy``, for a client that gives up soon."""
    import fsspec

    quick = {"read_timeout": 60, "connect_timeout": 60, "retries": {"max_attempts": 0}}
    settings = {"key": "k", "secret": "s", "endpoint_url": proxy.url, "config_kwargs": quick}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", retries)
    proxy.fault = None
    made = f"b{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(made)
    try:
        with no_waits():
            yield f"s3://{made}"
    finally:
        proxy.fault = None
        fsspec.filesystem("s3").invalidate_cache()
