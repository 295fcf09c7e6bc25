"""The checkpoint of another remote run that a run begins with: ``--resume URL``, ``--init-from URL``.

The process that the user starts downloads it, and verifies it before anything else begins. Workers on
nodes that do not see this copy download their own (``node_folder.NodeStart``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from orchestrator.checkpoint.files import MANIFEST, step_name
from orchestrator.config.settings import Config
from orchestrator.errors import CheckpointDamaged, OrchestratorError, UserError
from orchestrator.record.files.remote_record import EVENTS, download_record, is_needed
from orchestrator.run.run_dir import DOWNLOADED, REMOTE, downloaded_copy, write_remote
from orchestrator.storage.folder import RemoteError, RemoteFolder, open_folder
from orchestrator.train.remote.checkpoints import (
    CHECKPOINTS,
    RemoteCheckpoint,
    RemoteCheckpoints,
    named_checkpoint,
)
from orchestrator.types import counted

START = "start.json"
"""A file of the copy: the remote run, and the name of the checkpoint in it."""
_EXAMPLES = "a run (s3://bucket/run1) or one of its checkpoints (s3://bucket/run1/checkpoints/step_00000040)"
_MAX_NAMED = 5


@dataclass(frozen=True)
class RemoteStart:
    """A checkpoint of another remote run, as workers get it."""

    url: str
    """The address of the run."""
    checkpoint: RemoteCheckpoint
    copy: Path
    """The copy of the driver: the record of the run, and the checkpoint."""
    files: Mapping[str, bytes] = field(repr=False)
    """The small files of the copy that workers read."""

    @property
    def path(self) -> Path:
        """The checkpoint in the copy of the driver."""
        return self.copy / CHECKPOINTS / step_name(self.checkpoint.step)

    def with_location(self, config: Config, path: Path) -> Config:
        """Return settings that begin with the checkpoint at a path."""
        name = "resume" if config.checkpoint.init_from is None else "init_from"
        return config.but(**{name: str(path)})


def remote_start(config: Config) -> RemoteStart | None:
    """Return what a run begins with, if it is the copy of a checkpoint of another remote run."""
    settings = config.checkpoint
    location = settings.resume if settings.init_from is None else settings.init_from
    copy = downloaded_copy(Path(location)) if location is not None else None
    if copy is None or not (copy / START).is_file():
        return None
    note = json.loads((copy / START).read_text(encoding="utf-8"))
    checkpoint = named_checkpoint(note["checkpoint"])
    assert checkpoint is not None, note
    names = [START, REMOTE, f"{CHECKPOINTS}/{step_name(checkpoint.step)}/{MANIFEST}"]
    for path in sorted(copy.rglob("*")):
        name = path.relative_to(copy).as_posix()
        # The events may be long, and no worker reads them.
        if path.is_file() and is_needed(name) and not name.startswith("events."):
            names.append(name)
    files = {name: (copy / name).read_bytes() for name in names}
    return RemoteStart(note["run"], checkpoint, copy, files)


@contextmanager
def downloaded_start(
    flag: str, location: str | Path, results: Path, note: Callable[[str], None]
) -> Iterator[Path]:
    """Yield a local copy of what ``--resume`` or ``--init-from`` names: a checkpoint, or a run folder.

    It is removed at the end. Raises ``UserError`` if there is none."""
    with recorded_run(flag, location, results) as found:
        with _user_errors(found.given):
            checkpoint, path = _first_good(found, note)
        content = {"run": found.run.url, "checkpoint": checkpoint.name}
        (found.local / START).write_text(json.dumps(content), encoding="utf-8")
        yield found.local if found.named is None else path


@contextmanager
def downloaded_record(location: str | Path) -> Iterator[Path]:
    """Yield a copy of the record of the run that ``--resume`` names, to plan with its settings.

    It has no checkpoint, and is removed at the end. Raises ``UserError`` if there is no run."""
    with recorded_run("--resume", location, Path(gettempdir())) as found:
        yield found.local


@dataclass(frozen=True)
class RecordedRun:
    """A remote run of which a checkpoint is read."""

    given: str
    """The flag with its address, for messages."""
    run: RemoteFolder
    named: RemoteCheckpoint | None
    """The checkpoint whose address is given; None for the address of a run."""
    candidates: Sequence[RemoteCheckpoint]
    """The checkpoint that is named, else all of the run, newest first."""
    local: Path
    """A copy of the run's record."""


@contextmanager
def recorded_run(flag: str, location: str | Path, results: Path) -> Iterator[RecordedRun]:
    """Find a run, and copy its record into a folder below ``results`` while the block runs."""
    folder = open_folder(flag, location)
    given = f"{flag} {folder.url}"
    named = named_checkpoint(folder.name)
    run = folder if named is None else _run_of(given, flag, folder)
    with _user_errors(given):
        candidates = _candidates(given, run, named)
    with local_copy(results, run.url) as local:
        write_remote(local, folder.url)
        with _user_errors(given):
            download_record(run, local)
        yield RecordedRun(given, run, named, candidates, local)


@contextmanager
def _user_errors(given: str) -> Iterator[None]:
    """Say what to do where the storage refuses to be read."""
    try:
        yield
    except RemoteError as error:
        raise UserError(
            f"{given}: {error}. Check the name of the bucket and that your credentials allow to read there "
            "(see docs/storage.md)"
        ) from None


def _run_of(given: str, flag: str, checkpoint: RemoteFolder) -> RemoteFolder:
    """Return the run of a checkpoint's address."""
    run_url, _, parent = checkpoint.url.rpartition("/")[0].rpartition("/")
    if parent != CHECKPOINTS:
        raise UserError(f"{given}: it is not in the folder {CHECKPOINTS} of a run; give {_EXAMPLES}")
    return open_folder(flag, run_url)


def _candidates(given: str, run: RemoteFolder, named: RemoteCheckpoint | None) -> list[RemoteCheckpoint]:
    """Return the checkpoints to choose from: the one that is named, else all of a run, newest first."""
    published = RemoteCheckpoints(run / CHECKPOINTS).newest_first()
    if not published:
        files = run.files()
        found = f"a run without a checkpoint so far, of {counted(len(files), 'file')}"
        if EVENTS not in files:
            found = f"no run, but {counted(len(files), 'other file')}" if files else "nothing"
        place = "" if given.endswith(run.url) else f" at {run.url}"
        raise UserError(f"{given}: there is {found}{place}; give {_EXAMPLES}")
    if named is None:
        return published
    # Nodes that upload their own parts give each save a number; people name the step alone.
    same_step = [other for other in published if other.step == named.step and not named.upload]
    chosen = [other for other in published if other == named] or same_step
    if not chosen:
        names = [other.name for other in published[:_MAX_NAMED]]
        more = f" and {len(published) - _MAX_NAMED} older ones" if len(published) > _MAX_NAMED else ""
        raise UserError(
            f"{given}: the run has no such checkpoint; it has {', '.join(names)}{more}. Give one of them, or "
            f"{run.url} for the newest"
        )
    return chosen[:1]


def _first_good(found: RecordedRun, note: Callable[[str], None]) -> tuple[RemoteCheckpoint, Path]:
    """Download the first checkpoint that is good. Return it with its local path."""
    checkpoints = RemoteCheckpoints(found.run / CHECKPOINTS)
    candidates = found.candidates
    damage = ""
    for checkpoint in candidates:
        try:
            return checkpoint, checkpoints.download(checkpoint, found.local / CHECKPOINTS)
        except CheckpointDamaged as error:
            damage = damage or str(error)
            if len(candidates) > 1:
                note(f"warning: skipped checkpoint {checkpoint.name} of {found.run.url}: {error}")
    damaged = "the checkpoint is" if len(candidates) == 1 else f"all {len(candidates)} checkpoints are"
    raise UserError(f"{found.given}: {damaged} damaged ({damage}); give another run or checkpoint")


@contextmanager
def local_copy(results: Path, url: str) -> Iterator[Path]:
    """Yield an empty folder for a copy of a remote run; errors of the block name its address.

    It is below ``results``, which other nodes may see too, and removed at the end."""
    results.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=DOWNLOADED, dir=results) as name:
        copy = Path(name)
        try:
            yield copy
        except OrchestratorError as error:
            for path in {str(copy), str(copy.resolve())}:
                error.args = tuple(
                    value.replace(path, url) if isinstance(value, str) else value for value in error.args
                )
            raise
