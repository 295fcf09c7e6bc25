"""A run in a remote folder: a local folder that the run works in, and the mirror that uploads it.

The local folder is new at each start. A resumed run gets its record and its newest good checkpoint
from the remote folder, whichever machine wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from orchestrator.checkpoint.files import step_name
from orchestrator.config.settings import Config
from orchestrator.errors import CheckpointDamaged, TrainingFailed, UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.record.files.remote_record import download_record, holds_record
from orchestrator.run.run_dir import how_to_resume, new_folder, write_remote
from orchestrator.storage.folder import RemoteError, RemoteFolder, retried
from orchestrator.train.remote.checkpoints import (
    CHECKPOINTS,
    RemoteCheckpoint,
    RemoteCheckpoints,
    best_step,
)
from orchestrator.train.remote.mirror import Mirror
from orchestrator.train.worker.run import record_failure
from orchestrator.types import first_line


@dataclass
class RemoteRun:
    """A run in a remote folder, from its start to its end."""

    folder: RemoteFolder
    local: Path
    """The folder that the run works in."""
    mirror: Mirror
    resumed_step: int | None = None
    """The step of the checkpoint that was downloaded; None without checkpoints."""
    has_started: bool = False

    @contextmanager
    def mirroring(self, log: Log, keep: int) -> Iterator[None]:
        """Upload while the block trains, with events in ``log``, and keep so many checkpoints there."""
        if self.resumed_step is not None:
            RemoteCheckpoints(self.folder / CHECKPOINTS).abandon_after(self.resumed_step)
        self.has_started = True
        self.mirror.start(log, keep, self.resumed_step)
        try:
            yield
        except KeyboardInterrupt:
            raise  # the user wants to end at once
        except BaseException:
            self.mirror.stop()
            raise
        self.mirror.finish_checkpoints()
        self._complete_local(log)

    def _complete_local(self, log: Log) -> None:
        """Download the last checkpoint, and the best one, if the hosts have kept none on this disk."""
        if not self.mirror.hosts_upload:
            return

        def warn(message: str) -> None:
            log.write(kinds.Warned(kind="checkpoint", message=message.removeprefix("warning: ")))

        try:
            retried(lambda: download_newest(self.folder, self.local, warn))
        except (RemoteError, OSError) as error:
            raise TrainingFailed(
                f"the run ended, and its checkpoints are in {self.folder.url}, but the last one could not be "
                f"downloaded to {self.local}, to build the model of the run ({first_line(error, None)}); "
                f"evaluate it with: orchestrator evaluate {self.folder.url}"
            ) from None

    @contextmanager
    def closing(self, note: Callable[[str], None]) -> Iterator[None]:
        """Upload what is left when the block has ended, also after an error of its own."""
        began_s = perf_counter()
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            if self.has_started:
                try:
                    self.mirror.finish()
                except TrainingFailed as error:
                    note(f"warning: {error}")
            else:
                shutil.rmtree(self.local, ignore_errors=True)
            raise
        try:
            self.mirror.finish()
        except TrainingFailed as error:
            record_failure(self.local, error, perf_counter() - began_s, starts_before=0)
            raise
        note(f"uploaded: {self.folder.url}")


def mirroring(remote: RemoteRun | None, log: Log, keep: int) -> AbstractContextManager[None]:
    """Upload while the block trains, if the run has a remote folder."""
    return nullcontext() if remote is None else remote.mirroring(log, keep)


def open_remote_run(
    folder: RemoteFolder, config: Config, results: Path, note: Callable[[str], None]
) -> RemoteRun:
    """Check the remote folder, and create the local one.

    Raises ``UserError`` if it cannot be written, or holds a run that is not to be continued."""
    _check_writable(folder)
    holds_run = holds_record(folder)
    if holds_run and config.checkpoint.resume is None:
        raise UserError(
            f"{folder.url} holds a run already; continue it with {how_to_resume(config, folder.url)}, "
            "or choose another --run-dir"
        )
    local = new_folder(results, folder.name)
    try:
        (local / CHECKPOINTS).mkdir(parents=True)
        write_remote(local, folder.url)
    except OSError as error:
        raise UserError(
            f"cannot write to {local}: {error.strerror}; a run with a remote folder works in a local one: "
            "start it in a folder that you can write to"
        ) from None
    remote = RemoteRun(folder, local, Mirror(local, folder))
    if holds_run:
        try:
            download_record(folder, local)
            remote.resumed_step = download_newest(folder, local, note)
        except BaseException:
            shutil.rmtree(local, ignore_errors=True)
            raise
    return remote


def _check_writable(folder: RemoteFolder) -> None:
    try:
        folder.check_writable()
    except RemoteError as error:
        raise UserError(
            f"{error}. Check the name of the bucket and that your credentials allow to write there "
            "(see docs/storage.md), or choose another --run-dir"
        ) from None


def download_newest(folder: RemoteFolder, local: Path, note: Callable[[str], None]) -> int | None:
    """Download the newest good checkpoint of a run, and its best one.

    Return the step of the newest; 0 if all are damaged, and None if there are none."""
    checkpoints = RemoteCheckpoints(folder / CHECKPOINTS)
    published = checkpoints.newest_first()
    for checkpoint in published:
        try:
            path = _downloaded(checkpoints, checkpoint, local)
        except CheckpointDamaged as error:
            note(f"warning: skipped checkpoint {checkpoint.name} of {folder.url}: {error}")
            continue
        best = best_step(path)
        best_ones = [other for other in published if other.step == best]
        for other in best_ones[:1]:
            with suppress(CheckpointDamaged):
                _downloaded(checkpoints, other, local)
        return checkpoint.step
    return 0 if published else None


def _downloaded(checkpoints: RemoteCheckpoints, checkpoint: RemoteCheckpoint, local: Path) -> Path:
    """Return the local copy of a checkpoint; the start of a run may have downloaded it already."""
    path = local / CHECKPOINTS / step_name(checkpoint.step)
    return path if path.exists() else checkpoints.download(checkpoint, local / CHECKPOINTS)
