"""Addresses among the settings of a run: each is replaced by a local copy while the run works with it.

Modules that need torch or a remote file system are imported only where there is an address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.reading.reader import Resolved
from orchestrator.storage.address import as_url
from orchestrator.types import flag_of

if TYPE_CHECKING:
    from orchestrator.train.remote.run import RemoteRun


@contextmanager
def local_records(resolved: Resolved) -> Iterator[Resolved]:
    """Yield settings with copies of records in place of a remote ``--run-dir`` and ``--resume``."""
    from orchestrator.record.files.remote_record import local_record

    run_dir = resolved.config.run.run_dir
    resume = resolved.config.checkpoint.resume
    with ExitStack() as stack:
        if run_dir is not None and as_url(run_dir) is not None:
            resolved = _but(resolved, run_dir=stack.enter_context(local_record(run_dir)))
        if resume is not None and as_url(resume) is not None:
            from orchestrator.train.remote.remote_start import downloaded_record

            resolved = _but(resolved, resume=str(stack.enter_context(downloaded_record(resume))))
        yield resolved


@contextmanager
def local_start(resolved: Resolved, results: Path, note: Callable[[str], None]) -> Iterator[Resolved]:
    """Yield settings with local copies of the remote checkpoint or run that the run begins with."""
    settings = resolved.config.checkpoint
    with ExitStack() as stack:
        for name, location in (("resume", settings.resume), ("init_from", settings.init_from)):
            if location is None or as_url(location) is None:
                continue
            from orchestrator.train.remote.remote_start import downloaded_start

            copy = stack.enter_context(downloaded_start(flag_of(name), location, results, note))
            resolved = _but(resolved, **{name: str(copy)})
        yield resolved


@contextmanager
def remote_run(
    resolved: Resolved, results: Path, note: Callable[[str], None]
) -> Iterator[tuple[Resolved, RemoteRun | None]]:
    """Yield settings with a local folder in place of a remote ``--run-dir``, and the run that uploads it."""
    config = resolved.config
    url = as_url(config.run.run_dir)
    if url is None:
        yield resolved, None
        return
    from orchestrator.storage.folder import RemoteFolder
    from orchestrator.train.remote.run import open_remote_run

    remote = open_remote_run(RemoteFolder(url), config, results, note)
    with remote.closing(note):
        yield _but(resolved, run_dir=remote.local), remote


def _but(resolved: Resolved, **changes: Any) -> Resolved:
    return Resolved(resolved.config.but(**changes), resolved.origins)
