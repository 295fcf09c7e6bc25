"""The verb ``sweep``, and the best row of one for ``train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.config.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.space import Space, parse_space, point_flags, read_space
from orchestrator.config.sweep import Objective, Search, Sweep, restored
from orchestrator.errors import UserError
from orchestrator.plan.hardware import results_folder
from orchestrator.record.ledger import Row, SweepRecord, read_sweep
from orchestrator.sweeping import OWN_SETTINGS


@dataclass(frozen=True)
class SweepOptions:
    """Try settings against each other, and leave tables of how they scale."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    sweep: tuple[str, ...] = ()
    """The space, setting by setting: precision=fp32,bf16 batch-size=16..256:x2 accumulation-steps=1..4:1 learning-rate=1e-4..1e-2:log."""
    space: Path | None = None
    """The same as a YAML file: a mapping of settings to lists, values or ranges; or a list of points."""
    search: Search | None = None
    """grid tries every combination; random and optuna try --trials of them, optuna those that promise most. Default: grid, or
    random where --trials is given."""
    trials: int | None = None
    """Trials to be made in all."""
    objective: Objective = "throughput"
    """What makes a trial better: samples per second, or the validation loss after --trial-steps."""
    asha: bool = False
    """Stop trials early that are clearly worse than others at the same point (asynchronous successive halving)."""
    trial_seconds: float = 10.0
    """Seconds that a trial is measured at most; it ends when the throughput is known to 3 %."""
    trial_steps: int | None = None
    """Steps that a trial trains, with --objective validation_loss. Default: the whole run."""
    concurrent: int | None = None
    """Trials at a time. Default: as many as the devices have room for."""


def sweep(options: SweepOptions, resolved: Resolved) -> int:
    """Make the trials, and leave a report."""
    from orchestrator.trainer import Trainer

    folder = _resumed(resolved.config)
    if folder is None:
        asked = Sweep(_space(options), _search(options), *(getattr(options, name) for name in _ASKED))
        Trainer(config=resolved).sweep(asked)
    else:
        _check_resumed(options, resolved)
        resume_sweep(folder, resolved, options.concurrent)
    return 0


_ASKED = ("trials", "objective", "asha", "trial_seconds", "trial_steps", "concurrent")


def _space(options: SweepOptions) -> Space:
    if options.space is not None and options.sweep:
        raise UserError("--space and --sweep were both given; put all settings into one of them")
    return read_space(options.space) if options.space is not None else parse_space(options.sweep)


def _search(options: SweepOptions) -> Search:
    return options.search or ("random" if options.trials is not None else "grid")


def _resumed(config: Config) -> Path | None:
    """The folder of the sweep that is to go on; None for a new one."""
    resume = config.checkpoint.resume
    if resume is None:
        return None
    if resume != "auto":
        return Path(resume)
    if config.run.run_dir is not None or config.run.name is not None:
        return config.run.run_dir or results_folder() / str(config.run.name)
    found = sorted((path.parent for path in results_folder().glob("sweep-*/sweep.jsonl")), key=lambda path: path.name[-15:])
    if not found:
        raise UserError(f"--resume auto: there is no sweep in {results_folder()}; name its folder: --resume FOLDER")
    return found[-1]


def _check_resumed(options: SweepOptions, resolved: Resolved) -> None:
    """A sweep goes on with the settings it was begun with: rows of others would not compare."""
    plain = SweepOptions(settings=options.settings)
    changed = [name for name in ("sweep", "space", "search", "trials", "objective", "asha", "trial_seconds", "trial_steps")
               if getattr(options, name) != getattr(plain, name)]  # fmt: skip
    changed += [name for name, origin in resolved.origins.items() if name not in OWN_SETTINGS and origin != "default"]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UserError(f"a resumed sweep goes on with the settings it was begun with; leave out {flags}, or begin another sweep")


def resume_sweep(folder: Path, resolved: Resolved, concurrent: int | None) -> SweepRecord:
    """Go on with a sweep where its ledger ends."""
    from orchestrator.trainer import Trainer

    record = read_sweep(folder)
    settings = record.header.get("settings")
    config = restored(settings if isinstance(settings, Mapping) else {})
    config = config.but(ray_address=resolved.config.parallel.ray_address, resource_timeout=resolved.config.parallel.resource_timeout)
    return Trainer(config=config).sweep(Sweep.of_header(record.header, concurrent), resume=folder)


# --- the best row, for train


def tuned(folder: Path, resolved: Resolved, devices: int) -> tuple[Resolved, str]:
    """The settings with those of the best trial of a sweep that ``devices`` are enough for, where nothing else is given; and what
    was taken, in words."""
    record = read_sweep(folder)
    row = _best_that_fits(record, devices)
    given = {name for name, origin in resolved.origins.items() if origin.startswith("flag")}
    settings = record.header.get("settings")
    swept_with = dict(settings) if isinstance(settings, Mapping) else {}
    taken = {name: value for name, value in (swept_with | dict(row.point)).items() if name not in given}
    _check_task(folder, record, resolved, given)
    taken |= {"workers": row.workers} if row.workers and row.workers > 1 and "workers" not in given else {}
    origins = dict(resolved.origins) | dict.fromkeys(taken, f"sweep {folder.name}, trial {row.trial}")
    figure = f"{row.samples_per_second:,.0f} samples/s" if row.samples_per_second else f"validation loss {row.validation_loss}"
    return Resolved(
        resolved.config.but(**taken), origins
    ), f"settings of trial {row.trial} of {folder}: {' '.join(point_flags(row.point))} ({figure})"


def _check_task(folder: Path, record: SweepRecord, resolved: Resolved, given: set[str]) -> None:
    if "task" in given and resolved.config.task != record.header.get("task"):
        raise UserError(
            f"--tuned {folder} is a sweep of {record.header.get('task')}, and --task {resolved.config.task} is another; "
            "sweep over that one, or leave --tuned out"
        )


def _best_that_fits(record: SweepRecord, devices: int) -> Row:
    if record.best() is None:
        raise UserError(f"--tuned {record.folder}: none of its {len(record.rows)} trials completed; see its report.html")
    fitting = replace(record, rows=tuple(row for row in record.rows if (row.workers or 1) <= devices)).best()
    if fitting is None:
        least = min(row.workers or 1 for row in record.rows if row.status == "completed")
        raise UserError(
            f"--tuned {record.folder}: its trials need {least} devices or more; there are {devices} here. "
            "Sweep anew with --sweep workers=1,2"
        )
    return fitting
