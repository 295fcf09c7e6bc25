"""Values in Python that a graph would not see change."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestrator.train.step_graph.python_state import PythonState


class _Task:
    def __init__(self) -> None:
        self.temperature = 1.0
        self.queue = deque([torch.zeros(2)], maxlen=3)
        self.features: dict[str, Any] = {"old": torch.zeros(2)}
        self.counter = SimpleNamespace(step=0)
        self.nested = {"inner": {"steps": [1, 2]}}
        self.seen = {1}
        self.kept = {"a", "b"}
        self.switches: list[Any] = [True]
        self.weights = np.ones(3)
        self.running = torch.zeros(3)
        self.random = random.Random(0)
        self.rng = np.random.default_rng(0)
        self.old_rng = np.random.RandomState(0)
        self.generator = torch.Generator()


def _replace_feature(task: _Task) -> None:
    task.features["old"] = torch.ones(2)


def _swap_kept(task: _Task) -> None:
    task.kept.remove("a")
    task.kept.add("c")


def _set(name: str, value: Any) -> Callable[[_Task], None]:
    return lambda task: setattr(task, name, value)


CHANGES: dict[str, Callable[[_Task], Any]] = {
    "task.temperature": _set("temperature", 0.5),
    "task.queue": lambda task: task.queue.append(torch.ones(2)),
    "task.features": _replace_feature,
    "task.counter": lambda task: setattr(task.counter, "step", 1),
    "task.nested": lambda task: task.nested["inner"]["steps"].append(3),
    "task.seen": lambda task: task.seen.add(2),
    "task.kept": _swap_kept,
    "task.switches": lambda task: task.switches.__setitem__(0, 1),
    "task.weights": lambda task: task.weights.__setitem__(0, 2.0),
    "the list of attributes of task": _set("new", 1),
    "task.running": _set("running", torch.ones(3)),
    "task.random": lambda task: task.random.random(),
    "task.rng": lambda task: task.rng.beta(0.2, 0.2),
    "task.old_rng": lambda task: task.old_rng.rand(),
    "task.generator": lambda task: torch.rand((), generator=task.generator),
}


def watched() -> tuple[_Task, PythonState]:
    task = _Task()
    model = nn.Linear(2, 2)
    return task, PythonState(task, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_changed_value_is_named(name: str) -> None:
    task, state = watched()
    assert state.change() is None
    CHANGES[name](task)
    assert state.change() == name


def test_tensors_of_the_device_may_change_in_place() -> None:
    task, state = watched()
    task.running += 1
    task.features["old"].fill_(3)
    assert state.change() is None


def _fill_feature(task: _Task) -> None:
    task.features["old"].fill_(3)


def _fill_running(task: _Task) -> None:
    task.running.fill_(3)


@pytest.mark.parametrize(("name", "fill"), [("features", _fill_feature), ("running", _fill_running)])
def test_tensors_of_the_host_may_not(name: str, fill: Callable[[_Task], None]) -> None:
    task = _Task()
    model = nn.Linear(2, 2, device="meta")  # stands for a model on a GPU
    state = PythonState(task, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert state.change() is None
    fill(task)
    assert state.change() == f"task.{name}"


def test_a_new_object_in_the_place_of_a_freed_one_is_noticed() -> None:
    """Two replacements between two looks: the second may get the address of the first object."""

    class Entry:
        __slots__ = ()

    task, _ = watched()
    task.features = {"old": Entry()}
    model = nn.Linear(2, 2)
    state = PythonState(task, model, torch.optim.SGD(model.parameters(), lr=0.1))
    address = id(task.features.pop("old"))
    entries = [Entry() for _ in range(100)]
    task.features["old"] = next((e for e in entries if id(e) == address), entries[0])
    assert state.change() == "task.features"


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


def _replace_head(net: _Net) -> None:
    net.head = nn.Linear(2, 2)


def _freeze(net: _Net) -> None:
    net.head.weight.requires_grad_(False)


CHANGES_OF_MODEL: dict[str, Callable[[_Net], Any]] = {
    "model.head": _replace_head,
    "the list of attributes of model.body": lambda net: net.body.append(nn.Linear(2, 2)),
    "model.head.weight": _freeze,
}


@pytest.mark.parametrize("name", list(CHANGES_OF_MODEL))
def test_a_changed_model_is_noticed(name: str) -> None:
    net = _Net()
    state = PythonState(_Task(), net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert state.change() is None
    CHANGES_OF_MODEL[name](net)
    assert state.change() == name


def test_objects_that_name_each_other_end() -> None:
    task, _ = watched()
    task.counter.task = task
    model = nn.Linear(2, 2)
    state = PythonState(task, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert state.change() is None
