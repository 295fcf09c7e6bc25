"""Tests of loading tasks by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import TaskFailed, UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.load import load_task, loads_by_name

TASKS = """
from orchestrator.tasks.task import Task


class WithConfig:
    def __init__(self, config):
        self.config = config

    def build_model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...


class WithoutConfig(WithConfig):
    def __init__(self, width=3):
        self.width = width


class Unfinished(Task):
    def build_model(self): ...


class Misspelt(Task):
    def build_model(self): ...
    def train_data(self): ...
    def loss(self, model, batch): ...
    def validaton_data(self): ...


class MisspeltAttribute(WithConfig):
    metric = {}


class American(WithConfig):
    def initialize(self, model): ...


class Similar(WithConfig, Task):
    metrics = {}
    metric = "a name of its own beside the member"
    units_of_sample = 3

    def __init__(self):
        self.schedules = []

    def validation2_data(self): ...
    def validation_data(self): ...


class Failing(WithConfig):
    def __init__(self):
        raise ZeroDivisionError("my own mistake")


made = WithoutConfig(5)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of the user's tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tasks.py").write_text(TASKS)
    yield tmp_path
    for name in ("my_tasks", "my_script", "my_imports"):
        sys.modules.pop(name, None)


def test_a_built_in_task_is_loaded_by_its_name() -> None:
    assert isinstance(load_task(Config.of(task="digits")), Digits)


def load(name: str) -> Any:
    return load_task(Config.of(task=name))


def test_settings_of_language_models_belong_to_their_task() -> None:
    for settings, message in (
        ({"lora": 8}, "lora belongs to the task lm, but task is digits"),
        ({"model": "a", "data": ["b.jsonl"]}, "model, data belong to the task lm"),
    ):
        with pytest.raises(UserError, match=message):
            load_task(Config.of(**settings))


def test_a_users_class_gets_the_config_if_it_takes_one(user_folder: Path) -> None:
    assert load("my_tasks:WithConfig").config.task == "my_tasks:WithConfig"
    assert load("my_tasks:WithoutConfig").width == 3


def test_a_task_may_be_an_object(user_folder: Path) -> None:
    assert load("my_tasks:made").width == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", r"unknown task 'digit' \(did you mean 'digits'\?\); built in are digits, text, synthetic"),
        ("my_tasks.py:WithConfig", "write package.module:Name"),
        ("my/tasks:WithConfig", "write package.module:Name"),
        ("nowhere.at.all:Mine", "there is no module 'nowhere'"),
        ("my_tasks:WithConfi", r"has no 'WithConfi' \(did you mean 'WithConfig'\?\)"),
        ("my_tasks:Misspelt", r"has 'validaton_data', which .+ \(did you mean 'validation_data'\?\)"),
        ("my_tasks:MisspeltAttribute", "did you mean 'metrics'"),
        ("my_tasks:American", "did you mean 'initialise'"),
        (
            "my_tasks:Unfinished",
            "lacks train_data, loss; a task needs build_model, train_data, loss: see docs/own-model.md",
        ),
    ],
)
def test_a_wrong_name_is_explained(name: str, message: str, user_folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(name)


def test_names_beside_those_of_a_task_are_the_users_own(user_folder: Path) -> None:
    assert load("my_tasks:Similar").schedules == []


def test_errors_of_the_users_module_are_shown_as_such(user_folder: Path) -> None:
    with pytest.raises(TaskFailed, match="my own mistake\n  while making the task Failing"):
        load("my_tasks:Failing")
    (user_folder / "my_script.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(TaskFailed, match="SystemExit: 3\n  while importing my_script"):
        load("my_script:Mine")
    (user_folder / "my_imports.py").write_text("import a_package_that_is_not_installed\n")
    with pytest.raises(TaskFailed, match="No module named 'a_package_that_is_not_installed'"):
        load("my_imports:Mine")


def test_a_task_object_cannot_be_loaded_by_name() -> None:
    assert loads_by_name("digits")
    assert loads_by_name("package.module:Name")
    assert not loads_by_name("python:Name")
