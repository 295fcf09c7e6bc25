"""The verb ``sweep``, and the best row of one for ``train``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config.reader import Resolved, to_json
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.space import Space, parse_space, plain_point, point_flags, read_space
from orchestrator.config.sweep import Objective, Search, Sweep, as_mapping, flat_values, restored
from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import results_folder
from orchestrator.record.ledger import TrialRow, SweepRecord, holds_sweep, read_sweep_record
from orchestrator.redaction import MASK
from orchestrator.sweeps import OWN_SETTINGS, check_new


@dataclass(frozen=True)
class SweepOptions:
    """Try settings against each other, and leave tables of how they scale. A sweep that was broken off goes on with --resume FOLDER
    (its own folder; auto takes the newest), without the other flags: its settings are in the ledger, and trials that are made stand."""

    settings: Config
    config: Path | None = None
    """YAML file with settings; flags win over it."""
    sweep: tuple[str, ...] = ()
    """The space, setting by setting: precision=fp32,bf16 batch-size=16..256:x2 accumulation-steps=1..4:1 learning-rate=1e-4..1e-2:log."""
    space: Path | None = None
    """The same as a YAML file: a mapping of settings to lists, values or ranges; or a list of points."""
    search: Search | None = None
    """grid tries every combination; random and optuna try --trials of them, optuna those that promise most (of ranges by Optuna's own
    sampler, of lists of values by a model for few trials). Default: grid, or random where --trials is given."""
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
        check_new(resolved.config)
        Trainer(config=resolved).sweep(asked)
    else:
        _check_resumed(
            options, resolved, hidden_settings(read_sweep_record(folder)) if holds_sweep(folder) else frozenset()
        )
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
    found = sorted(
        (path.parent for path in results_folder().glob("sweep-*/sweep.jsonl")),
        key=lambda path: path.name[-15:],
    )
    if not found:
        raise UserError(
            f"--resume auto: there is no sweep in {results_folder()}; name its folder: --resume FOLDER"
        )
    return found[-1]


def _check_resumed(options: SweepOptions, resolved: Resolved, hidden: Set[str]) -> None:
    """A sweep goes on with the settings it was begun with: rows of others would not compare. Those that the ledger keeps masked are
    given again."""
    plain = SweepOptions(settings=options.settings)
    changed = [name for name in ("sweep", "space", "search", "trials", "objective", "asha", "trial_seconds", "trial_steps")
               if getattr(options, name) != getattr(plain, name)]  # fmt: skip
    changed += [
        name
        for name, origin in resolved.origins.items()
        if name not in OWN_SETTINGS | hidden and origin != "default"
    ]
    if changed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UserError(
            f"a resumed sweep goes on with the settings it was begun with; leave out {flags}, or begin another sweep"
        )


def resume_sweep(folder: Path, resolved: Resolved, concurrent: int | None) -> SweepRecord:
    """Go on with a sweep where its ledger ends."""
    from orchestrator.trainer import Trainer

    record = read_sweep_record(folder)
    kept, hidden = as_mapping(record.header.get("settings")), hidden_settings(record)
    check_given(hidden, folder, resolved)
    again = flat_values(resolved.config)
    given = {name: again[name] for name in (*hidden, "ray_address", "resource_timeout")}
    config = restored({name: value for name, value in kept.items() if name not in hidden}).but(**given)
    return Trainer(config=config).sweep(Sweep.of_header(record.header, concurrent), resume=folder)


def hidden_settings(record: SweepRecord) -> Set[str]:
    """The settings that the ledger keeps without the secrets in them."""
    return _hidden(as_mapping(record.header.get("settings")))


def _hidden(settings: Mapping[str, Any]) -> Set[str]:
    return {name for name, value in settings.items() if name in flat_names() and MASK in str(value)}


def check_given(hidden: Iterable[str], folder: Path, resolved: Resolved) -> None:
    """A mask is no value: what it stands for must be given again."""
    missing = [name for name in sorted(hidden) if not resolved.origin(name).startswith("flag")]
    if missing:
        flag = missing[0].replace("_", "-")
        raise UserError(
            f"the ledger of {folder} keeps {missing[0]} without the secret in it; give it again, as --{flag} VALUE"
        )


# --- the best row, for train


def tuned(
    folder: Path, resolved: Resolved, devices: Callable[[Config], tuple[str, int]]
) -> tuple[Resolved, str]:
    """The settings with those of the best trial of a sweep that fits what is here, where no flag says otherwise; and what was taken,
    in words. ``devices`` says what a run with some settings could have: ``gpu`` or ``cpu``, and how many."""
    record = read_sweep_record(folder)
    flags = {name for name, origin in resolved.origins.items() if origin.startswith("flag")}
    task = str(record.header.get("task", ""))
    if task.startswith("python:"):
        raise UserError(
            f"--tuned {folder} was swept in Python, over an object that no command line can name ({task}); its report.html has the line of "
            "Python that trains with the best settings"
        )
    if "task" in resolved.origins and resolved.config.task != task:
        raise UserError(
            f"--tuned {folder} is a sweep of {task}, and {resolved.config.task} is to be trained; sweep over that one, or leave --tuned out"
        )
    base = {"task": task, **as_mapping(record.header.get("settings"))}
    asked = resolved.config.parallel.workers if "workers" in flags else None
    config = resolved.config.but(**{name: value for name, value in base.items() if name not in flags})
    row, passed_over = _best_that_fits(record, *devices(config), asked)
    offered = {**base, **row.point, "workers": row.workers or 1}
    taken = {name: value for name, value in offered.items() if name not in flags}
    check_given(_hidden(taken), folder, resolved)
    origins = dict(resolved.origins) | dict.fromkeys(taken, f"sweep {folder.name}, trial {row.trial}")
    made = resolved.config.but(**taken)
    words = [
        f"settings of trial {row.trial} of {folder}: {' '.join(point_flags(row.point))} ({_figure(row, record)})"
    ]
    return Resolved(made, origins), "\n".join([*words, *passed_over, *_differing(resolved, made, offered)])


def _figure(row: TrialRow, record: SweepRecord) -> str:
    by_loss = record.objective == "validation_loss" or not row.samples_per_second
    return f"validation loss {row.validation_loss}" if by_loss else f"{row.samples_per_second:,.0f} samples/s"


def _differing(resolved: Resolved, made: Config, offered: Mapping[str, Any]) -> list[str]:
    """Which flags of the user's won over the row, and which settings of the user's file gave way to it."""
    flat, mine, theirs = flat_names(), to_json(made), to_json(resolved.config)
    won, gave_way = [], []
    for name, value in offered.items():
        section, origin = flat.get(name, ""), resolved.origin(name)
        used, asked = (tree[section][name] if section else tree[name] for tree in (mine, theirs))
        if origin.startswith("flag") and used != plain_point({name: value})[name]:
            won.append(f"{' '.join(point_flags({name: used})) or f'no {name}'} over {value}")
        elif origin.startswith("file") and used != asked:
            gave_way.append(f"{name} {asked} ({origin}) to {used}")
    told = [f"your flags won, so it is not the trial that was measured: {', '.join(won)}"] if won else []
    return told + (
        [f"settings of your file gave way: {', '.join(gave_way)}; give them as flags to keep them"]
        if gave_way
        else []
    )


def _best_that_fits(
    record: SweepRecord, kind: str, count: int, asked: int | str | None
) -> tuple[TrialRow, list[str]]:
    """The row, and a line about a better one that was passed over, where there is one."""
    where, cores = record.header.get("kind"), record.header.get("cores_per_worker")
    if where != kind:
        raise UserError(
            f"--tuned {record.folder} was swept on {where}s, and this run has {kind}s: its figures mean nothing here; sweep anew"
        )
    devices = count // cores if kind == "cpu" and isinstance(cores, int) and cores > 0 else count
    best = record.best()
    if best is None:
        raise UserError(
            f"--tuned {record.folder}: none of its {len(record.rows)} trials completed; see its report.html"
        )
    wanted = [
        row
        for row in record.rows
        if (row.workers or 1) <= devices and (not isinstance(asked, int) or row.workers == asked)
    ]
    fitting = replace(record, rows=tuple(wanted)).best()
    if fitting is None:
        tried = sorted({row.workers or 1 for row in record.rows if row.status == "completed"})
        numbers = ", ".join(str(number) for number in tried)
        need = (
            f"--workers {asked}"
            if isinstance(asked, int) and asked <= devices
            else f"{devices} device{'s' * (devices != 1)}"
        )
        raise UserError(
            f"--tuned {record.folder}: its completed trials have {numbers} workers, and none fits {need}; sweep anew"
        )
    if fitting is best:
        return fitting, []
    here = f"{devices} device{'s are' if devices != 1 else ' is'} here"
    why = f"--workers {asked} was asked for" if (best.workers or 1) <= devices else here
    return fitting, [
        f"passed over trial {best.trial} ({_figure(best, record)}): it has {best.workers or 1} workers, and {why}"
    ]
