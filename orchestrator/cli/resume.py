"""``orchestrator resume``: continue the run or the sweep of a folder with its own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.train import fit, refuse_launchers
from orchestrator.config.reading.flags import Options, read_flags
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.remote_record import local_record
from orchestrator.storage.address import location_text, refuse_address
from orchestrator.types import flag_of


@dataclass(frozen=True)
class ResumeOptions:
    """Continue the run of a folder from its newest good checkpoint, with the settings it has there.

    Flags win over those settings, and every difference is shown and recorded. A sweep continues with
    the trials that it has not finished; its settings stay as they are.
    """

    settings: Config
    folder: Path | None = None
    """The folder of the run or of the sweep, or the address of a run (s3://bucket/run1)."""
    config: Path | None = None
    """YAML file with settings that win over those of the folder; flags win over both."""


def run(argv: Sequence[str]) -> int:
    options, resolved = read_run_flags(ResumeOptions, argv, "resume", "folder")
    assert options.folder is not None
    with local_record(options.folder) as folder:
        is_sweep = _is_sweep(folder, location_text(options.folder))
    if is_sweep:
        from orchestrator.cli.sweep import SweepOptions, continue_sweep

        refuse_address("orchestrator resume FOLDER of a sweep", options.folder)
        return continue_sweep(options.folder, SweepOptions(options.settings), resolved)
    origins = dict(resolved.origins) | dict.fromkeys(("resume", "run_dir"), "orchestrator resume")
    return fit(Resolved(resolved.config.but(resume="auto", run_dir=options.folder), origins))


def read_run_flags(
    options_type: type[Options], argv: Sequence[str], verb: str, positional: str, noun: str = "run"
) -> tuple[Options, Resolved]:
    """Read the flags of a verb that takes a run or a checkpoint, and settings that win over those of the run.

    Raise UserError without it, and for a flag that names another run."""
    command = f"orchestrator {verb} FOLDER"
    options, resolved = read_flags(options_type, argv, f"orchestrator {verb}", positional)
    refuse_launchers()
    if getattr(options, positional) is None:
        raise UserError(f"which {noun}? Give its folder: {command}")
    for name in ("resume", "run_dir", "name", "init_from"):
        if resolved.origin(name).startswith("flag"):
            advice = ", or use orchestrator train" if verb == "resume" else ""
            raise UserError(f"{command} names the {noun} already; leave {flag_of(name)} out{advice}")
    return options, resolved


def _is_sweep(folder: Path, shown: str) -> bool:
    """Return whether the folder holds a sweep; UserError unless it is one, or a run that the command line
    can continue.

    ``shown`` is the folder as the user named it."""
    from orchestrator.config.reading.reader import read_file
    from orchestrator.record.files.ledger import holds_sweep
    from orchestrator.run.plan_file import CONFIG
    from orchestrator.run.run_dir import check_links, holds_run, resume_call

    if not folder.is_dir():
        raise UserError(f"{shown}: there is no such folder; give the folder of a run")
    check_links(folder)
    if holds_sweep(folder):
        return True
    if not holds_run(folder):
        raise UserError(
            f"{shown} holds no run: no start is recorded in its events.jsonl; begin one with train"
        )
    path = folder / CONFIG
    task = read_file(path).config.task if path.is_file() else ""
    if task.startswith("python:"):
        raise UserError(
            f"the run in {shown} trains an object of a Python program ({task}), which no command line can "
            f"name; continue it in Python: {resume_call(shown)}"
        )
    return False
