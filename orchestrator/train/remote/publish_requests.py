"""Requests of the main host to the driver, which alone publishes and removes remote checkpoints.

They are small files in the driver's run folder: the folder's server writes ``NAME.request`` for the main
host, and the driver answers with ``NAME.answer``, which is empty if all went well."""

from __future__ import annotations

from pathlib import Path
from time import sleep, time

from orchestrator.storage.local_files import replace_file

FOLDER = Path("checkpoints", ".requests")
PUBLISH = "publish"
ABANDON = "abandon"
_REQUEST = ".request"
_ANSWER = ".answer"
_POLL_SECONDS = 0.02
_TAKEN_SECONDS = 600.0


def leave_request(run_dir: Path, verb: str, subject: str, content: bytes) -> Path:
    """Leave a request, and return the path of its answer. A request that comes again gets the same answer.

    ``subject`` is used once, so that no answer of an earlier request is there."""
    request = run_dir / FOLDER / f"{verb}-{subject}{_REQUEST}"
    answer = request.with_suffix(_ANSWER)
    if not answer.exists():
        replace_file(request, content)
    return answer


def wait_for_answer(answer: Path) -> str:
    while not answer.exists():
        sleep(_POLL_SECONDS)
    return answer.read_text(encoding="utf-8")


class PublishRequest:
    """A request that the driver has not answered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.verb, _, self.subject = path.stem.partition("-")

    def content(self) -> bytes:
        return self._path.read_bytes()

    def answer(self, reason: str = "") -> None:
        """Answer, with the reason of a failure, and remove answers that were taken long ago."""
        for old in self._path.parent.glob(f"*{_ANSWER}"):
            # Not at once: a request may come again whose answer was lost on the way.
            if old.stat().st_mtime < time() - _TAKEN_SECONDS:
                old.unlink(missing_ok=True)
        # In this order: a request without its answer would be carried out again.
        replace_file(self._path.with_suffix(_ANSWER), reason.encode())
        self._path.unlink(missing_ok=True)


def open_requests(run_dir: Path) -> list[PublishRequest]:
    """Return the requests without an answer, the oldest first."""
    paths = sorted((run_dir / FOLDER).glob(f"[!.]*{_REQUEST}"), key=lambda path: path.stat().st_mtime_ns)
    for path in paths:
        # A request that came again while it was answered: it must not outlive its answer.
        if path.with_suffix(_ANSWER).exists():
            path.unlink(missing_ok=True)
    return [PublishRequest(path) for path in paths if path.exists()]
