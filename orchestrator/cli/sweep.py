"""``orchestrator sweep``: compare settings in short trials, or continue a sweep from its ledger."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Space
from orchestrator.config.sweep.space_parser import parse_space, read_space
from orchestrator.config.sweep.sweep import Search, Sweep, as_mapping, config_from_ledger
from orchestrator.config.writer import flat_values
from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import results_folder
from orchestrator.record.files.ledger import SETTINGS_NOT_KEPT, holds_sweep, read_sweep_record
from orchestrator.storage.address import refuse_address
from orchestrator.sweeps import check_new
from orchestrator.types import flag_of


@dataclass(frozen=True)
class SweepOptions:
    """Compare settings in short trials, and write tables of how they scale.

    An interrupted sweep continues with 'orchestrator resume FOLDER', or --resume auto for the newest,
    without the other flags: its settings are in the ledger, and finished trials count.
    """

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    sweep: tuple[str, ...] = ()
    """The space, setting by setting: precision=fp32,bf16 batch-size=16..256:x2
    accumulation-steps=1..4:1 learning-rate=1e-4..1e-2:log."""
    space: Path | None = None
    """The same as a YAML file: a mapping of settings to lists, values or ranges; or a list of points."""
    search: Search | None = None
    """grid tries every combination; random and optuna try --trials of them. optuna begins at the
    plan's choice and learns from each trial: by its Gaussian process (GPSampler) if the space
    has lists of values only, by TPESampler if it has ranges. Default: grid, or random with
    --trials."""
    trials: int | None = None
    """Number of trials, those of an earlier start included."""
    objective: str = "throughput"
    """What makes a trial better: throughput (samples per second); or, after --trial-steps,
    validation_loss or any validation metric: accuracy, or churn:min for one without a known
    direction."""
    asha: bool = False
    """Stop trials early that are clearly worse than others at the same point (asynchronous
    successive halving)."""
    trial_seconds: float = 10.0
    """Longest measurement of a trial, in seconds; it ends when the throughput is known to 3 %."""
    trial_steps: int | None = None
    """Steps that a trial trains, with --objective validation_loss or a metric. Default: the whole
    run."""
    concurrent: int | None = None
    """Trials at a time. Default: as many as fit on the devices."""


_SWEEP_FIELDS = ("trials", "objective", "asha", "trial_seconds", "trial_steps")


def run(argv: Sequence[str]) -> int:
    options, resolved = read_flags(SweepOptions, argv, "orchestrator sweep")
    # After the flags: ``--help`` ends in there, and does not pay for this import.
    from orchestrator.trainer import Trainer

    folder = _resumed_folder(resolved.config)
    if folder is None:
        sweep = _requested_sweep(options)
        check_new(resolved.config)
        Trainer(config=resolved).sweep(sweep)
        return 0
    return continue_sweep(folder, options, resolved)


def _requested_sweep(options: SweepOptions) -> Sweep:
    search = options.search or ("random" if options.trials is not None else "grid")
    values = {name: getattr(options, name) for name in (*_SWEEP_FIELDS, "concurrent")}
    return Sweep(_requested_space(options), search, **values)


def _requested_space(options: SweepOptions) -> Space:
    if options.space is not None and options.sweep:
        raise UserError("--space and --sweep were both given; put all settings into one of them")
    return read_space(options.space) if options.space is not None else parse_space(options.sweep)


# --- continuing a sweep


def continue_sweep(folder: Path, options: SweepOptions, resolved: Resolved) -> int:
    """Continue a sweep with the settings in its ledger; UserError for others that are given."""
    from orchestrator.run.run_settings import check_masked, masked_names
    from orchestrator.trainer import Trainer

    settings = as_mapping(read_sweep_record(folder).header.get("settings")) if holds_sweep(folder) else {}
    masked = masked_names(settings)
    _check_resumed(options, resolved, masked)
    record = read_sweep_record(folder)
    given = {name for name, origin in resolved.origins.items() if origin != "default"}
    check_masked(settings, given, f"the ledger of {folder}")
    values = flat_values(resolved.config)
    again = {name: values[name] for name in (*masked, "ray_address", "resource_timeout")}
    kept = {name: value for name, value in settings.items() if name not in masked}
    config = config_from_ledger(kept).but(**again)
    Trainer(config=config).sweep(Sweep.of_header(record.header, options.concurrent), resume=folder)
    return 0


def _resumed_folder(config: Config) -> Path | None:
    """Return the folder of the sweep to continue; None for a new one."""
    resume = config.checkpoint.resume
    refuse_address("--resume of a sweep", resume)
    if resume is None:
        return None
    if resume != "auto":
        return Path(resume)
    if config.run.run_dir is not None:
        return config.run.run_dir
    if config.run.name is not None:
        return results_folder() / config.run.name
    folders = [path.parent for path in results_folder().glob("sweep-*/sweep.jsonl")]
    if not folders:
        raise UserError(
            f"--resume auto: there is no sweep in {results_folder()}; name its folder: --resume FOLDER"
        )
    # A folder's name ends with the time of its start: sweep-TASK-20261116-101500.
    return max(folders, key=lambda folder: folder.name[-15:])


def _check_resumed(options: SweepOptions, resolved: Resolved, masked: Set[str]) -> None:
    """Raise UserError for settings given again: rows of other settings would not compare.

    Settings that the ledger keeps masked must be given again.
    """
    defaults = SweepOptions(settings=options.settings)
    names = ("sweep", "space", "search", *_SWEEP_FIELDS)
    changed = [name for name in names if getattr(options, name) != getattr(defaults, name)]
    changed += [
        name
        for name, origin in resolved.origins.items()
        if name not in SETTINGS_NOT_KEPT | masked and origin != "default"
    ]
    if changed:
        flags = ", ".join(map(flag_of, changed))
        raise UserError(
            "a resumed sweep continues with the settings it began with; "
            f"leave out {flags}, or begin another sweep"
        )
