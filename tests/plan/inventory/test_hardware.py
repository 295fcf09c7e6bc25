"""The inventory of this machine, and the launcher that started the process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from harness.fakes.inventories import gpu, machine
from orchestrator.plan.inventory.hardware import inventory, launched_by
from orchestrator.types import GIB


def test_the_inventory_of_this_machine_is_plausible(tmp_path: Path):
    this_machine = inventory(tmp_path / "not" / "yet")
    assert 1 <= this_machine.cores <= (os.cpu_count() or 1)
    assert 0 < this_machine.ram_free <= this_machine.ram_total <= psutil.virtual_memory().total
    assert {"python", "platform", "torch", "ray"} <= this_machine.versions.keys()
    assert this_machine.disk_free > 0
    assert this_machine.cpu_name


def test_to_json_survives_json():
    values = machine(gpu(0), gpu(1)).to_json()
    assert json.loads(json.dumps(values)) == values
    assert values["cores"] == 8


def test_models_and_the_smallest_memory_are_those_of_all_gpus():
    assert machine().same_model
    assert machine().min_gpu_memory == 0
    assert machine(gpu(0), gpu(1)).same_model
    mixed = machine(gpu(0), gpu(1, total=24 * GIB))
    assert not mixed.same_model
    assert mixed.min_gpu_memory == 24 * GIB


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "many"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"),
        (
            {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"},
            "deepspeed",
        ),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "a distributed launcher"),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], launcher: str | None):
    assert launched_by(environment) == launcher


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launched_by() == "torchrun"


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "4,2"}, 4), ({"OMP_NUM_THREADS": "many"}, None)],
)
def test_the_number_of_threads_that_the_user_sets_is_read(
    environment: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert inventory().omp_threads == threads
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert inventory().omp_threads is None, "Ray sets it in the processes of a job"
