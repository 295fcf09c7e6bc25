"""Settings that a run can take: those that its task reads, and those of the run's own optimizer and schedule.

A task reads its settings from the config that it is made with. The reads are recorded while the task is
made, its data opened, its model built and its loss traced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from orchestrator.config.sections.data import DataSettings
from orchestrator.config.sections.model import ModelSettings, MoeSettings
from orchestrator.config.sections.optim import OptimSettings
from orchestrator.config.settings import Config, as_flag_text
from orchestrator.errors import UserError

_OPTIMIZER = ("optimizer", "learning_rate", "weight_decay", "decay_biases", "betas", "eps", "momentum")
_SCHEDULE = ("schedule", "warmup_steps")
_DATA_OF_TASKS = tuple(
    f.name for f in fields(DataSettings) if f.name not in ("skip_bad", "shuffle_buffer", "loader_workers")
)
"""The run itself reads the other settings of data."""
_OF_TASKS = frozenset(f.name for kind in (ModelSettings, MoeSettings) for f in fields(kind)) | {
    *_DATA_OF_TASKS,
    *_OPTIMIZER,
    *_SCHEDULE,
}


class _Watched:
    """A section of settings that records which of its fields are read."""

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in values and "_reads" in values:
            values["_reads"].add(name)
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        return _plain(self) == _plain(other)

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __reduce__(self) -> Any:
        # A copy in another process is plain: this process would not see its reads.
        plain = _plain(self)
        return type(plain), tuple(vars(plain).values())


class _WatchedModel(_Watched, ModelSettings): ...


class _WatchedMoe(_Watched, MoeSettings): ...


class _WatchedData(_Watched, DataSettings): ...


class _WatchedOptim(_Watched, OptimSettings): ...


_WATCHED = {"model": _WatchedModel, "moe": _WatchedMoe, "data": _WatchedData, "optim": _WatchedOptim}


def watched(config: Config) -> tuple[Config, set[str]]:
    """Return the config with sections that record their reads, and the set that receives the names."""
    reads: set[str] = set()
    sections: dict[str, Any] = {name: kind(**vars(getattr(config, name))) for name, kind in _WATCHED.items()}
    copy = replace(config, **sections)
    for section in sections.values():
        object.__setattr__(section, "_reads", reads)
    object.__setattr__(copy, "_given", config.given)
    return copy, reads


def _plain(section: Any) -> Any:
    """Return a section without the record of its reads."""
    if not isinstance(section, _Watched):
        return section
    values = {name: value for name, value in vars(section).items() if name != "_reads"}
    return type(section).__bases__[1](**values)


def settings_taken(task: Any, own_optimizer: bool, own_schedule: bool) -> frozenset[str]:
    """Return the names of the settings of the task, its optimizer and its schedule that a run can take."""
    taken = set(getattr(task, "settings_read", None) or ())
    taken |= set() if own_optimizer else {*_OPTIMIZER}
    taken |= set() if own_schedule else {*_SCHEDULE}
    return frozenset(taken & _OF_TASKS)


def check_settings_taken(config: Config, task: Any, taken: Collection[str]) -> None:
    """Raise UserError for a setting that differs from its default and that nothing reads.

    A task object that was made elsewhere, and names no settings, may have read any of them then."""
    unread = _changed(config).keys() - set(taken)
    if getattr(task, "settings_read", None) is None:
        unread &= {*_OPTIMIZER, *_SCHEDULE}
    if unread:
        raise UserError(_unread_text(config, sorted(unread)))


def check_sweep_taken(task: str, varied: Collection[str], taken: Collection[str]) -> None:
    """Raise UserError for a swept setting that nothing reads: all its values give the same run.

    The object of a Python task is made once, before the trials, whatever its class reads."""
    if task.startswith("python:"):
        taken = {*taken} & {*_OPTIMIZER, *_SCHEDULE}
    for name in sorted(set(varied) & _OF_TASKS - set(taken)):
        raise UserError(
            f"{name} is swept, but the task {task} does not read it: trials would differ by noise alone; "
            "leave it out"
        )


def _changed(config: Config) -> Mapping[str, Any]:
    """Return the settings of tasks whose value is not the default."""
    default = Config()
    values = {name: config.value_of(name) for name in _OF_TASKS}
    return {name: value for name, value in values.items() if value != default.value_of(name)}


def _unread_text(config: Config, names: list[str]) -> str:
    values = _changed(config)
    given = ", ".join(f"{name} {as_flag_text(values[name])}" for name in names)
    verb, pronoun = ("has", "it") if len(names) == 1 else ("have", "them")
    message = f"{given} {verb} no effect: the task {config.task} does not read {pronoun}; leave {pronoun} out"
    if config.task.startswith("python:"):
        return f"{message}, or let the class of the task name {pronoun}: settings_read = {tuple(names)}"
    return message
