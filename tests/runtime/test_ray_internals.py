"""Tests of the functions over Ray's private APIs: the version guard, the names they import, and
the monkeypatches."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.runtime import ray_internals

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["2.56.0", "2.58.1", "2.60.0", "2.60.3rc1"])
def test_supported_versions_are_accepted(version: str) -> None:
    ray_internals.check_ray_version(version)


@pytest.mark.parametrize("version", ["2.55.1", "2.61.0", "2.61.0rc1", "2.9.0", "3.0.0.dev0", "unknown"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(UserError, match=rf"Ray {version} is installed; .* ray>=2\.56,<2\.61 "):
        ray_internals.check_ray_version(version)


def test_the_bounds_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"ray[default,train,tune]{ray_internals.SUPPORTED_RAY}" in project["dependencies"]


def private_names() -> list[tuple[str, str]]:
    """Modules and names of Ray that the functions of ``ray_internals`` import."""
    tree = ast.parse(Path(ray_internals.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [
        (str(node.module), alias.name)
        for node in imports
        for alias in node.names
        if str(node.module).startswith("ray.")
    ]


@pytest.mark.parametrize(("module", "name"), private_names())
def test_the_installed_ray_has_the_name(module: str, name: str) -> None:
    """A new Ray release that moved one of them fails here, and not in the middle of a run."""
    owner = importlib.import_module(module)
    if not hasattr(owner, name):
        importlib.import_module(f"{module}.{name}")  # a submodule is no attribute before its first import


def test_the_module_imports_neither_ray_train_nor_ray_tune() -> None:
    """Each takes seconds to import, and expert hosts use neither."""
    code = (
        "import sys; import orchestrator.runtime.ray_internals;"
        "print([name for name in ('ray.train', 'ray.tune') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_messages_about_dead_processes_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker as ray_worker

    printed: list[str] = []

    def print_lines(data: dict[str, Any], ignore_prefix: bool) -> None:
        printed.extend(data["lines"])

    monkeypatch.setattr(ray_worker, "print_to_stdstream", print_lines)
    lines = (
        "A worker died. Lease ID: 0",
        "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump]",
        "2 workers were killed: the node runs low on memory",
    )
    with ray_internals.hidden_worker_output("A worker died", "Raylet is terminated"):
        for line in lines:
            ray_worker.print_to_stdstream({"lines": [line]}, ignore_prefix=False)
    assert printed == ["2 workers were killed: the node runs low on memory"]
    assert ray_worker.print_to_stdstream is print_lines


def test_the_command_line_of_a_job_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils as ray_utils

    def command_line() -> str:
        return "train --data-dir s3://user:secret@host"

    monkeypatch.setattr(ray_utils, "get_entrypoint_name", command_line)
    with ray_internals.masked_entrypoint(lambda text: text.replace("secret", "***")):
        assert ray_utils.get_entrypoint_name() == "train --data-dir s3://user:***@host"
    assert ray_utils.get_entrypoint_name is command_line


def test_the_services_of_a_cluster_are_left_out_only_inside_the_block() -> None:
    from ray._private import utils as ray_utils
    from ray._private.node import Node

    names = ("start_api_server", "start_monitor", "start_log_monitor")
    originals = [getattr(Node, name) for name in names]
    with ray_internals.fewer_services():
        assert not set(originals) & {getattr(Node, name) for name in names}
        assert ray_utils.get_dashboard_dependency_error() == "not needed"
    assert [getattr(Node, name) for name in names] == originals
    assert ray_utils.get_dashboard_dependency_error() is None


def test_the_controller_of_ray_train_starts_no_actor_for_reports() -> None:
    from ray.runtime_context import RuntimeContext
    from ray.train.v2._internal.execution.worker_group import state, worker_group

    original = worker_group.SynchronizationActor
    with ray_internals._controller_outside_of_actors():
        replacement: Any = worker_group.SynchronizationActor
        actor = replacement.options(label_selector={}).remote(timeout_s=1, warn_interval_s=1)
        state._shutdown_sync_actor(actor)
        assert RuntimeContext.current_actor is None
    assert worker_group.SynchronizationActor is original
    assert isinstance(RuntimeContext.current_actor, property)


def test_tune_copies_no_variables_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.tune.execution import class_cache

    names = {"AWS_SECRET_ACCESS_KEY", "TUNE_DISABLE_AUTO_INIT"}
    monkeypatch.setattr(class_cache, "ENV_VARS_TO_PROPAGATE", names)
    with ray_internals.unpropagated_variables("AWS_"):
        assert {"TUNE_DISABLE_AUTO_INIT"} == class_cache.ENV_VARS_TO_PROPAGATE
    assert class_cache.ENV_VARS_TO_PROPAGATE is names
