"""A link between two run folders in one process, without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.runtime.bootstrap import LINKED_FILES
from orchestrator.runtime.folder_link import FolderLink
from orchestrator.runtime.folder_server import FolderServer, Link

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


def linked(server: ServerHandle, run_dir: Path, rank: int = 0) -> FolderLink:
    return FolderLink(Link("memory://run", server), run_dir, rank)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
