"""SIGINT and SIGTERM outside of training: both raise KeyboardInterrupt, at a moment when that is safe.

A library in C++ may abort the process if an exception is raised while it is imported, and a cluster that is
started or stopped by half leaves processes behind: there the signal waits for the end."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RETRY_SECONDS = 0.05
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"


class _Handler:
    """Handles the signals of this process."""

    def __init__(self) -> None:
        self.num_shields = 0
        self.is_pending = False
        """Whether a signal waits for the end of a shielded block."""
        self._is_active = False
        self._is_retrying = False
        self._num_sigints = 0
        self._session = 0
        """Number of the block that signals belong to: none is sent again in a later one."""

    def begin(self) -> None:
        self._session += 1
        self._is_active = True
        self._is_retrying = False
        self.is_pending = False
        self._num_sigints = 0

    def end(self) -> None:
        self._is_active = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._is_active:
            return
        self._num_sigints += number == signal.SIGINT
        is_urgent = number == signal.SIGINT and self._num_sigints > 1
        if self.num_shields and not is_urgent:
            self.is_pending = True
            return
        may_raise = not (_is_importing(frame) or _is_unwinding())
        # Also after it was raised: a library may swallow the exception.
        if not self._is_retrying:
            self._is_retrying = True
            # A thread without ``threading``, whose locks the interrupted code may hold.
            _thread.start_new_thread(self._send_again, (self._session,))
        if may_raise or is_urgent:
            raise KeyboardInterrupt

    def _send_again(self, session: int) -> None:
        time.sleep(_RETRY_SECONDS)
        if session != self._session:
            return
        self._is_retrying = False
        if self.num_shields:
            self.is_pending = True
        elif self._is_active:
            os.kill(os.getpid(), signal.SIGTERM)


_HANDLER = _Handler()
"""One for the process, as signals are."""


def _is_unwinding() -> bool:
    """Return whether KeyboardInterrupt was raised, and what was started is being cleaned up."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def interrupt_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, until ``ignore_signals``.

    A second SIGINT raises it again, at once. Further SIGTERMs change nothing."""
    _HANDLER.begin()
    for number in _SIGNALS:
        signal.signal(number, _HANDLER)


def ignore_signals() -> None:
    """Ignore further signals: the program is about to end."""
    _HANDLER.end()


@contextmanager
def interruptible() -> Iterator[None]:
    """Do the same inside the block, unless the program handles SIGTERM itself.

    Only the main thread may handle signals; in another thread they stay as they are."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    earlier = [signal.getsignal(number) for number in _SIGNALS]
    interrupt_on_signals()
    try:
        yield
    finally:
        _HANDLER.end()
        for number, handler in zip(_SIGNALS, earlier, strict=True):
            signal.signal(number, handler)


@contextmanager
def shielded() -> Iterator[None]:
    """Let a signal wait for the end of the block; a second SIGINT does not wait."""
    _HANDLER.num_shields += 1
    try:
        yield
    finally:
        _HANDLER.num_shields -= 1
        if _HANDLER.is_pending and not _HANDLER.num_shields:
            _HANDLER.is_pending = False
            os.kill(os.getpid(), signal.SIGTERM)
