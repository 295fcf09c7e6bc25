"""Modules that no process imports before the first step, so that a run starts soon.

A large package takes up to two seconds to import, in the driver and once more in each worker.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from orchestrator.runtime.cluster import prestart

ROOT = Path(__file__).resolve().parents[2]
NEVER_BEFORE_THE_FIRST_STEP = (
    "IPython",
    "datasets",
    "matplotlib",
    "optuna",
    "ray.tune",
    "scipy",
    "sklearn",
    "tensorboard",
    "torchvision",
    "transformers",
)
RAY_TRAIN = ("ray.train", "ray.data", "pandas", "pyarrow")
"""Ray Train and what it brings along."""
DRIVER_MODULES = ("orchestrator.cli.main", "orchestrator.cli.train", "orchestrator.runtime.cluster.session")
"""What the driver imports until it starts a cluster; torch is imported while the cluster starts."""
CASES = {
    "driver": (DRIVER_MODULES, (*NEVER_BEFORE_THE_FIRST_STEP, *RAY_TRAIN, "torch")),
    "host": (prestart._HOST_MODULES, (*NEVER_BEFORE_THE_FIRST_STEP, *RAY_TRAIN)),
    "worker": (prestart._WORKER_MODULES, NEVER_BEFORE_THE_FIRST_STEP),
}


def loaded(modules: Iterable[str], unwanted: Iterable[str]) -> list[str]:
    """Import modules in a new process; return those of the unwanted ones that came along."""
    code = (
        f"import sys, importlib\nfor name in {tuple(modules)!r}: importlib.import_module(name)\n"
        f"print(*(name for name in {tuple(unwanted)!r} if name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    return result.stdout.split()


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("process", CASES)
def test_a_process_imports_nothing_that_it_does_not_need_to_start(process: str) -> None:
    modules, unwanted = CASES[process]
    tasks = prestart._TASK_MODULES.values() if process != "driver" else ()
    all_modules = (*modules, *(module for task_modules in tasks for module in task_modules))
    assert loaded(all_modules, unwanted) == []


@pytest.mark.extended
def test_an_unwanted_import_is_found() -> None:
    assert loaded(["json", "sklearn"], ["sklearn", "ray.tune"]) == ["sklearn"]
