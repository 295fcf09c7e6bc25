"""The endpoint of a run for Prometheus: ``http://127.0.0.1:PORT/metrics``, while the run lasts.

An event only updates numbers. Text is made when a scraper asks, in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, gaierror

from orchestrator.errors import UserError
from orchestrator.record.files.events import Event
from orchestrator.record.live.exposition import CONTENT_TYPE, exposition
from orchestrator.record.live.state import RunState

_PATH = "/metrics"
_CLIENT_SECONDS = 10.0


class RunMetrics:
    """The metrics of a run: a listener of its events, and the text of them for scrapers."""

    def __init__(self) -> None:
        self.run_name = ""
        self._state = RunState()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state(event)

    def text(self) -> str:
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
    # A scraper that stops reading must not delay the end of a run.
    daemon_threads = True
    # A second run must not share the port of the first.
    allow_reuse_port = False


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


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of ``/metrics``."""

    source: RunMetrics
    timeout = _CLIENT_SECONDS
    server_version = "orchestrator"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        is_known = self.path.partition("?")[0] == _PATH
        body = (self.source.text() if is_known else f"the metrics are at {_PATH}\n").encode()
        self.send_response(HTTPStatus.OK if is_known else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape every few seconds would fill the screen."""
