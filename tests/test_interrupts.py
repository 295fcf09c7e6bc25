"""SIGINT and SIGTERM outside of training: when they raise KeyboardInterrupt."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.interrupts import interruptible, shielded

_SOON_S = 20.0


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def wait_for_interrupt() -> None:
    """Wait for a signal that comes late."""
    deadline = time.monotonic() + _SOON_S
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Ray leaves its own handler behind in a process that was a driver."""
    earlier = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "restored"
    signal.signal(signal.SIGTERM, earlier)


def check_interrupted(work: Callable[[], object]) -> None:
    """Do some work until a signal interrupts it."""

    def work_and_wait() -> None:
        work()
        wait_for_interrupt()

    with interruptible(), pytest.raises(KeyboardInterrupt):
        work_and_wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_raise(number: int) -> None:
    check_interrupted(lambda: send(number))


def test_a_signal_waits_for_the_end_of_a_shielded_block() -> None:
    done: list[str] = []

    def work() -> None:
        with shielded():
            send(signal.SIGTERM)
            time.sleep(0.2)
            done.append("block")

    check_interrupted(work)
    assert done == ["block"]


def test_a_second_ctrl_c_does_not_wait() -> None:
    def work() -> None:
        with shielded():
            send(signal.SIGINT)
            time.sleep(0.01)
            send(signal.SIGINT)
            wait_for_interrupt()
            pytest.fail("the second one waited")

    check_interrupted(work)


def test_a_signal_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in C++ may abort the process if an exception is raised inside."""
    lines = ["import os, time", "os.kill(os.getpid(), 15)", "time.sleep(0.2)", "loaded = True"]
    (tmp_path / "slow_library.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    check_interrupted(partial(importlib.import_module, "slow_library"))
    assert sys.modules.pop("slow_library").loaded


def test_a_library_that_swallows_the_exception_does_not_keep_the_program() -> None:
    swallowed: list[str] = []

    def work() -> None:
        try:
            send(signal.SIGTERM)
            wait_for_interrupt()
        except KeyboardInterrupt:
            swallowed.append("once")

    check_interrupted(work)
    assert swallowed == ["once"]


def test_further_signals_do_not_disturb_the_cleanup() -> None:
    done: list[str] = []

    def work() -> None:
        try:
            send(signal.SIGTERM)
            wait_for_interrupt()
        finally:
            send(signal.SIGTERM)
            time.sleep(0.1)
            done.append("cleanup")

    check_interrupted(work)
    assert done == ["cleanup"]


def test_a_program_that_handles_sigterm_itself_keeps_its_handler() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with interruptible():
            send(signal.SIGTERM)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert received == [signal.SIGTERM]


def test_in_another_thread_signals_stay_as_they_are() -> None:
    seen: list[object] = []

    def look() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_later_block_gets_no_signal_of_an_earlier_one() -> None:
    check_interrupted(lambda: send(signal.SIGTERM))
    with interruptible():
        time.sleep(0.2)
