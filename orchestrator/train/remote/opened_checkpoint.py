"""The checkpoint that ``orchestrator evaluate`` names: a folder on the disk, or a copy of a remote one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.files import is_checkpoint, step_of
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.record.events.effective import effective_events
from orchestrator.record.files.remote_record import EVENTS
from orchestrator.record.summary.index import read_fold
from orchestrator.record.summary.summary import best_evaluation, metric_of_best, write_json
from orchestrator.storage.address import as_url
from orchestrator.storage.folder import RemoteError, RemoteFolder
from orchestrator.train.remote.checkpoints import CHECKPOINTS, RemoteCheckpoints
from orchestrator.train.remote.remote_start import RecordedRun, recorded_run

_ADVICE = "give the folder of a run with checkpoints, or one of its checkpoints"


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint on the disk, and the place where the user finds it."""

    path: Path
    location: str
    """The folder, or the address that it was downloaded from."""
    choice: str = ""
    """Why it was chosen, where the user named a run."""
    remote: RemoteFolder | None = None
    """The remote folder of the run, if the checkpoint was downloaded."""

    @property
    def name(self) -> str:
        """The name of its folder, the remote one if it was downloaded."""
        return self.location.rstrip("/").rpartition("/")[2]

    def result_name(self, split: str) -> str:
        """Return the path or the address of the result, beside the checkpoint."""
        return f"{self.location}.{split}.json"

    def check_writable(self) -> None:
        """Raise UserError unless a result can be written beside the checkpoint."""
        try:
            if self.remote is not None:
                (self.remote / CHECKPOINTS).check_writable()
                return
            probe = self.path.parent / ".writable"
            probe.touch()
            probe.unlink()
        except (OSError, RemoteError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(
                f"cannot write beside {self.location}: {reason}; the result of an evaluation is written "
                "there: copy the checkpoint to a folder that you can write to"
            ) from None

    def write_result(self, split: str, content: dict[str, Any]) -> None:
        """Write the result as a whole or not at all, in place of an earlier one of the same split."""
        name = self.result_name(split)
        if self.remote is None:
            write_json(Path(name), content)
            return
        data = json.dumps(content, indent=2, default=str).encode()
        (self.remote / CHECKPOINTS).write(name.rpartition("/")[2], data)


@contextmanager
def opened_checkpoint(location: str | Path, results: Path) -> Iterator[OpenedCheckpoint]:
    """Yield a checkpoint, or the best one of a run, else its newest.

    The copy of a remote one is below ``results``, and removed at the end. Raises ``UserError`` if there is
    none."""
    if as_url(location) is None:
        yield _local_checkpoint(Path(location))
        return
    with recorded_run("the checkpoint", location, results) as found:
        yield _download(found)


def _local_checkpoint(path: Path) -> OpenedCheckpoint:
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; {_ADVICE}")
    if is_checkpoint(path) or step_of(path.name) is not None:
        return OpenedCheckpoint(path.absolute(), str(path))
    saved = dict(CheckpointStore(path / CHECKPOINTS, repair=False).newest_first())
    if not saved:
        raise UserError(f"{path} holds no checkpoint; {_ADVICE}")
    step, choice = _choose_step(list(saved), path)
    return OpenedCheckpoint(saved[step].absolute(), str(saved[step]), choice)


def _download(found: RecordedRun) -> OpenedCheckpoint:
    """Download the checkpoint that is named, else the best one of the run."""
    choice = ""
    checkpoint = found.candidates[0]
    if found.named is None:
        step, choice = _choose_step([other.step for other in found.candidates], found.local)
        checkpoint = next(other for other in found.candidates if other.step == step)
    remote = found.run / CHECKPOINTS
    try:
        path = RemoteCheckpoints(remote).download(checkpoint, found.local / CHECKPOINTS)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{remote.url}: {error}") from None
    return OpenedCheckpoint(path, f"{remote.url}/{checkpoint.name}", choice, found.run)


def _choose_step(steps: Sequence[int], record: Path) -> tuple[int, str]:
    """Return the step to evaluate of those that a run has, and why. ``record`` has the run's events."""
    events = effective_events(read_fold(record / EVENTS).events())
    best = best_evaluation(events)
    newest = max(steps)
    if best is None:
        return newest, "the newest of the run, which has no validation result"
    if best.step not in steps:
        return newest, f"the newest of the run; the best, of step {best.step}, is not there"
    return best.step, f"the best of the run, by {metric_of_best(events)}"
