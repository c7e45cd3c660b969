"""A proxy in front of a real API server that fails requests the way servers, balancers and networks do."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

HOP = ("transfer-encoding", "connection", "content-length", "keep-alive")
WORDS = {403: "Forbidden", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 404: ""}


@dataclass
class Fault:
    """Fails the requests that ``kind`` is for, while it is set in a proxy.

    ``kind``: an HTTP status; "cut": half of the body, then the end of the connection; "half": half of the body as if it
    were all; "lost": the request is done, its answer never comes; "drop": neither; "hang": no answer until the end.
    ``method`` and ``part``: of the request, and in its path; ``count``: how many requests, None for all.
    """

    kind: int | str
    method: str = ""
    part: str = ""
    count: int | None = None
    hit: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, method: str, path: str) -> bool:
        """Whether this request fails; it is counted."""
        if self.method not in ("", method) or self.part not in path:
            return False
        with self.lock:
            self.hit += 1
            return self.count is None or self.hit <= self.count


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``server``, but for those that ``fault`` takes.

    ``seen``: (method, path) of all. ``on_request`` is called before each of them goes on.
    """

    daemon_threads = True

    def __init__(self, server: str, pki: Path) -> None:
        self.behind, self.fault = urlsplit(server), cast(Fault | None, None)
        self.seen: list[tuple[str, str]] = []
        self.ended, self.on_request = threading.Event(), cast(Callable[[str, str], None] | None, None)
        self.trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki / "server.crt", pki / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"https://127.0.0.1:{self.server_port}"

    def requests(self, method: str, part: str) -> list[str]:
        """Paths of the requests of ``method`` with ``part`` in them."""
        return [path for kind, path in self.seen if kind == method and part in path]

    def stop(self) -> None:
        """Answer nothing any more."""
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that gave up is what a fault wants."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as in tests/checkpoint/s3.py
    server: Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path))
        if self.server.on_request is not None:
            self.server.on_request(self.command, self.path)
        fault = self.server.fault
        kind = fault.kind if fault is not None and fault.takes(self.command, self.path) else None
        if kind == "drop":
            self.close_connection = True
        elif kind == "hang":
            while self.server.fault is fault and not self.server.ended.wait(0.05):
                pass
            self.close_connection = True
        elif isinstance(kind, int):
            text = {"kind": "Status", "status": "Failure", "reason": WORDS[kind], "code": kind, "message": "a fault"}
            self._answer(kind, json.dumps(text).encode(), [("Content-Type", "application/json")])
        else:
            self._pass_on(body, kind)

    def _pass_on(self, body: bytes, kind: str | None) -> None:
        place = self.server.behind
        inner = http.client.HTTPSConnection(str(place.hostname), place.port, context=self.server.trust, timeout=600)
        try:
            inner.request(self.command, self.path, body or None, dict(self.headers))
            answer = inner.getresponse()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP]
            if "follow=true" in self.path and kind is None:
                self._stream(answer, headers)
                return
            data = answer.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            inner.close()
        if kind == "lost":
            self.close_connection = True
        else:
            self._answer(answer.status, data, headers, kind)

    def _stream(self, answer: http.client.HTTPResponse, headers: list[tuple[str, str]]) -> None:
        self.close_connection = True
        self._head(answer.status, headers, "Transfer-Encoding", "chunked")
        while data := answer.read1(1 << 16):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, data: bytes, headers: list[tuple[str, str]], kind: str | None = None) -> None:
        sent = data[: len(data) // 2] if kind in ("cut", "half") else data
        self._head(status, headers, "Content-Length", str(len(data if kind == "cut" else sent)))
        self.wfile.write(sent)
        self.close_connection = self.close_connection or kind == "cut"

    def _head(self, status: int, headers: list[tuple[str, str]], *more: str) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header(*more)
        self.end_headers()

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Quiet."""
