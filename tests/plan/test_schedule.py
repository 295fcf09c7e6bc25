"""Data loading, the number of steps and the warm-up."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.types import GIB, MIB
from tests.support.inventories import cluster, gpu, machine, model, planned

CPU = machine()
H200 = machine(gpu())
READ_BY_SAMPLE = model(gathered_bytes=None)


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_loader_processes_take_all_cores_but_one(cores: int, workers: int):
    assert planned(machine(gpu(), cores=cores), READ_BY_SAMPLE).loader_workers.value == workers
    assert planned(machine(cores=cores), READ_BY_SAMPLE).loader_workers.value == 0
    assert planned(machine(gpu(), cores=cores)).loader_workers.value == 0
    assert planned(machine(gpu(), cores=cores), loader_workers=5).loader_workers.value == 5


def test_the_cores_of_a_worker_limit_its_loader_processes():
    chosen = planned(machine(gpu(), gpu(1), cores=8), READ_BY_SAMPLE).loader_workers
    assert (chosen.value, "2 workers" in chosen.reason) == (3, True)
    assert planned(machine(gpu(), gpu(1), cores=2), READ_BY_SAMPLE).loader_workers.value == 0


def test_workers_on_a_node_share_its_ram_for_prefetching():
    enough_for_one = machine(gpu(), gpu(1), cores=4, ram_free=12 * GIB)
    assert planned(enough_for_one, READ_BY_SAMPLE).prefetch.value == 2
    on_two_nodes = planned(enough_for_one, READ_BY_SAMPLE, cluster(1, 1), loader_workers=1)
    assert on_two_nodes.prefetch.value == 4


@pytest.mark.parametrize(
    ("gathered", "on_device"), [(None, False), (0, True), (3 * GIB, True), (5 * GIB, False)]
)
def test_small_data_is_kept_on_the_gpu(gathered: int | None, on_device: bool):
    assert planned(H200, model(gathered_bytes=gathered)).data_on_device.value == on_device
    assert not planned(CPU, model(gathered_bytes=gathered)).data_on_device.value


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"batch_size": 100, "epochs": 3}, 300),
        ({"batch_size": 300, "epochs": 1}, 34),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7}, 7),
        ({"batch_size": 100, "epochs": 3, "max_steps": 7000}, 300),
        ({"debug": True}, 4),
        ({"debug": True, "max_steps": 2}, 2),
    ],
)
def test_epochs_and_flags_set_the_number_of_steps(settings: dict[str, Any], steps: int):
    assert planned(CPU, **settings).total_steps.value == steps


def test_a_tiny_data_set_still_has_a_step():
    chosen = planned(CPU, model(samples=1, validation_samples=0, gathered_bytes=MIB), epochs=1)
    assert (chosen.total_steps.value, chosen.batch_size.value, chosen.global_batch_size.value) == (1, 1, 1)


def test_warm_up_is_a_twentieth_of_the_run_up_to_a_thousand_steps():
    assert planned(CPU, batch_size=100, epochs=1).warmup_steps.value == 5
    assert planned(CPU, batch_size=1, epochs=300).warmup_steps.value == 1000
    assert planned(CPU, warmup_steps=9).warmup_steps.value == 9
