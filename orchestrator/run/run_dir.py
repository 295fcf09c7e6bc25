"""The run folder: chosen and created, checked before it is used, and closed with a summary."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from orchestrator.config.sections.outputs import Tracker
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.events.kinds import Event
from orchestrator.record.files.reading import stream_events
from orchestrator.record.summary.index import read_fold, save_fold
from orchestrator.record.summary.summary import summary_of, write_json
from orchestrator.run.folder_lock import check_unlocked, folder_lock
from orchestrator.storage.address import location_text
from orchestrator.storage.local_files import read_regular
from orchestrator.types import counted, first_line, speed_text

_FILE_SUFFIXES = frozenset({".jsonl", ".json", ".yaml", ".html", ".txt", ".png", ".log"})
_MAX_NAME_CHARACTERS = 60
_MAX_RUNS_PER_SECOND = 100
_MAX_URL_BYTES = 4096
REMOTE = "remote"
"""A file of a run folder that is the copy of a remote one: its address."""
DOWNLOADED = ".downloaded-"
"""How the name of a folder begins that holds a copy of a remote checkpoint or run, while it is needed."""


@contextmanager
def opened_run_dir(config: Config, results: Path) -> Iterator[Path]:
    """Create the folder of the run, and keep other processes from training into it."""
    run_dir = _open_run_dir(config, results)
    with folder_lock(run_dir):
        yield run_dir


def _open_run_dir(config: Config, results: Path) -> Path:
    """Create the folder of the run and return it.

    A folder that holds a run is continued only on request."""
    name = config.run.name
    run_dir = config.run.run_dir or (results / name if name else None)
    if run_dir is None and config.checkpoint.resume == "auto":
        raise _unnamed(config, results)
    run_dir = run_dir or new_folder(results, task_name(config))
    check_unused(config, run_dir)
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        # Permissions do not tell: a network drive or a full quota shows only at a write.
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to the run folder {run_dir}: {error.strerror}; choose another with --run-dir"
        ) from None
    return run_dir


def named_folder(config: Config, results: Path) -> Path:
    """Return the folder that ``--run-dir`` or ``--name`` names, for ``--resume auto``."""
    if config.run.run_dir is not None:
        return config.run.run_dir
    if config.run.name is None:
        raise _unnamed(config, results)
    return results / config.run.name


def _unnamed(config: Config, results: Path) -> UserError:
    """Return the error of ``--resume auto`` without a folder: no run is chosen by its task's name."""
    newest = _newest_run(config, results)
    example = f"the newest of this task: {resume_command(newest)}" if newest else "orchestrator resume FOLDER"
    return UserError(
        "--resume auto continues the run of a named folder, and none is named; "
        f"give --name or --run-dir too, or continue a run by its folder ({example})"
    )


def _newest_run(config: Config, results: Path) -> Path | None:
    stamped = re.compile(rf"{re.escape(task_name(config))}-\d{{8}}-\d{{6}}(-\d+)?")
    folders = [path.parent for path in results.glob("*/events.jsonl")]
    return max((folder for folder in folders if stamped.fullmatch(folder.name)), default=None)


def resume_command(run_dir: str | Path, ray_address: str = "auto") -> str:
    """Return the whole command that continues a run. A local copy is continued in its remote folder."""
    address = "" if ray_address == "auto" else f" --ray-address {shlex.quote(ray_address)}"
    location = remote_of(Path(run_dir)) or location_text(run_dir)
    return f"orchestrator resume {shlex.quote(location)}{address}"


def resume_call(run_dir: str | Path) -> str:
    """Return the Python call that continues a run of a Python object, which no command line can name."""
    location = remote_of(Path(run_dir)) or location_text(run_dir)
    return f"Trainer(..., config=Config.of(resume='auto', run_dir={location!r})).fit()"


def how_to_resume(config: Config, run_dir: str | Path) -> str:
    """Return the words that continue a run: a call for a Python object, else a command."""
    if config.task.startswith("python:"):
        return resume_call(run_dir)
    return resume_command(run_dir, config.parallel.ray_address)


def after_failure(config: Config, run_dir: Path) -> str | None:
    """Return the words that continue a run that has failed; None if it has no checkpoint."""
    from orchestrator.checkpoint.files import step_of

    # Not the events: a worker that fails may have published a checkpoint that no event names.
    found = [step_of(path.name) for path in (run_dir / "checkpoints").iterdir()]
    steps = [step for step in found if step is not None]
    if not steps:
        return None
    return (
        f"the newest checkpoint is of step {max(steps)}; when the cause is removed, "
        f"continue with: {how_to_resume(config, run_dir)}"
    )


def write_remote(run_dir: Path, url: str) -> None:
    """Note in a run folder that it is the local copy of a remote one."""
    (run_dir / REMOTE).write_text(f"{url}\n", encoding="utf-8")


def remote_of(run_dir: Path) -> str | None:
    """Return the address of the remote folder that a run folder is the local copy of."""
    with suppress(OSError, UnicodeDecodeError):
        return first_line(read_regular(run_dir / REMOTE, _MAX_URL_BYTES).decode(), max_chars=None)
    return None


def given_location(path: Path) -> str:
    """Return what the user gave for a checkpoint or a run: its address, if the path is in a copy of it."""
    copy = downloaded_copy(path)
    return (remote_of(copy) if copy is not None else None) or str(path)


def downloaded_copy(path: Path) -> Path | None:
    """Return the copy of a remote checkpoint or run that a path is in; None for any other path."""
    folders = (folder for folder in (path, *path.parents) if folder.name.startswith(DOWNLOADED))
    return next(folders, None)


def new_folder(results: Path, name: str) -> Path:
    """Return a folder that does not exist, with a name and the time."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    suffixes = ["", *(f"-{number}" for number in range(2, _MAX_RUNS_PER_SECOND))]
    candidates = (results / f"{name}-{stamp}{suffix}" for suffix in suffixes)
    return next(path for path in candidates if not path.exists())


def task_name(config: Config) -> str:
    """Return the task as part of a folder's name. The class of a user's task may have any name."""
    name = config.task.rpartition(":")[2].lower()
    return re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:_MAX_NAME_CHARACTERS]


def check_unused(config: Config, run_dir: Path | None) -> None:
    """Refuse a folder that holds a run, unless that run is to be continued."""
    if run_dir is None:
        return
    check_links(run_dir)
    check_unlocked(run_dir)
    resume = config.checkpoint.resume
    is_continued = resume == "auto" or (resume is not None and _is_within(Path(resume), run_dir))
    if not is_continued and holds_run(run_dir):
        raise UserError(
            f"{run_dir} holds a run already; continue it with {how_to_resume(config, run_dir)}, "
            "or choose another --run-dir or --name"
        )


def holds_run(run_dir: Path) -> bool:
    return any(event["event"] == "start" for event in stream_events(run_dir / "events.jsonl"))


def _is_within(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_links(folder: Path) -> None:
    """Refuse a folder with links that lead out of it: the run would write elsewhere.

    Pipes and devices, which have no end, and folders in the place of files are refused too."""
    real_folder = os.path.realpath(folder)
    tracker_folders = [folder / name for name in get_args(Tracker)]
    for parent in (folder, folder / "checkpoints", folder / "logs", folder / "hf", *tracker_folders):
        for path in parent.iterdir() if parent.is_dir() else ():
            target = Path(os.path.realpath(path))
            # Trackers leave links of their own, to files that may be gone by now.
            may_be_missing = parent in tracker_folders
            is_inside = target.is_relative_to(real_folder) and (target.exists() or may_be_missing)
            if path.is_symlink() and not is_inside:
                raise UserError(
                    f"{path} is a link to {target}, which is outside the folder or missing; "
                    "a run writes into its own folder alone. "
                    "Remove the link, or give another --run-dir (which may be a link itself)"
                )
            if not _is_file_or_folder(path):
                raise UserError(
                    f"{path} is not a file or folder that a run writes; remove it, or give another --run-dir"
                )


def _is_file_or_folder(path: Path) -> bool:
    """Whether a path is free, a regular file, or a folder whose name is not that of a file."""
    if not path.exists() or path.is_file():
        return True
    return path.is_dir() and path.suffix not in _FILE_SUFFIXES


def write_summary(run_dir: Path) -> None:
    """Write ``summary.json`` from the events."""
    write_json(run_dir / "summary.json", read_summary(run_dir))


def read_summary(run_dir: Path, held: Sequence[Event] = ()) -> dict[str, Any]:
    """Return the content of ``summary.json``. ``held`` are events that could not be written to the record."""
    path = run_dir / "events.jsonl"
    save_fold(path)
    return summary_of(read_fold(path, held))


def summary_lines(summary: dict[str, Any], run_dir: Path) -> list[str]:
    """Return the end of a run in two lines, for the screen."""
    steps = counted(summary["steps"], "step")
    # A run that --max-steps ends has no other reason than its steps.
    reason = "" if summary["reason"] == f"{steps} done" else f" ({summary['reason']})"
    parts = [steps + reason]
    if summary["validation"]:
        parts += _validation_parts(summary)
    elif summary["train_loss"] is not None:
        parts.append(f"training loss {float(summary['train_loss']):.4f}")
    samples_per_second = summary["samples_per_second"]
    units_per_second = summary["units_per_second"]
    if samples_per_second:
        speed = f"{speed_text(samples_per_second)} samples/s"
        if summary["unit"] != "samples":
            speed += f" ({speed_text(units_per_second)} {summary['unit']}/s)"
        parts.append(speed)
    return [
        f"{summary['status']}: {', '.join(parts)}",
        f"report: {run_dir / 'report.html'}",
    ]


def _validation_parts(summary: dict[str, Any]) -> list[str]:
    """Return the validation result of the final weights, and of the last or the best ones if they differ."""
    final = summary["final"]
    last = summary["last"]
    best = summary["best"]
    parts = [f"validation {_values_text(summary['validation'])}"]
    if final.get("weights") == "last" and final["step"] != last["step"]:
        # An interrupted run is not evaluated once more.
        parts[0] += f" (at step {last['step']})"
    if final.get("weights") == "best" and final["step"] != last["step"]:
        parts.append(f"with the best weights, of step {final['step']}")
        parts.append(f"the last had {_values_text(last)}")
    elif best and best["step"] != last["step"]:
        parts.append(f"best at step {best['step']}: {_values_text(best)}")
        if final:
            parts.append(f"the weights are the last ones ({final['reason']})")
    return parts


def _values_text(values: dict[str, Any]) -> str:
    metrics = {name: float(value) for name, value in values.items() if name != "step"}
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
