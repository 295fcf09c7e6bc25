"""Tests of the endpoint that Prometheus scrapes: it answers while a run lasts, and ends with it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.runs.records import made
from orchestrator.errors import UserError
from orchestrator.live.metrics.endpoint import CONTENT_TYPE, MAX_CONNECTIONS, RunMetrics, metrics_endpoint


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def served(notes: list[str]) -> Iterator[RunMetrics]:
    with metrics_endpoint("127.0.0.1", 0, notes.append) as metrics:
        assert metrics is not None
        metrics.run_name = "run-1"
        yield metrics


def port_of(notes: list[str]) -> int:
    (note,) = notes
    return int(note.removeprefix("metrics: http://127.0.0.1:").removesuffix("/metrics"))


def ask(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_a_scrape_sees_the_newest_events(served: RunMetrics, notes: list[str]) -> None:
    events = run_events(FakeRun())
    for event in events[:40]:
        served(made(event))
    status, content_type, before = ask(port_of(notes))
    assert (status, content_type) == (200, CONTENT_TYPE)
    for event in events[40:]:
        served(made(event))
    after = ask(port_of(notes))[2]
    assert before != after
    assert 'orchestrator_step{run="run-1"} 120.0\n' in after
    assert after == served.text().decode()


def test_other_paths_and_methods_are_answered_plainly(served: RunMetrics, notes: list[str]) -> None:
    port = port_of(notes)
    assert ask(port, "/")[0] == 404
    assert "/metrics" in ask(port, "/")[2]
    assert ask(port, "/metrics?name[]=x")[0] == 200
    assert ask(port, method="HEAD") == (200, CONTENT_TYPE, "")
    assert ask(port, method="POST")[0] == 501


def test_scrapers_and_events_may_come_at_once(served: RunMetrics, notes: list[str]) -> None:
    """A reader of a deque that grows meanwhile would fail."""
    events = run_events(FakeRun(experts=8, workers=2, hosted=True, steps=400))
    answers: list[str] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.is_set():
            answers.append(ask(port_of(notes))[2])

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for event in events:
        served(made(event))
    done.set()
    for thread in threads:
        thread.join()
    assert all(text.startswith("# HELP ") for text in answers)
    assert 'orchestrator_step{run="run-1"} 400' in ask(port_of(notes))[2]


def test_the_endpoint_ends_with_the_run_although_a_scraper_stays(notes: list[str]) -> None:
    with metrics_endpoint("127.0.0.1", 0, notes.append):
        port = port_of(notes)
        silent = socket.create_connection(("127.0.0.1", port))
    with pytest.raises(OSError):
        ask(port)
    silent.close()
    assert not any(thread.name == "metrics" for thread in threading.enumerate())


def closed(client: socket.socket) -> bool:
    """Whether the other side closes a connection without an answer."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_slow_clients_take_few_descriptors_and_no_scrape_waits_for_them(
    served: RunMetrics, notes: list[str]
) -> None:
    del served
    port = port_of(notes)
    before = len(os.listdir("/proc/self/fd"))
    slow = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    for client in slow:
        with suppress(ConnectionError):
            client.send(b"GET /metrics HTTP/1.0\r\nX-Slow: ")
    assert ask(port)[0] == 200
    taken = len(os.listdir("/proc/self/fd")) - before - len(slow)
    assert taken <= MAX_CONNECTIONS
    assert sum("process_request" in thread.name for thread in threading.enumerate()) <= MAX_CONNECTIONS
    assert closed(slow[0])
    for client in slow:
        client.close()


def test_a_client_that_goes_on_sending_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch, served: RunMetrics, notes: list[str]
) -> None:
    del served
    monkeypatch.setattr("orchestrator.live.metrics.endpoint._REQUEST_SECONDS", 0.3)
    client = socket.create_connection(("127.0.0.1", port_of(notes)), timeout=0.05)
    is_closed = False
    while not is_closed:
        client.send(b"x")
        with suppress(TimeoutError):
            is_closed = closed(client)
    client.close()


def test_a_long_request_is_not_read(
    served: RunMetrics, notes: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    del served
    headers = [b"X-Long: " + b"x" * 60_000] * 60
    client = socket.create_connection(("127.0.0.1", port_of(notes)), timeout=20)
    with client, suppress(ConnectionError):
        client.sendall(b"\r\n".join([b"GET /metrics HTTP/1.0", *headers, b"", b""]))
        assert client.recv(2**16) == b""
    assert ask(port_of(notes))[0] == 200
    assert capfd.readouterr().err == ""


def test_without_a_port_nothing_listens(notes: list[str]) -> None:
    with metrics_endpoint("127.0.0.1", None, notes.append) as metrics:
        assert metrics is None
    assert notes == []


def test_a_used_port_and_a_foreign_address_are_refused(served: RunMetrics, notes: list[str]) -> None:
    port = port_of(notes)
    with (
        pytest.raises(UserError, match=rf"--metrics-port {port}: cannot listen on .*0 for a free one"),
        metrics_endpoint("127.0.0.1", port, notes.append),
    ):
        pass
    with (
        pytest.raises(UserError, match="--metrics-address"),
        metrics_endpoint("203.0.113.7", 0, notes.append),
    ):
        pass


def test_an_address_of_version_6_is_served(notes: list[str]) -> None:
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with metrics_endpoint("::1", 0, notes.append):
        assert notes[0].startswith("metrics: http://[::1]:")
