"""Callbacks: the user's own code at the start, steps, evaluations, checkpoints, failures and end of a run.

They run in the process that called ``fit``: the process that trains, or the driver of several workers.
So they survive the loss of any worker and keep their state. They receive frozen values made from the
events of the run, and answer with a ``Request``. Only ``on_model`` runs where the model is: in the process
that trains, or in that of the main worker, on a copy of the callback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config.names.nearest import did_you_mean
from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.live.callbacks.callback_values import (
    HOOKS,
    CheckpointInfo,
    EndInfo,
    EvaluationInfo,
    FailureInfo,
    ModelInfo,
    ModelMoment,
    RunInfo,
    StartInfo,
    StepInfo,
    callback_value,
)
from orchestrator.record.events import kinds
from orchestrator.record.events.kinds import End, Event, Start
from orchestrator.record.files.log import Emit, ignore_event
from orchestrator.tasks.named_object import make_named_object
from orchestrator.tasks.user_code import describe

_MODEL_HOOK = "on_model"
"""The method that no event calls: the loop does, between two steps."""
_KNOWN_HOOKS = (*(hook for hook, _ in HOOKS.values()), _MODEL_HOOK)
_Method = tuple[str, Callable[..., Any]]
"""A method of a callback, and its name."""


@dataclass(frozen=True)
class Request:
    """The answer of a callback: what the run is to do.

    All workers carry it out at the same step, the next one at which they agree."""

    stop: str | None = None
    """End the run, for this reason; it is evaluated and saved like a run that is complete."""
    save: bool = False
    """Save a checkpoint."""
    log: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the event log and the trackers."""

    def __post_init__(self) -> None:
        if self.stop is not None and (not isinstance(self.stop, str) or not self.stop.strip()):
            raise UserError(f"Request(stop={self.stop!r}): stop is the reason in words, or None")
        bad = [name for name, value in self.log.items() if not _is_number(value)]
        if bad:
            raise UserError(f"Request(log=...): {bad[0]!r} is {self.log[bad[0]]!r}; a number was needed")


def _is_number(value: Any) -> bool:
    """Return whether a value is one number: a tensor of several elements is none, and no bool."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return not isinstance(value, bool)


class Callback:
    """Base of callbacks; override the methods you need. Each may return a ``Request``."""

    def on_start(self, start: StartInfo) -> Request | None:
        """Called once, before the first step."""

    def on_step(self, step: StepInfo) -> Request | None:
        """Called after each step, in order, when its figures are known: every few steps for those since
        then. A step that is repeated after a recovery is reported again."""

    def on_evaluate(self, evaluation: EvaluationInfo) -> Request | None:
        """Called after each evaluation on the validation data."""

    def on_checkpoint(self, checkpoint: CheckpointInfo) -> Request | None:
        """Called when a checkpoint is safe on disk."""

    def on_failure(self, failure: FailureInfo) -> Request | None:
        """Called after each failure: one that the run recovers from, or the final one."""

    def on_end(self, end: EndInfo) -> None:
        """Called once, after the last step, also after a failure."""

    def on_model(self, moment: ModelInfo, model: Any) -> Request | None:
        """Called between two steps with the model (an ``nn.Module``), to look at and not to change: after
        each step and each evaluation, and when a checkpoint has copied the state. On several workers the
        main one calls it, on a copy of the callback."""


def as_callbacks(given: Any) -> list[Any]:
    """Return the callbacks of a Python program as a list."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"callbacks is {given!r}; a list of objects is needed: callbacks=[StopWhenGood(0.3)]")
    return list(given)


def load_callbacks(config: Config, given: Iterable[Any] = ()) -> list[Any]:
    """Return the callbacks of a run: ``given`` objects, then those that the settings name."""
    callbacks = list(given)
    callbacks += [make_named_object("callback", name, config) for name in config.watch.callbacks]
    for callback in callbacks:
        _check_callback(callback)
    return callbacks


def _check_callback(callback: Any) -> None:
    """Raise UserError for an object that no hook can reach: a class, or one with a misspelt method."""
    if isinstance(callback, type):
        raise UserError(f"callbacks has the class {callback.__name__}; give an object: {callback.__name__}()")
    hooks = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in hooks if name not in _KNOWN_HOOKS]
    if unknown or not hooks:
        found = f"has {unknown[0]!r}" if unknown else "has no method of a callback"
        near = did_you_mean(unknown[0], _KNOWN_HOOKS) if unknown else ""
        raise UserError(
            f"the callback {type(callback).__name__} {found}{near}; its methods may be "
            f"{', '.join(_KNOWN_HOOKS)}"
        )


def _own_method(callback: Any, hook: str) -> Callable[..., Any] | None:
    """Return a method of a callback. None for one that it inherits from the base, which does nothing."""
    method = getattr(callback, hook, None)
    is_inherited = getattr(method, "__func__", None) is getattr(Callback, hook)
    return None if is_inherited else method


def callbacks_of_model(config: Config, callbacks: Sequence[Any]) -> list[Any]:
    """Return those of ``load_callbacks`` that look at the model: the name of one that the settings name,
    else the object."""
    num_given = len(callbacks) - len(config.watch.callbacks)
    sources = [*callbacks[:num_given], *config.watch.callbacks]
    pairs = zip(sources, callbacks, strict=True)
    return [source for source, callback in pairs if _own_method(callback, _MODEL_HOOK) is not None]


class CallbackRunner:
    """Calls the callbacks of a run with its events, and collects their requests.

    It is a listener of the event log. It never raises: ``check`` does, if errors are to end the run."""

    def __init__(self, callbacks: Iterable[Any], raise_errors: bool = False) -> None:
        self.callbacks = list(callbacks)
        self._methods: dict[type[Event], list[_Method]] = {}
        self._model_methods = self._methods_of(_MODEL_HOOK)
        for kind, (hook, _) in HOOKS.items():
            methods = self._methods_of(hook)
            if methods:
                self._methods[kind] = methods
        self._raise_errors = raise_errors
        self._errors: Counter[str] = Counter()
        self._first_error: TaskFailed | None = None
        self._run: RunInfo | None = None
        self._write: Emit = ignore_event
        self._has_started = False
        self._has_ended = False
        self._saves_taken = 0
        self.stop_reason: str | None = None
        """The reason of the first request to stop."""
        self.num_saves = 0
        """Requests for a checkpoint so far."""

    def bind(self, run_dir: Path, config: Config, write: Emit) -> None:
        """Set the run whose events are to come. ``write`` appends an event to its record."""
        self._run = RunInfo(run_dir, config)
        self._write = write

    def write_to(self, write: Emit) -> None:
        """Write to another record of the same run from now on."""
        self._write = write

    def __call__(self, event: Event) -> None:
        is_start = isinstance(event, Start)
        is_end = isinstance(event, End)
        methods = self._methods.get(type(event))
        # Workers that restart after a failure write another start. An error of a callback in the last
        # moment makes a failure of a run that has ended already.
        is_repeated = (is_start and self._has_started) or (is_end and self._has_ended)
        self._has_started |= is_start
        self._has_ended |= is_end
        if methods is not None and self._run is not None and not is_repeated:
            value = callback_value(event, self._run)
            for name, method in methods:
                self._call(name, method, value)
        if is_end and not is_repeated:
            self.report_repeated_errors()

    @property
    def sees_model(self) -> bool:
        """Whether a callback looks at the model."""
        return bool(self._model_methods)

    def show_model(self, model: Any, step: int, epoch: int, after: ModelMoment) -> None:
        """Call ``on_model`` of all callbacks. Raise the first error, if errors are to end the run."""
        if self._run is None:
            return
        moment = ModelInfo(self._run.run_dir, self._run.config, step, epoch, after)
        for name, method in self._model_methods:
            self._call(name, method, moment, model)
        self.check()

    def take_save(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        is_asked = self.num_saves > self._saves_taken
        self._saves_taken = self.num_saves
        return is_asked

    def check(self) -> None:
        """Raise the first error of a callback, if errors are to end the run."""
        error = self._first_error
        self._first_error = None
        if error is not None and self._raise_errors:
            raise error

    def _methods_of(self, hook: str) -> list[_Method]:
        methods = [_own_method(callback, hook) for callback in self.callbacks]
        return [(getattr(method, "__qualname__", repr(method)), method) for method in methods if method]

    def _call(self, name: str, method: Callable[..., Any], value: Any, *more: Any) -> None:
        try:
            answer = method(value, *more)
            if answer is not None and not isinstance(answer, Request):
                raise UserError(f"{name} returned {answer!r}; a Request or None was needed")
        except (Exception, SystemExit) as error:
            self._add_error(name, error)
            return
        if answer is not None:
            self._carry_out(answer, name, value)

    def _carry_out(self, request: Request, name: str, value: Any) -> None:
        if request.stop is not None and self.stop_reason is None:
            self.stop_reason = f"{name} asked to stop: {request.stop}"
        if request.save:
            self.num_saves += 1
        if request.log:
            step = getattr(value, "step", None)
            values = {key: float(number) for key, number in request.log.items()}
            self._write(
                kinds.Logged(step=getattr(value, "steps", 0) if step is None else step, values=values)
            )

    def _add_error(self, name: str, error: BaseException) -> None:
        """Report the first error of a method; the others are counted."""
        self._errors[name] += 1
        if self._errors[name] > 1:
            return
        message = describe(error, f"running the callback {name}")
        self._first_error = self._first_error or TaskFailed(message)
        if not self._raise_errors:
            self._write(kinds.Warned(kind="callback", message=f"{message}\n  the run continues"))

    def report_repeated_errors(self) -> None:
        """Write how often each method has failed, if more than once, and count from zero again."""
        for name, count in self._errors.items():
            if count > 1:
                self._write(
                    kinds.Warned(kind="callback", message=f"the callback {name} failed {count} times")
                )
        self._errors.clear()
