"""One process or several workers: their number, the backend of their collectives, the sharding of
the model."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.inventories import cluster, gpu, machine, model
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, ShardingForm, estimate_memory
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.plan.workers import (
    check_data_tasks,
    check_gpu_mode,
    choose_backend,
    choose_sharding,
    choose_strategy,
    choose_workers,
    uses_gpus,
    workers_flag,
)
from orchestrator.types import GIB, Choice, bytes_text

CPU = machine()
ONE = machine(gpu())
TWO = machine(gpu(), gpu(1))
BROKEN = machine(gpu_error="the driver shows 2 GPU(s), but torch sees none")


def strategy_of(inventory: Inventory, in_cluster: bool = False, **given: Any) -> str:
    chosen = choose_strategy(Config.of(**given), inventory, in_cluster)
    assert len(chosen.reason) > 3
    return chosen.value


def workers(where: Cluster | Inventory, inventory: Inventory = CPU, **given: Any) -> Choice[int]:
    if isinstance(where, Inventory):
        return choose_workers(Config.of(**given), Cluster.of(where), where)
    return choose_workers(Config.of(**given), where, inventory)


# --- strategy


@pytest.mark.parametrize(
    ("inventory", "given", "expected"),
    [
        (CPU, {}, "single"),
        (ONE, {}, "single"),
        (TWO, {}, "data_parallel"),
        (BROKEN, {}, "single"),
        (TWO, {"devices": 1}, "single"),
        (TWO, {"devices": (1, 0)}, "data_parallel"),
        (CPU, {"parallel_strategy": "data_parallel"}, "data_parallel"),
        (ONE, {"parallel_strategy": "data_parallel", "workers": 1}, "data_parallel"),
        (CPU, {"workers": 2}, "data_parallel"),
        (CPU, {"workers": 2, "gpu_mode": "cpu"}, "data_parallel"),
        (CPU, {"gpu_mode": "multi_gpu"}, "data_parallel"),
        (CPU, {"ray_address": "local"}, "data_parallel"),
        (CPU, {"ray_address": "10.0.0.1:6379", "workers": 1}, "data_parallel"),
        (TWO, {"workers": 1}, "single"),
        (TWO, {"workers": 1, "devices": (0, 1)}, "single"),
        (TWO, {"gpu_mode": "cpu"}, "single"),
        (TWO, {"gpu_mode": "single_gpu"}, "single"),
        (TWO, {"auto": False}, "single"),
        (TWO, {"auto": False, "workers": 2}, "data_parallel"),
        (TWO, {"auto": False, "devices": (0, 1)}, "data_parallel"),
        (CPU, {"parallel_strategy": "expert_parallel"}, "expert_parallel"),
        (CPU, {"parallel_strategy": "expert_parallel", "workers": 1}, "expert_parallel"),
        (TWO, {"parallel_strategy": "expert_parallel", "gpu_mode": "cpu", "workers": 3}, "expert_parallel"),
        (ONE, {"parallel_strategy": "expert_parallel", "gpu_mode": "single_gpu"}, "expert_parallel"),
        (TWO, {"parallel_strategy": "expert_parallel", "auto": False}, "expert_parallel"),
        (CPU, {"gate": "primary", "placement": "round_robin"}, "single"),
    ],
)
def test_flags_and_gpus_set_the_strategy(inventory: Inventory, given: dict[str, Any], expected: str):
    assert strategy_of(inventory, **given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "data_parallel"),
        ({"workers": 1}, "single"),
        ({"gpu_mode": "cpu"}, "single"),
        ({"auto": False}, "single"),
    ],
)
def test_a_run_inside_a_cluster_has_workers_unless_a_flag_demands_one_process(
    given: dict[str, Any], expected: str
):
    assert strategy_of(CPU, in_cluster=True, **given) == expected


def test_the_reason_is_the_flag_or_the_number_of_gpus():
    def reason(inventory: Inventory, **given: Any) -> str:
        return choose_strategy(Config.of(**given), inventory).reason

    assert reason(CPU, workers=2) == "set by --workers 2"
    assert reason(TWO, devices=(1, 0)) == "set by --devices 1,0"
    assert reason(CPU, ray_address="local") == "set by --ray-address local"
    assert reason(TWO) == "2 GPUs were found, one for each worker"
    assert reason(ONE) == "one GPU was found"
    assert reason(TWO, devices=1) == "--devices 1 is one GPU"
    assert reason(BROKEN) == BROKEN.gpu_error
    assert reason(TWO, auto=False) == NO_AUTO
    assert (
        reason(ONE, parallel_strategy="expert_parallel", workers=1)
        == "set by --parallel-strategy expert_parallel"
    )
    assert (
        workers_flag(Config.of(parallel_strategy="expert_parallel")) == "--parallel-strategy expert_parallel"
    )
    assert workers_flag(Config.of(gate="primary")) is None


def test_the_rejected_strategy_is_named():
    assert choose_strategy(Config(), TWO).rejected[0].option == "single"
    assert choose_strategy(Config(), ONE).rejected[0].option == "data_parallel"
    assert choose_strategy(Config(), CPU, in_cluster=True).rejected[0].option == "single"


def test_missing_devices_are_a_resource_error():
    with pytest.raises(ResourceError, match="names GPU 5, but this machine has 2 GPUs"):
        choose_strategy(Config.of(devices=5), TWO)


# --- number of workers


def test_every_gpu_has_a_worker():
    assert workers(TWO).value == 2
    assert workers(ONE).value == 1
    assert workers(cluster(4, 2, 0)).value == 6
    assert "2 nodes × 4" in workers(cluster(4, 4)).reason
    assert workers(cluster(4, 4), gpu_mode="single_gpu").value == 1
    assert workers(Cluster.of(TWO, (1,)), TWO, devices=1).value == 1


def test_spares_take_gpus_from_the_workers():
    on_hosts: dict[str, Any] = {"parallel_strategy": "expert_parallel"}
    chosen = workers(cluster(4, 4), **on_hosts, spares=3)
    assert chosen.value == 5
    assert chosen.reason.startswith("each GPU has a worker, except the 3 of --spares: ")
    assert workers(cluster(4), **on_hosts, spares=3).value == 1
    for spares in (4, 5):
        with pytest.raises(ResourceError, match=f"--spares {spares} leaves no GPU to train on"):
            workers(cluster(4), **on_hosts, spares=spares)


def test_more_cpu_workers_than_the_memory_holds_are_refused():
    with pytest.raises(
        ResourceError, match=r"--workers 5000 needs .* of RAM for its processes alone; .* is free"
    ):
        workers(CPU, workers=5000)
    with pytest.raises(
        ResourceError, match=r"--workers 3 with --spares 5000 needs .* Lower --workers or --spares"
    ):
        workers(CPU, workers=3, spares=5000, parallel_strategy="expert_parallel")


def test_cpus_give_a_few_workers_on_one_machine_and_one_for_each_node_of_a_cluster():
    assert workers(machine(cores=2)).value == 2
    assert workers(machine(cores=64)).value == 4
    assert workers(machine(cores=1)).value == 1
    assert workers(cluster(0, 0, 0)).value == 3
    assert workers(cluster(4, 4), gpu_mode="cpu").value == 2
    assert workers(cluster()).value == 1
    assert not uses_gpus(Config.of(gpu_mode="cpu"), cluster(4))
    assert uses_gpus(Config(), cluster(4))


def test_a_flag_sets_the_number_of_workers_if_there_are_enough_devices():
    assert workers(TWO, workers=2) == Choice(2, "set by --workers 2; this machine has 2 GPUs")
    assert workers(cluster(4, 4), workers=3).value == 3
    assert workers(machine(cores=1), workers=16).value == 16, "a local cluster declares its own CPU slots"
    assert workers(cluster(0, 0, cpus=4), workers=8).value == 8


@pytest.mark.parametrize(
    ("where", "given", "words"),
    [
        (
            TWO,
            {"workers": 8},
            ("--workers 8 needs 8 GPUs", "this machine has 2 GPUs", "Lower --workers", "--gpu-mode cpu"),
        ),
        (
            cluster(2),
            {"workers": 8},
            ("--workers 8 needs 8 GPUs", "the cluster has 2 GPUs (1 node × 2)", "add nodes"),
        ),
        (cluster(2, most_gpus=6), {"workers": 8}, ("needs 8 GPUs", "has 2 GPUs", "autoscaler reaches 6")),
        (cluster(0, cpus=4), {"workers": 5}, ("needs 5 CPUs", "the cluster has 4 CPUs (1 node × 4)")),
        (cluster(2, cpus=4), {"workers": 5, "gpu_mode": "cpu"}, ("needs 5 CPUs", "has 4 CPUs")),
        (cluster(1), {"gpu_mode": "multi_gpu"}, ("multi_gpu needs two GPUs or more", "1 was found")),
        (
            cluster(0),
            {"gpu_mode": "multi_gpu", "workers": 2},
            ("multi_gpu needs two GPUs or more", "0 were found"),
        ),
        (cluster(0), {"gpu_mode": "single_gpu"}, ("single_gpu needs one GPU", "0 were found")),
        (BROKEN, {"gpu_mode": "multi_gpu"}, ("0 were found", "but torch sees none")),
    ],
)
def test_too_many_workers_are_refused_with_both_numbers(
    where: Cluster | Inventory, given: dict[str, Any], words: tuple[str, ...]
):
    with pytest.raises(ResourceError) as caught:
        workers(where, **given)
    assert caught.value.exit_code == 3
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_autoscaler_that_reaches_no_more_is_not_named():
    with pytest.raises(ResourceError) as caught:
        workers(cluster(2, most_gpus=2), workers=8)
    assert "autoscaler" not in str(caught.value)


def test_an_autoscaler_can_add_missing_devices():
    chosen = workers(cluster(2, most_gpus=8), workers=8)
    assert chosen.value == 8
    assert "has 2 GPUs" in chosen.reason
    assert "autoscaler can reach 8" in chosen.reason
    assert workers(cluster(2, most_gpus=8)).value == 2, "auto takes the present GPUs"
    assert workers(cluster(0, most_gpus=8)).value == 8
    assert workers(cluster(0, cpus=2, most_cpus=16), workers=10).value == 10
    assert workers(cluster(0, most_gpus=2), gpu_mode="multi_gpu").value == 2


def test_devices_cannot_be_chosen_in_a_cluster():
    with pytest.raises(UserError, match=r"--devices 0,1 names GPUs of this machine.*--workers"):
        workers(cluster(2), devices=(0, 1))


def test_gpu_modes_auto_and_cpu_demand_no_gpu():
    for mode in ("auto", "cpu"):
        check_gpu_mode(Config.of(gpu_mode=mode), 0, None)


def test_gpu_modes_accept_as_many_gpus_as_they_name():
    check_gpu_mode(Config.of(gpu_mode="single_gpu"), 1, None)
    check_gpu_mode(Config.of(gpu_mode="multi_gpu"), 2, None)


@pytest.mark.parametrize(
    ("num_gpus", "error", "found"),
    [
        (0, "no driver", "0 were found: no driver."),
        (0, None, "0 were found."),
        (1, "no driver", "1 was found."),
    ],
)
def test_the_error_of_the_driver_explains_why_there_is_no_gpu(num_gpus: int, error: str | None, found: str):
    with pytest.raises(ResourceError) as caught:
        check_gpu_mode(Config.of(gpu_mode="multi_gpu"), num_gpus, error)
    assert found in str(caught.value)


# --- backend


@pytest.mark.parametrize(
    ("backend", "on_gpu", "expected"),
    [
        ("auto", True, "nccl"),
        ("auto", False, "gloo"),
        ("gloo", True, "gloo"),
        ("gloo", False, "gloo"),
        ("nccl", True, "nccl"),
    ],
)
def test_the_device_sets_the_backend_unless_a_flag_does(backend: str, on_gpu: bool, expected: str):
    chosen = choose_backend(Config.of(backend=backend), on_gpu, 4)
    assert chosen.value == expected
    assert (chosen.rejected == ()) == (backend != "auto")


def test_nccl_without_gpus_is_a_resource_error():
    with pytest.raises(
        ResourceError,
        match=r"--backend nccl needs a GPU for each of the 4 workers; they train on CPUs\. Use --backend gloo",  # noqa: E501
    ):
        choose_backend(Config.of(backend="nccl"), False, 4)


# --- sharding

BIG = model(parameters=10**9, trainable=10**9, blocks=10)  # 16 GB of state


def needed_bytes(
    form: ShardingForm,
    facts: ModelFacts = BIG,
    count: int = 4,
    offload: bool = False,
    recompute: bool = False,
) -> float:
    return estimate_memory(facts, 1, recompute, None, ModelSharding(count, form, offload)).total


def chosen_sharding(
    limit_bytes: float, facts: ModelFacts = BIG, count: int = 4, on_gpu: bool = True, **given: Any
) -> Choice[ShardingForm]:
    return choose_sharding(Config.of(**given), facts, count, limit_bytes, on_gpu)


def test_the_least_sharding_that_lets_one_sample_fit_is_chosen():
    assert needed_bytes("none") > needed_bytes("zero2") > needed_bytes("zero3", recompute=True)
    assert chosen_sharding(needed_bytes("none")).value == "none"
    assert chosen_sharding(needed_bytes("none", recompute=True) - 1).value == "zero2"
    assert chosen_sharding(needed_bytes("zero2")).value == "zero2"
    assert chosen_sharding(needed_bytes("zero2", recompute=True) - 1).value == "zero3"


def test_recomputation_is_tried_before_sharding():
    facts = model(blocks=8, activation_bytes=8.0 * GIB, block_bytes=8.0 * GIB)
    limit_bytes = needed_bytes("none", facts) - 1
    assert chosen_sharding(limit_bytes, facts).value == "none"
    assert needed_bytes("none", facts, recompute=True) < limit_bytes
    assert chosen_sharding(limit_bytes, facts, activation_checkpointing="off").value != "none"
    assert bytes_text(needed_bytes("none", facts)) in chosen_sharding(80.0 * GIB, facts).reason, (
        "nothing is recomputed if memory is not short"
    )


def test_the_reason_says_why_a_model_that_fits_is_not_sharded():
    chosen = chosen_sharding(80.0 * GIB)
    assert [rejected.option for rejected in chosen.rejected] == ["zero2", "zero3"]
    assert "costs speed" in chosen.rejected[0].why
    tight = chosen_sharding(needed_bytes("zero2"))
    assert tight.rejected[0].option == "none"
    assert "would need" in tight.rejected[0].why


def test_the_finest_sharding_is_chosen_if_nothing_fits():
    chosen = chosen_sharding(GIB / 100)
    assert chosen.value == "zero3"
    assert "more than" in chosen.reason


def test_a_flag_sets_the_sharding():
    for form in ("none", "zero2", "zero3"):
        assert chosen_sharding(80.0 * GIB, sharding=form) == Choice(form, f"set by --sharding {form}")
    assert chosen_sharding(1.0, sharding="none").value == "none"


def test_one_worker_cpus_and_no_auto_shard_nothing():
    assert chosen_sharding(1.0, count=1).value == "none"
    assert chosen_sharding(1.0, on_gpu=False).value == "none"
    assert chosen_sharding(1.0, auto=False) == Choice("none", NO_AUTO)


def test_offloading_needs_shards():
    assert chosen_sharding(80.0 * GIB, cpu_offload=True).value == "zero2"
    assert (
        chosen_sharding(needed_bytes("zero2", offload=True, recompute=True) - 1, cpu_offload=True).value
        == "zero3"
    )
    assert chosen_sharding(80.0 * GIB, count=1, cpu_offload=True).value == "zero2"
    assert "--cpu-offload" in chosen_sharding(80.0 * GIB, cpu_offload=True, auto=False).reason


@pytest.mark.parametrize("flag", ["cpu_offload", "sync_batchnorm"])
def test_settings_for_gpus_only_are_refused_on_cpus(flag: str):
    given: dict[str, Any] = {flag: True}
    name = flag.replace("_", "-")
    with pytest.raises(
        ResourceError,
        match=f"^--{name} works for workers with GPUs, and these train on CPUs; leave it out",
    ):
        chosen_sharding(1.0, on_gpu=False, **given)
    chosen_sharding(1.0, on_gpu=True, **given)


def test_workers_leave_a_cpu_to_the_tasks_that_compute_the_data():
    computed = model(has_data_tasks=True)
    where = cluster(0, 0)
    cpus = where.cpus
    check_data_tasks(computed, cpus - 1, where, on_gpu=False)
    check_data_tasks(computed, cpus, where, on_gpu=True)
    check_data_tasks(model(), cpus, where, on_gpu=False)
    with pytest.raises(ResourceError, match=rf"need a CPU, and {cpus} workers take all.*materialize"):
        check_data_tasks(computed, cpus, where, on_gpu=False)
