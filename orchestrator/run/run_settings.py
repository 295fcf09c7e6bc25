"""The settings of a resumed run: those of its folder, and over them those that were given again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.checkpoint.files import is_checkpoint
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.config.settings import Config, flat_names
from orchestrator.config.writer import flat_values, with_absolute_paths
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.redaction import MASK
from orchestrator.run.plan_file import CONFIG, START_ONLY, read_earlier_model, read_earlier_plan
from orchestrator.run.prepared_run import SettingChange
from orchestrator.run.run_dir import check_links, downloaded_copy, given_location, named_folder
from orchestrator.storage.local_files import open_regular
from orchestrator.types import count_text, flag_of

NOT_TAKEN = START_ONLY | {"ray_address"}
"""Settings never taken from a folder; a run shows the user's token to the cluster that it joins."""
_CHECKPOINTS = "checkpoints"
_MODEL_SECTIONS = ("", "model", "moe")


@dataclass(frozen=True)
class ResumedSettings:
    """The settings of a resumed run, and what differs from its earlier start."""

    folder: Path
    """The run folder that the settings come from."""
    resolved: Resolved
    changes: tuple[SettingChange, ...]


def resume_settings(resolved: Resolved, results: Path) -> ResumedSettings | None:
    """Return the settings of the run that ``--resume`` names; None if there is no earlier start.

    Given settings win; those that would make it a run of another task are refused."""
    config = with_absolute_paths(resolved.config, Path.cwd())
    folder = _earlier_folder(config, results)
    if folder is None or not folder.is_dir():
        return None
    check_links(folder)
    if not (folder / CONFIG).is_file():
        return None
    earlier = read_run_settings(folder)
    before = flat_values(earlier)
    given = {name for name, origin in resolved.origins.items() if origin != "default"}
    check_masked(before, given | NOT_TAKEN, folder / CONFIG)
    now = flat_values(config)
    merged = earlier.but(**{name: now[name] for name in (given & flat_names().keys()) | NOT_TAKEN})
    origins = {name: origin for name, origin in resolved.origins.items() if name in given}
    defaults = flat_values(Config())
    taken = [
        name for name in flat_names() if name not in given | NOT_TAKEN and before[name] != defaults[name]
    ]
    origins |= dict.fromkeys(taken, f"run {_location_of(folder).rpartition('/')[2]}")
    after = flat_values(merged)
    changes = tuple(
        SettingChange(name, before[name], after[name], origins.get(name, "default"))
        for name in flat_names()
        if name not in START_ONLY and before[name] != after[name]
    )
    _check_task(changes, folder)
    return ResumedSettings(folder, Resolved(merged, origins), changes)


def _earlier_folder(config: Config, results: Path) -> Path | None:
    """Return the run folder that ``--resume`` names; None for a checkpoint outside of any."""
    resume = config.checkpoint.resume
    if resume is None:
        return None
    if resume == "auto":
        return named_folder(config, results)
    path = Path(resume)
    if is_checkpoint(path) and path.parent.name == _CHECKPOINTS:
        return path.parent.parent
    return path


def read_run_settings(folder: Path) -> Config:
    """Return the settings of the run in a folder."""
    try:
        # A link leads elsewhere, and a pipe has no end.
        os.close(open_regular(folder / CONFIG))
        return read_file(folder / CONFIG).config
    except (OSError, UserError) as error:
        raise UserError(
            f"the settings of the run in {folder} cannot be read: {error}. "
            f"Repair {CONFIG}, or remove it and give all settings again"
        ) from None


def masked_names(values: Mapping[str, Any]) -> set[str]:
    """Return the settings that a record keeps without the secrets in them."""
    return {name for name, value in values.items() if name in flat_names() and MASK in str(value)}


def check_masked(values: Mapping[str, Any], given: Set[str], record: str | Path) -> None:
    """Raise UserError unless each masked setting of a record is given again: a mask is no value."""
    missing = sorted(masked_names(values) - given)
    if missing:
        raise UserError(
            f"{record} keeps {missing[0]} without the secret in it; "
            f"give it again, as {flag_of(missing[0])} VALUE"
        )


def _check_task(changes: Sequence[SettingChange], folder: Path) -> None:
    for change in changes:
        # The name of a Python object says nothing; the model's structure is compared instead.
        are_objects = str(change.before).startswith("python:") and str(change.now).startswith("python:")
        if change.name == "task" and not are_objects and has_checkpoints(folder):
            raise UserError(
                f"the run in {folder} trains the task {change.before}, and {change.now} is given "
                f"({change.origin}); leave it out, or begin another run with another --name or --run-dir"
            )


def has_checkpoints(folder: Path) -> bool:
    return is_checkpoint(folder) or bool(CheckpointStore(folder / _CHECKPOINTS, repair=False).newest_first())


# --- the model and the plan of the earlier start


def all_changes(
    resumed: ResumedSettings | None, facts: ModelFacts, global_batch: int
) -> tuple[SettingChange, ...]:
    """Return the differences from the earlier start of a resumed run; another model is refused."""
    if resumed is None:
        return ()
    earlier = read_earlier_model(resumed.folder)
    _check_same_model(resumed, earlier, facts)
    earlier_batch = read_earlier_plan(resumed.folder).get("global_batch_size", global_batch)
    changes = [*resumed.changes, *_data_changes(earlier, facts)]
    if earlier_batch != global_batch:
        changes.append(SettingChange("global batch", earlier_batch, global_batch, "the plan"))
    return tuple(changes)


def _check_same_model(resumed: ResumedSettings, earlier: Mapping[str, Any], facts: ModelFacts) -> None:
    """Raise UserError if the checkpoints of the run do not fit the model.

    ``earlier`` are the facts of the model of the earlier start; a damaged plan has none."""
    structure = earlier.get("structure")
    if not structure or structure == facts.structure or not has_checkpoints(resumed.folder):
        return
    of_model = [change for change in resumed.changes if flat_names()[change.name] in _MODEL_SECTIONS]
    difference = ", ".join(change.text() for change in of_model)
    advice = "leave that out"
    if not of_model:
        parameters = earlier.get("parameters")
        before = count_text(parameters) if isinstance(parameters, int) else "other"
        difference = f"{before} parameters before, {count_text(facts.parameters)} now"
        advice = "give the model that it was started with"
    raise UserError(
        f"the run in {resumed.folder} has another model ({difference}), and its checkpoints do not fit; "
        f"{advice}, or begin another run with another --name or --run-dir"
    )


def _data_changes(earlier: Mapping[str, Any], facts: ModelFacts) -> list[SettingChange]:
    samples = earlier.get("samples")
    if isinstance(samples, int) and facts.samples not in (None, samples):
        return [SettingChange("training samples", samples, facts.samples, "the task's data")]
    if earlier.get("data") and facts.data and earlier["data"] != facts.data:
        name = "the hash of the first training samples"
        return [SettingChange(name, earlier["data"], facts.data, "the task's data")]
    return []


def resume_lines(
    resumed: ResumedSettings | None, changes: Sequence[SettingChange], resume: str | None
) -> list[str]:
    """Return lines for the screen: where the settings come from, and what differs."""
    if resumed is not None:
        first = f"resuming with the settings of {_location_of(resumed.folder)}/{CONFIG}"
        return [first, *(f"changed: {change.text()}" for change in changes)]
    if resume == "auto":
        return ["no earlier start in this folder: a new run begins with the settings given"]
    if resume is None:
        return []
    return [f"there are no settings beside {given_location(Path(resume))}: those given hold"]


def _location_of(folder: Path) -> str:
    """Return a run folder as people know it: its address, if it is the copy of a remote one."""
    if downloaded_copy(folder) is None:
        return str(folder)
    # The address that was given may be that of a checkpoint of the run.
    return given_location(folder).partition(f"/{_CHECKPOINTS}/")[0]
