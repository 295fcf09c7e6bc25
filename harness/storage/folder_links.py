"""A link between two run folders in one process, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.runtime.bootstrap import LINKED_FILES
from orchestrator.runtime.folder_link import FolderLink
from orchestrator.runtime.folder_server import DriverEnd, FolderServer
from orchestrator.storage.folder import RemoteError
from orchestrator.storage.local_files import replace_file
from orchestrator.train.remote.node_store import Ask
from orchestrator.train.remote.publish_requests import FOLDER

WAIT_S = 60.0


class ServerHandle:
    """Calls the server as Ray's handle of an actor does, in this process."""

    def __init__(self, run_dir: Path) -> None:
        self.is_down = False
        self.num_refused = 0
        self.num_lost_replies = 0
        self._run_dir = run_dir
        self.restart()
        self.open = SimpleNamespace(remote=lambda is_main: self._server.open(is_main))
        self.exchange = SimpleNamespace(remote=self._exchange)
        self.ask = SimpleNamespace(remote=lambda *arguments: self._server.ask(*arguments))

    def restart(self) -> None:
        """Start the server again, as Ray does after its process has died."""
        self._server = FolderServer(self._run_dir, LINKED_FILES)

    def _exchange(self, *arguments: Any) -> Any:
        if self.is_down:
            self.num_refused += 1
            raise ConnectionError("the node of the driver does not answer")
        reply = self._server.exchange(*arguments)
        if self.num_lost_replies:
            self.num_lost_replies -= 1
            raise TimeoutError("the reply was lost")
        return reply


def without_ray() -> SimpleNamespace:
    """Return the functions of Ray that a link calls: here a reply is the value itself."""
    return SimpleNamespace(
        get=lambda reply, timeout=None: reply,
        wait=lambda replies, timeout: (replies, []),
    )


def no_requests(*_: object) -> None:
    """Stand for the requests of a store that only reads."""
    raise AssertionError("this store saves nothing")


def asking(driver_dir: Path) -> Ask:
    """Return a function that asks the driver for an answer, as the server of its folder does."""

    def ask(verb: str, subject: str, content: bytes, on_wait: Callable[[], None]) -> None:
        request = driver_dir / FOLDER / f"{verb}-{subject}.request"
        replace_file(request, content)
        while not request.with_suffix(".answer").exists():
            on_wait()
            time.sleep(0.01)
        reason = request.with_suffix(".answer").read_text()
        if reason:
            raise RemoteError(reason)

    return ask


def linked(server: ServerHandle, run_dir: Path, rank: int = 0) -> FolderLink:
    return FolderLink(DriverEnd("memory://run", server), run_dir, rank)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
