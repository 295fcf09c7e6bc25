"""State in Python that a step reads: a graph repeats the work for the values of its capture.

So a graph is right only while these values stay: attributes of the task and of modules, entries of their
lists and dicts, attributes of the task's own objects, the settings of the optimizer. Tensors may change in
place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (int, float, str, bool, type(None))
_MAX_ENTRIES = 64  # of a list, a dict or an object that are compared one by one
_MAX_DEPTH = 3  # of lists, dicts and objects in each other
_OURS = ("orchestrator.", "experts.", "torch.")  # known not to matter, or watched otherwise
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl"}
_OF_GROUP = frozenset({"params", "lr", "capturable"})  # the parameters, and what a capture sets
_MISSING = object()


class PythonState:
    """The values of a task, its model and its optimizer at one moment, to be compared with those of now."""

    def __init__(self, task: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self.take()

    def take(self) -> None:
        """Remember the values of now."""
        places = list(self._places())
        self._names = [f"{owner}.{key}" for owner, _, key in places]
        self._values = [(values, key, values[key], _content(values[key])) for _, values, key in places]
        self._owners = [(owner, own, len(own)) for owner, own in self._attributes()]
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        self._tensors = [(name, tensor, tensor.data_ptr()) for name, tensor in named]
        self._state = self._optimizer.state
        self._hooks = [hooks for module in self._model.modules() for hooks in _hooks_of(module)]

    def change(self) -> str | None:
        """Return the name of a value that is another one now; None if all are the same."""
        # A loop over some hundred values, before each replay: it does little for each of them.
        for index, (values, key, before, content) in enumerate(self._values):
            value = values.get(key, _MISSING)
            same = value is before or (type(value) is type(before) and _is_plain(value) and value == before)
            if not same or (content is not None and _content(value) != content):
                return self._names[index]
        for owner, own, size in self._owners:
            if len(own) != size:
                return f"the list of attributes of {owner}"
        for name, tensor, address in self._tensors:
            if tensor.data_ptr() != address:
                return f"model.{name}"
        if self._optimizer.state is not self._state:
            return "the optimizer's state"
        return "the hooks of a module" if any(self._hooks) else None

    def _places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield what a step may read: the name of its owner, a dict, and the key in it."""
        for owner, own in self._attributes():
            yield from ((owner, own, key) for key in own if key not in _OF_TORCH)
        for name, module in self._model.named_modules():
            owner = f"model.{name}" if name else "model"
            yield from ((owner, module._parameters, key) for key in module._parameters)
            yield from ((owner, module._buffers, key) for key in module._buffers)
        for number, group in enumerate(self._optimizer.param_groups):
            yield from ((f"optimizer group {number}", group, key) for key in group if key not in _OF_GROUP)

    def _attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of the task and of all modules, with the names of their owners."""
        yield "task", getattr(self._task, "__dict__", {})
        for name, module in self._model.named_modules():
            yield f"model.{name}" if name else "model", module.__dict__


def find_hook(model: nn.Module) -> str | None:
    """Return the name of a module or parameter with a hook of its own, or None.

    A hook runs in Python: in a replay it does not run."""
    for name, module in model.named_modules():
        if any(_hooks_of(module)):
            return name or type(module).__name__
    for name, parameter in model.named_parameters():
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if any(hooks):
            return name
    return None


def host_generator_states(device: torch.device) -> tuple[Any, ...]:
    """Return the states of the random generators that are not the device's, to be compared."""
    numpy_state: Any = np.random.get_state(legacy=False)
    of_torch = b"" if device.type == "cpu" else torch.get_rng_state().numpy().tobytes()
    return random.getstate(), repr(numpy_state), of_torch


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    return (getattr(module, name) for name in _HOOKS)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _content(value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """Return what a list, a dict or an object holds, to be compared; None for everything else.

    Other entries count by their identity: a tensor in a queue is another one when it was replaced."""
    if depth == _MAX_DEPTH:
        return None
    entries = _entries(value)
    if entries is None:
        return None
    if len(entries) > _MAX_ENTRIES:
        return (len(entries),)
    return tuple((key, _entry_content(entry, depth)) for key, entry in entries)


def _entry_content(entry: Any, depth: int) -> Any:
    if _is_plain(entry):
        return entry
    content = _content(entry, depth + 1)
    return id(entry) if content is None else (id(entry), content)


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a container, or the attributes of an object of the user's."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        return [(len(value), None)]
    if isinstance(value, nn.Module | torch.Tensor) or (type(value).__module__ + ".").startswith(_OURS):
        return None
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) else None
