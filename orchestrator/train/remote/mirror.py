"""Copies a run folder to a remote one, in a thread beside the training.

The run works in a folder on the disk and knows nothing of this. The thread looks at the folder every
second. It uploads a new checkpoint: its files, then the events and the other files of the run, then
its manifest. Only then is there an ``upload`` event. Files of the run are also uploaded at intervals.

No upload waits in a queue: after one, the newest checkpoint is next, and those before it are left
out. The training never waits for an upload, except for the last one at the end of the run.

Where the nodes share no disk, the hosts upload the files of a checkpoint, and the thread publishes it
when the main host asks for that (``publish_requests``)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from orchestrator.checkpoint.files import MANIFEST
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import CheckpointDamaged, TrainingFailed
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.record.files.remote_record import RecordUpload
from orchestrator.storage.address import upload_command
from orchestrator.storage.folder import TRIES, RemoteFolder, retried, wait_seconds
from orchestrator.train.remote.checkpoints import (
    CHECKPOINTS,
    RemoteCheckpoints,
    best_step,
    named_checkpoint,
)
from orchestrator.train.remote.publish_requests import ABANDON, PUBLISH, PublishRequest, open_requests
from orchestrator.types import first_line

_LOOK_SECONDS = 1.0
_LOUD_FAILURES = 5
"""Failures in a row after which a warning says what is at stake."""
_MAX_NAMES = 3
_LINKS = ".upload"
"""Folder of hard links to the checkpoint that is being uploaded: the run may remove its own names."""


class Mirror:
    """Uploads the checkpoints and the record of one run."""

    def __init__(self, local: Path, remote: RemoteFolder) -> None:
        self._local = local
        self._remote = remote
        self._keep = 1
        self._store = CheckpointStore(local / CHECKPOINTS, repair=False)
        self._checkpoints = RemoteCheckpoints(remote / CHECKPOINTS)
        self._record = RecordUpload(local, remote)
        self._log: Log | None = None
        self._uploaded: set[tuple[int, int, int]] = set()
        """Step, inode and time of the manifests that are published: a step may be saved again."""
        self._downloaded_step: int | None = None
        self._best_step: int | None = None
        self._num_failures = 0
        self.hosts_upload = False
        """Whether the hosts have uploaded a checkpoint, which is not on the driver's disk then."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, log: Log, keep: int, downloaded_step: int | None = None) -> None:
        """Start to upload in the background. Events go to ``log``.

        ``keep`` checkpoints stay in the remote folder, besides the best one. A resumed run has downloaded
        the checkpoint of ``downloaded_step``, the newest there."""
        self._log = log
        self._keep = keep
        self._downloaded_step = downloaded_step
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the upload in progress, and begin no other one. The log may be closed afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._log = None

    def finish_checkpoints(self) -> None:
        """Upload the last checkpoints. A failure is an event, and ``finish`` tries again.

        The log may be closed afterwards."""
        log = self._log
        self.stop()
        self._log = log
        self._try_often(self._upload_checkpoints)
        self._log = None

    def finish(self) -> None:
        """Upload the rest: the record with its end, and the report.

        Raises ``TrainingFailed`` if anything is missing in the remote folder."""
        self.stop()
        error = self._try_often(self._upload_all)
        if error is not None:
            url = self._remote.url
            command = upload_command(self._local, url)
            how = f"upload it with: {command}" if command else "copy that folder there"
            raise TrainingFailed(
                f"the run ended, but its upload to {url} failed {TRIES} times ({first_line(error, None)}); "
                f"not uploaded: {self._not_uploaded()}. All of it is in {self._local}; {how}"
            )

    def _not_uploaded(self) -> str:
        """Return what is on this machine alone: checkpoints and files of the record, for people."""
        names = [
            f"{CHECKPOINTS}/{path.name}"
            for number, (step, path) in enumerate(self._store.newest_first())
            if (number == 0 or step == self._best_step) and _identity(step, path) not in self._uploaded
        ]
        names += self._record.not_uploaded()
        shown = names[:_MAX_NAMES]
        more = [f"{len(names) - _MAX_NAMES} more files"] if len(names) > _MAX_NAMES else []
        return ", ".join([*shown, *more]) or "nothing of it; older checkpoints are not removed"

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            try:
                self._warning_of_failures(self._upload_due)
                wait_s = _LOOK_SECONDS
            except Exception:
                wait_s = wait_seconds(self._num_failures)

    def _try_often(self, action: Callable[[], None]) -> Exception | None:
        """Carry out an action, again after failures. Return the last error if all tries have failed."""
        self._num_failures = 0
        try:
            retried(lambda: self._warning_of_failures(action), errors=Exception)
        except Exception as error:
            return error
        return None

    def _warning_of_failures(self, action: Callable[[], None]) -> None:
        """Carry out an action. Warn of its first failure, and when failures go on."""
        try:
            action()
        # The storage, a full disk (hard links), a damaged checkpoint. An unforeseen error must not end
        # the thread unseen either: there is a warning, and in the end the run fails.
        except Exception as error:
            self._num_failures += 1
            self._warn_of(error)
            raise
        if self._num_failures:
            self._num_failures = 0
            self._write(kinds.Notice(message=f"uploads to {self._remote.url} work again"))

    def _warn_of(self, error: Exception) -> None:
        reason = first_line(error, None)
        if self._num_failures == 1:
            self._warn(f"an upload failed, and is tried again: {reason}")
        elif self._num_failures % _LOUD_FAILURES == 0:
            newest = max((step for step, *_ in self._uploaded), default=self._downloaded_step)
            saved = f"the newest checkpoint there is of step {newest}" if newest else "no checkpoint is there"
            self._warn(
                f"UPLOADS FAIL: {self._num_failures} in a row, {saved}; what came later is on this machine "
                f"alone ({self._local}): {reason}"
            )

    def _warn(self, message: str) -> None:
        self._write(kinds.Warned(kind="upload", message=message))

    def _write(self, event: kinds.Event) -> None:
        if self._log is not None:
            # A run that has failed has closed its log; the disk of the log may be full.
            with suppress(ValueError, OSError):
                self._log.write(event)

    def _upload_due(self) -> None:
        """Upload the newest checkpoint if it is new, and the record if its time has come."""
        self._upload_checkpoints()
        if self._record.is_due():
            self._record.upload()

    def _upload_all(self) -> None:
        self._upload_checkpoints()
        self._record.upload(with_logs=True)

    def _answer_requests(self) -> None:
        """Carry out the requests of the main host, and answer each: done, or why it failed.

        A failure of the storage is answered after the last try, a damaged checkpoint at once."""
        for request in open_requests(self._local):
            try:
                self._carry_out(request)
            except Exception as error:
                if isinstance(error, CheckpointDamaged) or self._num_failures + 1 >= TRIES:
                    request.answer(first_line(error, None))
                raise
            # The checkpoint is published: it counts from here on, whatever happens to the older ones.
            request.answer()
            if request.verb == PUBLISH:
                self._best_step = self._checkpoints.best_step(request.subject)
                self._checkpoints.retain(self._keep, self._best_step)

    def _carry_out(self, request: PublishRequest) -> None:
        if request.verb == ABANDON:
            self._checkpoints.abandon_after(int(request.subject.partition("-")[0]))
            return
        began_s = monotonic()
        name = request.subject
        checkpoint = named_checkpoint(name)
        assert checkpoint is not None, name
        num_bytes = self._checkpoints.publish(name, request.content(), self._record.upload)
        seconds = monotonic() - began_s
        step = checkpoint.step
        self._uploaded.add((step, 0, 0))
        self.hosts_upload = True
        self._write(kinds.Upload(step=step, path=f"{CHECKPOINTS}/{name}", bytes=num_bytes, seconds=seconds))

    def _upload_checkpoints(self) -> None:
        """Publish what the hosts have uploaded. Upload the newest checkpoint, and the best one.

        Also at the end: a group that has failed may have left a request, and a whole checkpoint."""
        self._answer_requests()
        checkpoints = self._store.newest_first()
        for number, (step, path) in enumerate(checkpoints):
            if number == 0 or step == self._best_step:
                self._upload_checkpoint(step, path, is_newest=number == 0)

    def _upload_checkpoint(self, step: int, path: Path, is_newest: bool) -> None:
        try:
            identity = _identity(step, path)
            if identity in self._uploaded:
                return
            links = _link_files(path, self._local / _LINKS / path.name)
        except FileNotFoundError:
            return  # removed meanwhile: there is a newer one
        began_s = monotonic()
        try:
            if is_newest:
                self._best_step = best_step(links)
            num_bytes = self._checkpoints.upload(links, self._record.upload)
        finally:
            shutil.rmtree(links, ignore_errors=True)
        self._uploaded.add(identity)
        if num_bytes is None:
            return  # the checkpoint that a resumed run has downloaded
        # The checkpoint is published: it counts from here on, whatever happens to the older ones.
        seconds = monotonic() - began_s
        relative_path = f"{CHECKPOINTS}/{path.name}"
        self._write(kinds.Upload(step=step, path=relative_path, bytes=num_bytes, seconds=seconds))
        self._checkpoints.retain(self._keep, self._best_step)


def _identity(step: int, path: Path) -> tuple[int, int, int]:
    """Return step, inode and time of a checkpoint's manifest. Raises ``FileNotFoundError`` if it is gone."""
    status = (path / MANIFEST).stat()
    return step, status.st_ino, status.st_mtime_ns


def _link_files(source: Path, target: Path) -> Path:
    """Give the files of a checkpoint names of their own, below ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links; each has an error number of its own
            shutil.copyfile(file, target / file.name)
    return target
