"""Every example runs offline, to its last line."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.docs.documents import ROOT
from harness.hosts.cluster import RayCluster
from harness.hosts.ranks import run_ranks
from harness.runs.cli_runs import complete, enter_folder, leave_out_pictures, variables_of

EXAMPLES = ROOT / "examples"
LAST_WORDS = {
    "own_model": "spiral of (0.5, 0.1)",
    "moe_layer": "step 100  error 0.0",
    "streaming": "at step 150: loss 0.00",
    "callback_and_metric": "asked to stop: auc above 0.95",
    "fine_tune": "exported: Qwen3MoeForCausalLM",
}

FOLDERS = {"fine_tune": "tiny"}
ARGUMENTS = {"fine_tune": [FOLDERS["fine_tune"]], "sweep": ["batch-size=16", "workers=1,2"]}
LAST_WORDS_ON_RAY = {
    "sweep": "## Weak scaling",
    "chaos": "losses equal to the bit: True",
}


def run_example(name: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script in an empty folder, in a process that has torch loaded. Return its output."""
    (output,) = run_ranks(run_script, 1, name, str(folder), environment, timeout=280)
    return output


def run_script(
    _rank: int, _size: int, _store: str, name: str, folder: str, environment: dict[str, str]
) -> str:
    log = enter_folder(folder, environment)
    script = str(EXAMPLES / f"{name}.py")
    sys.argv = [script, *ARGUMENTS.get(name, [])]
    leave_out_pictures()
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    return log.read_text(encoding="utf-8")


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("name", LAST_WORDS)
def test_a_script_runs(name: str, tmp_path: Path) -> None:
    assert LAST_WORDS[name] in run_example(name, tmp_path, {})
    assert (tmp_path / FOLDERS.get(name, "")).is_dir()


@pytest.mark.extended(but_first=1)
@pytest.mark.ray
@pytest.mark.parametrize("name", LAST_WORDS_ON_RAY)
def test_a_script_runs_on_a_cluster(name: str, tmp_path: Path, shared_cluster: RayCluster) -> None:
    assert LAST_WORDS_ON_RAY[name] in run_example(name, tmp_path, variables_of(shared_cluster))


def test_a_task_of_a_package_runs_by_the_command_of_its_file(tmp_path: Path) -> None:
    text = (EXAMPLES / "own_task" / "order.py").read_text(encoding="utf-8")
    (command,) = [line for line in text.splitlines() if line.startswith("cd examples && ")]
    arguments = shlex.split(command.removeprefix("cd examples && orchestrator "))
    (tmp_path / "own_task").symlink_to(EXAMPLES / "own_task")
    assert "f1" in complete(None, tmp_path, arguments)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["first_run", "living_experts"])
def test_a_notebook_runs_and_has_no_output(name: str, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] for cell in code), "clear the outputs before a commit"
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert code[-1].outputs


def test_the_list_of_examples_has_all_of_them() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} | {"own_task/"}
    assert {name for name in names if f"`{name}`" not in text} == set()
    tested = {f"{name}.py" for name in (*LAST_WORDS, *LAST_WORDS_ON_RAY)}
    assert tested == {name for name in names if name.endswith(".py")}
