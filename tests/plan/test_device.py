"""The device of a run, and the memory that a worker may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.fakes.inventories import cluster, gpu, machine, planned
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.device import choose_device, choose_worker_device
from orchestrator.types import GIB, Choice

CPU = machine()
H200 = machine(gpu())
BROKEN = machine(gpu_error="the driver shows 1 GPU(s), but torch sees none\nupdate the driver")


def test_the_gpu_with_the_most_free_memory_is_chosen():
    assert planned(H200).device.value == "cuda:0"
    assert planned(CPU).device.value == "cpu"
    assert planned(H200, gpu_mode="cpu").device.value == "cpu"
    several = machine(gpu(0, free=10 * GIB), gpu(1, free=70 * GIB), gpu(2, free=70.5 * GIB))
    device = planned(several, gpu_mode="single_gpu").device
    assert device.value == "cuda:1"
    assert device.rejected


def test_devices_chooses_the_gpu_and_one_process_takes_the_first():
    several = machine(gpu(0), gpu(1, free=GIB), gpu(2))
    chosen = planned(several, devices=1)
    assert (chosen.device.value, chosen.strategy.value) == ("cuda:1", "single")
    assert chosen.device.reason.startswith("set by --devices 1: ")
    assert chosen.memory.limit == GIB
    assert planned(several, devices=(2, 0), workers=1).device.value == "cuda:2"
    with pytest.raises(ResourceError, match="--devices 3 names GPU 3, but this machine has 3 GPUs"):
        choose_device(Config.of(devices=3), several)


def test_a_gpu_mode_without_its_gpus_is_a_resource_error():
    with pytest.raises(ResourceError, match="needs one GPU; 0 were found") as caught:
        planned(CPU, gpu_mode="single_gpu")
    assert caught.value.exit_code == 3
    with pytest.raises(ResourceError, match=r"--gpu-mode multi_gpu needs two GPUs or more; 1 was found\."):
        choose_device(Config.of(gpu_mode="multi_gpu"), H200)
    with pytest.raises(ResourceError, match="but torch sees none") as caught:
        choose_device(Config.of(gpu_mode="single_gpu"), BROKEN)
    assert caught.value.exit_code == 3


def test_the_error_of_an_unusable_gpu_is_the_reason_for_the_cpu():
    device = planned(BROKEN).device
    assert device.value == "cpu"
    assert "torch sees none" in device.reason


def test_gpus_that_only_the_cluster_counts_leave_the_cpu():
    chosen = planned(CPU, where=cluster(2))
    assert (chosen.device.value, chosen.workers.value, chosen.backend.value) == ("cpu", 2, "gloo")
    assert chosen.device.reason == "the cluster counts 2 GPUs, but CUDA shows none"
    assert choose_worker_device(Config(), BROKEN, 2).reason == BROKEN.gpu_error
    on_cpu = planned(CPU, where=cluster(2), gpu_mode="cpu", workers=2)
    assert on_cpu.device.reason == "set by --gpu-mode cpu"


def test_usable_memory_is_the_set_fraction_and_at_most_the_free_memory():
    assert planned(machine(gpu(total=80 * GIB)), gpu_memory_fraction=0.5).memory.limit == 40 * GIB
    assert planned(machine(gpu(total=80 * GIB, free=10 * GIB))).memory.limit == 10 * GIB
    assert planned(machine(ram_free=10 * GIB)).memory.limit == 8 * GIB


@pytest.mark.parametrize(("cores", "count", "threads"), [(8, 2, 4), (7, 2, 3), (2, 4, 1), (8, 1, 8)])
def test_workers_share_the_cores_of_their_node(cores: int, count: int, threads: int):
    chosen = planned(machine(cores=cores), workers=count, parallel_strategy="data_parallel").threads
    assert chosen.value == threads
    assert ("workers on a node" in chosen.reason) == (count > 1)


def test_a_run_in_one_process_has_the_threads_that_the_user_sets():
    limited = replace(machine(gpu(), cores=8), omp_threads=1)
    alone = planned(limited, loader_workers=-1)
    assert alone.threads == Choice(1, "set by OMP_NUM_THREADS=1")
    assert (
        alone.loader_workers.value == planned(machine(gpu(), cores=8), loader_workers=-1).loader_workers.value
    )
    shared = planned(limited, workers=2, parallel_strategy="data_parallel", gpu_mode="cpu")
    assert shared.threads.value == 4, "Ray sets the variable for workers, the user does not"


def test_only_workers_on_the_same_node_share_its_cores():
    assert planned(machine(gpu(), gpu(1), cores=8), where=cluster(2, 2)).threads.value == 4
    assert planned(machine(gpu(), cores=8), where=cluster(1, 1, 1, 1)).threads.value == 8
    assert planned(machine(cores=8), where=cluster(0, 0), workers=4).threads.value == 4
