"""Values in Python that a graph would not see change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.train.step_graph.python_state import PythonState


class _Task:
    def __init__(self) -> None:
        self.temperature = 1.0
        self.queue = deque([torch.zeros(2)], maxlen=3)
        self.features = {"old": torch.zeros(2)}
        self.counter = SimpleNamespace(step=0)
        self.nested = {"inner": {"steps": [1, 2]}}
        self.seen = {1}
        self.running = torch.zeros(3)


def _replace_feature(task: _Task) -> None:
    task.features["old"] = torch.ones(2)


def _set(name: str, value: Any) -> Callable[[_Task], None]:
    return lambda task: setattr(task, name, value)


CHANGES: dict[str, Callable[[_Task], None]] = {
    "task.temperature": _set("temperature", 0.5),
    "task.queue": lambda task: task.queue.append(torch.ones(2)),
    "task.features": _replace_feature,
    "task.counter": lambda task: setattr(task.counter, "step", 1),
    "task.nested": lambda task: task.nested["inner"]["steps"].append(3),
    "task.seen": lambda task: task.seen.add(2),
    "the list of attributes of task": _set("new", 1),
    "task.running": _set("running", torch.ones(3)),
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


def test_tensors_may_change_in_place() -> None:
    task, state = watched()
    task.running += 1
    task.features["old"].fill_(3)
    assert state.change() is None


def test_objects_that_name_each_other_end() -> None:
    task, _ = watched()
    task.counter.task = task
    model = nn.Linear(2, 2)
    state = PythonState(task, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert state.change() is None
