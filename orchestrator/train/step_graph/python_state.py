"""State in Python that a step reads: a graph repeats the work for the values of its capture.

So a graph is right only while these values stay: attributes of the task and of modules, entries of their
lists, dicts, sets and small arrays, attributes of the task's own objects, states of its random generators,
the settings of the optimizer. Tensors on the device of the model may change in place. Tensors of the host
may not: kernels were launched with their values."""

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
_OF_GROUP = frozenset(
    {"params", "lr", "capturable"}
)  # the parameters, and the settings that a capture replaces
_PARTS = ("_parameters", "_buffers", "_modules")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_MISSING = object()


class PythonState:
    """The values of a task, its model and its optimizer at one moment, to be compared with later ones."""

    def __init__(self, task: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._device_types = {parameter.device.type for parameter in model.parameters()}
        self.take()

    def take(self) -> None:
        """Remember the present values."""
        places = list(self._places())
        self._names = [f"{owner}.{key}" for owner, _, key in places]
        self._values = [(values, key, values[key], self._content(values[key])) for _, values, key in places]
        watched = [*self._attributes(), *self._parts()]
        self._owners = [(owner, own, len(own)) for owner, own in watched]
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        self._tensors = [(name, tensor, tensor.data_ptr(), tensor.requires_grad) for name, tensor in named]
        self._state = self._optimizer.state
        self._hooks = [hooks for module in self._model.modules() for hooks in _hooks_of(module)]

    def change(self) -> str | None:
        """Return the name of a value that has changed since; None if none has."""
        # A loop over some hundred values, before each replay: it does little for each of them.
        for index, (values, key, before, content) in enumerate(self._values):
            value = values.get(key, _MISSING)
            same = value is before or (type(value) is type(before) and _is_plain(value) and value == before)
            if not same or (content is not None and self._content(value) != content):
                return self._names[index]
        for owner, own, size in self._owners:
            if len(own) != size:
                return f"the list of attributes of {owner}"
        for name, tensor, address, has_gradient in self._tensors:
            if tensor.data_ptr() != address or tensor.requires_grad != has_gradient:
                return f"model.{name}"
        if self._optimizer.state is not self._state:
            return "the optimizer's state"
        return "the hooks of a module" if any(self._hooks) else None

    def _places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the places that a step may read: the name of the owner, a dict, and a key of it."""
        for owner, own in self._attributes():
            yield from ((owner, own, key) for key in own if key not in _OF_TORCH)
        for owner, parts in self._parts():
            yield from ((owner, parts, key) for key in parts)
        for number, group in enumerate(self._optimizer.param_groups):
            yield from ((f"optimizer group {number}", group, key) for key in group if key not in _OF_GROUP)

    def _attributes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the attributes of the task and of all modules, with the names of their owners."""
        yield "task", getattr(self._task, "__dict__", {})
        for name, module in self._model.named_modules():
            yield f"model.{name}" if name else "model", module.__dict__

    def _parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the parameters, buffers and submodules of all modules, with the names of their owners."""
        for name, module in self._model.named_modules():
            owner = f"model.{name}" if name else "model"
            yield from ((owner, getattr(module, part)) for part in _PARTS)

    def _content(self, value: Any, depth: int = 0) -> tuple[Any, ...] | None:
        """Return the content of a container, an object, a generator or a tensor of the host, else None.

        Other entries count by their identity: a tensor in a queue is another one when it was replaced."""
        if isinstance(value, torch.Tensor):
            is_on_device = value.device.type in self._device_types
            return None if is_on_device or value.is_inference() else (value._version,)
        if isinstance(value, _GENERATORS):
            return (_generator_state(value),)
        if isinstance(value, np.ndarray):
            # A longer one counts by its identity, as the entries of a longer list do.
            return (value.shape, value.tobytes()) if value.size <= _MAX_ENTRIES else None
        entries = _entries(value) if depth < _MAX_DEPTH else None
        if entries is None:
            return None
        if len(entries) > _MAX_ENTRIES:
            return (len(entries),)
        return tuple((key, self._entry_content(entry, depth)) for key, entry in entries)

    def _entry_content(self, entry: Any, depth: int) -> Any:
        return (type(entry), entry) if _is_plain(entry) else (_Same(entry), self._content(entry, depth + 1))


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


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator of the task's own; the device's own are part of a graph."""
    if isinstance(generator, random.SystemRandom):
        return None  # it has no state
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes() if generator.device.type == "cpu" else None
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.get_state(legacy=False))


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    return (getattr(module, name) for name in _HOOKS)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


class _Same:
    """An object that equals itself alone.

    It keeps the object: a new one could otherwise have the address of one that was freed."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the entries of a container, or the attributes of an object of the user's."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        # A set has no order, so it is compared as a whole.
        return [(frozenset(value) if len(value) <= _MAX_ENTRIES else len(value), None)]
    if isinstance(value, nn.Module | torch.Tensor) or (type(value).__module__ + ".").startswith(_OURS):
        return None
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) else None
