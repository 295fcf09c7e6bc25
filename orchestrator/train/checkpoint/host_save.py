"""One host's part of a save, in a thread: write its files, tell the main host, publish.

The hosts report through the store of their group. A report says that the host's files are on disk,
with their hashes, or why they are not. The main host publishes a checkpoint when it has a good
report of every host: the files of a host that is lost before its report are in no checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from orchestrator.checkpoint.files import write_part
from orchestrator.checkpoint.hashed_file import Hashes
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.storage.folder import RemoteError
from orchestrator.train.checkpoint.capture import Captured
from orchestrator.train.group.world import World

_POLL_SECONDS = 0.02
_CLOSING_SECONDS = 5.0  # the parts are of similar size, so the hosts finish at about the same time


class SaveFailed(Exception):
    """A checkpoint could not be written. The older ones remain, and the run goes on."""


class Published(NamedTuple):
    """A checkpoint that is on disk."""

    path: Path
    num_bytes: int


class CloseDeadline:
    """When the run began to end, so that a save does not wait for a lost host for ever."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def begin(self) -> None:
        self._since_s = monotonic()

    def is_over(self, written_s: float) -> bool:
        """Return whether the other hosts have had enough time since this host's own files were written."""
        return self._since_s is not None and monotonic() - max(self._since_s, written_s) > _CLOSING_SECONDS


@dataclass(frozen=True)
class HostSave:
    """The save of one step, as one host carries it out."""

    name: str
    """The same on all hosts, and used once in the life of the group."""
    step: int
    best_step: int | None
    folder: Path
    """The folder of this host's files; of all hosts, where they share a disk."""
    store: CheckpointStore
    world: World
    closing: CloseDeadline
    written: threading.Event
    """Set when this host's files are on disk or have failed; what remains is to wait for others."""

    def run(self, captured: Captured, on_piece: Callable[[], None]) -> Published | None:
        """Save this host's part. Return the checkpoint on the main host.

        Raises ``SaveFailed``."""
        if self.world.is_main:
            # Before the new files: the remains of killed saves may keep the disk full.
            with suppress(OSError):
                self.store.remove_remains(self.folder)
        report = self._write(captured, on_piece)
        self.written.set()
        if not self.world.is_main:
            with _store_errors():
                self.world.post(self.name, report)
            return None
        # Every host has reported before a failed save is removed: none still writes into the folder.
        reports = [report, *self._reports_of_others()]
        try:
            return self._publish(_merge(reports, captured.shared_digest, self.world.size))
        except (OSError, RemoteError, SaveFailed) as error:
            self.store.discard(self.folder)
            raise SaveFailed(_disk_error(error) if isinstance(error, OSError) else str(error)) from None

    def _write(self, captured: Captured, on_piece: Callable[[], None]) -> dict[str, Any]:
        """Write the files of this host. Return the report for the main host."""

        def check_and_count() -> None:
            # The main host of a group that was left publishes nothing: the rest need not be written.
            self._check_membership()
            on_piece()

        try:
            files = write_part(self.folder, self.world.rank, captured.part, check_and_count)
            self.store.store_part(self.folder, check_and_count)
        except OSError as error:
            return {"error": _disk_error(error)}
        except RemoteError as error:
            return {"error": str(error)}
        hashes = {name: file_hashes.to_json() for name, file_hashes in files.items()}
        return {"files": hashes, "shared": captured.shared_digest}

    def _reports_of_others(self) -> list[dict[str, Any]]:
        if self.world.size == 1:
            return []
        written_s = monotonic()
        with _store_errors():
            while (reports := self.world.posted(self.name)) is None:
                self._check_wait(written_s, "not every host has written its part")
                sleep(_POLL_SECONDS)
        return reports

    def _publish(self, files: dict[str, Hashes]) -> Published:
        began_s = monotonic()

        def on_wait() -> None:
            self._check_wait(began_s, "the driver has not published it")

        path = self.store.publish(self.folder, self.step, files, on_wait)
        self.store.retain(self.best_step)
        return Published(path, sum(hashes.num_bytes for hashes in files.values()))

    def _check_wait(self, since_s: float, reason: str) -> None:
        """Raise ``SaveFailed`` if there is nobody left to wait for, or no time."""
        self._check_membership()
        if self.closing.is_over(since_s):
            raise SaveFailed(reason)

    def _check_membership(self) -> None:
        if self.world.membership.left:
            raise SaveFailed("the group was left")


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn an error of the store, which ends with the process that serves it, into ``SaveFailed``."""
    try:
        yield
    except RuntimeError as error:
        raise SaveFailed(f"the hosts' store does not answer: {error}") from None


def _merge(reports: list[dict[str, Any]], shared_digest: str, size: int) -> dict[str, Hashes]:
    """Return the files of all hosts. Raise ``SaveFailed`` with the hosts that failed."""
    failures = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    if failures:
        texts = [f"host {rank}: {text}" if size > 1 else text for rank, text in failures.items()]
        raise SaveFailed("; ".join(texts))
    files: dict[str, Hashes] = {}
    for rank, report in enumerate(reports):
        # The hosts share out what all of them hold: a tensor that one of them does not know of could
        # be missing from the checkpoint.
        if report["shared"] != shared_digest:
            raise SaveFailed(f"host {rank} has other parameters or optimizer state than host 0")
        files |= {name: Hashes.from_json(hashes) for name, hashes in report["files"].items()}
    return files


def _disk_error(error: OSError) -> str:
    return f"{error}; free space on the disk"
