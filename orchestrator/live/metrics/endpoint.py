"""The endpoint of a run for Prometheus: ``http://127.0.0.1:PORT/metrics``, while the run lasts.

An event only updates numbers. Text is made when a scraper asks, in a thread of its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from socket import AF_INET6, SHUT_RDWR, gaierror, socket
from time import monotonic
from typing import Any

from orchestrator.errors import UserError
from orchestrator.record.events.kinds import Event
from orchestrator.record.live.state import RunState

_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 16
"""Scrapers are few. More connections than these would take descriptors from the run."""
_REQUEST_SECONDS = 10.0
"""The time of a whole request: a time-out of each read would let a slow client stay for ever."""
_MAX_REQUEST_BYTES = 2**14
_CLOSING_SECONDS = 1.0


class RunMetrics:
    """The metrics of a run: a listener of its events, and the text of them for scrapers."""

    def __init__(self) -> None:
        self.run_name = ""
        self._state = RunState()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state(event)

    def text(self) -> bytes:
        # The library takes a tenth of a second to import: a run without scrapers does without it.
        from orchestrator.live.metrics.metrics import exposition

        with self._lock:
            return exposition(self._state, self.run_name)


@contextmanager
def metrics_endpoint(
    address: str, port: int | None, note: Callable[[str], None]
) -> Iterator[RunMetrics | None]:
    """Serve metrics until the block ends, and note where; yield None without a port.

    Raises ``UserError`` if the port cannot be used."""
    if port is None:
        yield None
        return
    metrics = RunMetrics()
    server = _open_server(address, port, metrics)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    host = f"[{address}]" if ":" in address else address
    note(f"metrics: http://{host}:{server.server_address[1]}{_PATH}")
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """A server of few connections, each for a limited time.

    At the limit the oldest connection makes room, so that slow clients cannot keep a scraper out."""

    # A scraper that stops reading must not delay the end of a run.
    daemon_threads = True
    # A second run must not share the port of the first.
    allow_reuse_port = False
    # Connections that wait here take no descriptors; a scraper must find a place among many.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._opened_s: dict[socket, float] = {}
        """When each open connection began, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._cut(count=1)
            if not self._free.acquire(timeout=_CLOSING_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._opened_s[request] = monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut the connections whose time is over. The loop of the server calls it."""
        began_s = monotonic() - _REQUEST_SECONDS
        with self._lock:
            count = sum(opened_s < began_s for opened_s in self._opened_s.values())
        self._cut(count)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            was_open = self._opened_s.pop(request, None) is not None
        super().shutdown_request(request)
        # The descriptor is closed by now, so another connection may have its place.
        if was_open:
            self._free.release()

    def server_close(self) -> None:
        super().server_close()
        self._cut(MAX_CONNECTIONS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors of ours. A client that was cut, or has gone, is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def _cut(self, count: int) -> None:
        """End the oldest connections: their threads see the end of the stream and close them."""
        with self._lock:
            for request in list(self._opened_s)[:count]:
                with suppress(OSError):
                    request.shutdown(SHUT_RDWR)


class _Server6(_Server):
    address_family = AF_INET6


def _open_server(address: str, port: int, metrics: RunMetrics) -> _Server:
    class Handler(_Handler):
        source = metrics

    kind = _Server6 if ":" in address else _Server
    try:
        return kind((address, port), Handler)
    except (OSError, gaierror, UnicodeError) as error:
        raise UserError(
            f"--metrics-port {port}: cannot listen on {address}:{port} ({error}); "
            "give another port, or 0 for a free one, and an address of this machine as --metrics-address"
        ) from None


class _BoundedReader(BufferedIOBase):
    """The lines of a request, up to a number of bytes in all."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._left = _MAX_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = self._stream.readline(min(size, self._left) if size is not None and size >= 0 else self._left)
        self._left -= len(line)
        if self._left == 0:
            raise ConnectionAbortedError(f"a request of more than {_MAX_REQUEST_BYTES} bytes")
        return line

    def close(self) -> None:
        self._stream.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of ``/metrics``."""

    source: RunMetrics
    server_version = "orchestrator"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _BoundedReader(self.rfile)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        is_known = self.path.partition("?")[0] == _PATH
        body = self.source.text() if is_known else f"the metrics are at {_PATH}\n".encode()
        self.send_response(HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds would fill the screen."""
