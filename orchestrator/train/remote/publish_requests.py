"""Requests of the main host to the driver, which alone publishes and removes remote checkpoints.

They are small files in the run folder, also where a link copies it between nodes: the main host writes
``NAME.request``, and the driver answers with ``NAME.answer``, which is empty if all went well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import sleep, time

from orchestrator.storage.folder import RemoteError
from orchestrator.storage.local_files import replace_file

FOLDER = Path("checkpoints", ".requests")
PUBLISH = "publish"
ABANDON = "abandon"
_REQUEST = ".request"
_ANSWER = ".answer"
_OPEN = f"[!.]*{_REQUEST}"
_POLL_SECONDS = 0.02
_TAKEN_SECONDS = 600.0


def ask(run_dir: Path, verb: str, subject: str, content: bytes, on_wait: Callable[[], None]) -> None:
    """Send the driver a request, and wait for its answer. Raises ``RemoteError`` if the request failed.

    ``subject`` is used once, so that no answer of an earlier request is there. ``on_wait`` is called
    meanwhile, and may raise an error of its own."""
    request = run_dir / FOLDER / f"{verb}-{subject}{_REQUEST}"
    answer = request.with_suffix(_ANSWER)
    replace_file(request, content)
    while not answer.exists():
        on_wait()
        sleep(_POLL_SECONDS)
    # As long as the request is here, the link asks for its answer.
    request.unlink(missing_ok=True)
    reason = answer.read_text(encoding="utf-8")
    answer.unlink(missing_ok=True)
    if reason:
        raise RemoteError(reason)


class PublishRequest:
    """A request that the driver has not answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.verb, _, self.subject = path.stem.partition("-")

    def content(self) -> bytes:
        return self._path.read_bytes()

    def answer(self, reason: str = "") -> None:
        """Answer, with the reason of a failure, and remove answers that the main host has taken long ago."""
        for old in self._path.parent.glob(f"*{_ANSWER}"):
            # Not at once: the answer to a late request must not remove one that the main host waits for.
            if old.stat().st_mtime < time() - _TAKEN_SECONDS:
                old.unlink(missing_ok=True)
        # In this order: a request without its answer would be carried out again.
        replace_file(self._path.with_suffix(_ANSWER), reason.encode())
        self._path.unlink(missing_ok=True)


def open_requests(run_dir: Path) -> list[PublishRequest]:
    """Return the requests without an answer, the oldest first."""
    paths = sorted((run_dir / FOLDER).glob(_OPEN), key=lambda path: path.stat().st_mtime_ns)
    for path in paths:
        # A link that has lost the reply sends a request again.
        if path.with_suffix(_ANSWER).exists():
            path.unlink(missing_ok=True)
    return [PublishRequest(path) for path in paths if path.exists()]


def answer_names(run_dir: Path) -> list[str]:
    """Return the names of the answers that the main host waits for, relative to the run folder."""
    return [(FOLDER / path.with_suffix(_ANSWER).name).as_posix() for path in (run_dir / FOLDER).glob(_OPEN)]
