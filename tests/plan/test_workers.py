"""One device or several, how many workers, over what they talk, and what is divided among them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, ShardingForm, estimate_memory
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.planning import Plan, choose_precision, choose_worker_device, plan
from orchestrator.plan.workers import (
    PLAIN,
    asks_for_workers,
    check_gpu_mode,
    choose_backend,
    choose_sharding,
    choose_strategy,
    choose_workers,
    on_gpus,
)
from orchestrator.types import GIB, Choice, bytes_text
from tests.support.inventories import cluster, gpu, machine, model

CPU, ONE, TWO = machine(), machine(gpu()), machine(gpu(), gpu(1))
BROKEN = machine(gpu_error="the driver shows 2 GPU(s), but torch sees none")


def strategy(inventory: Inventory, in_cluster: bool = False, **given: Any) -> str:
    found = choose_strategy(Config.of(**given), inventory, in_cluster)
    assert len(found.reason) > 3
    return found.value


def workers(where: Cluster | Inventory, inventory: Inventory = CPU, **given: Any) -> Choice[int]:
    if isinstance(where, Inventory):
        where, inventory = Cluster.of(where), where
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
def test_strategy(inventory: Inventory, given: dict[str, Any], expected: str):
    assert strategy(inventory, **given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "data_parallel"),
        ({"workers": 1}, "single"),
        ({"gpu_mode": "cpu"}, "single"),
        ({"auto": False}, "single"),
    ],
)
def test_inside_a_cluster_the_workers_are_rays_to_place_unless_one_process_is_asked_for(
    given: dict[str, Any], expected: str
):
    assert strategy(CPU, in_cluster=True, **given) == expected


def test_the_reason_is_the_flag_or_what_was_found():
    def reason(inventory: Inventory, **given: Any) -> str:
        return choose_strategy(Config.of(**given), inventory).reason

    assert reason(CPU, workers=2) == "asked for by --workers 2"
    assert reason(TWO, devices=(1, 0)) == "asked for by --devices 1,0"
    assert reason(CPU, ray_address="local") == "asked for by --ray-address local"
    assert reason(TWO) == "2 GPUs were found: one worker for each"
    assert reason(ONE) == "one GPU was found"
    assert reason(TWO, devices=1) == "--devices 1 is one GPU"
    assert reason(BROKEN) == BROKEN.gpu_error
    assert reason(TWO, auto=False) == PLAIN
    assert (
        reason(ONE, parallel_strategy="expert_parallel", workers=1)
        == "asked for by --parallel-strategy expert_parallel"
    )
    assert (
        asks_for_workers(Config.of(parallel_strategy="expert_parallel"))
        == "--parallel-strategy expert_parallel"
    )
    assert asks_for_workers(Config.of(gate="primary")) is None


def test_what_was_not_taken_is_told():
    assert choose_strategy(Config(), TWO).rejected[0].option == "single"
    assert choose_strategy(Config(), ONE).rejected[0].option == "data_parallel"
    assert choose_strategy(Config(), CPU, in_cluster=True).rejected[0].option == "single"


def test_devices_that_are_not_there_are_a_resource_error():
    with pytest.raises(ResourceError, match="names GPU 5, but this machine has 2 GPUs"):
        choose_strategy(Config.of(devices=5), TWO)


# --- how many


def test_every_gpu_has_a_worker():
    assert workers(TWO).value == 2
    assert workers(ONE).value == 1
    assert workers(cluster(4, 2, 0)).value == 6
    assert "2 nodes × 4" in workers(cluster(4, 4)).reason
    assert workers(cluster(4, 4), gpu_mode="single_gpu").value == 1
    assert workers(Cluster.of(TWO, (1,)), TWO, devices=1).value == 1


def test_more_cpu_workers_than_the_memory_holds_are_refused():
    with pytest.raises(
        ResourceError, match=r"--workers 5000 needs .* of RAM for its processes alone; .* are free"
    ):
        workers(CPU, workers=5000)
    with pytest.raises(
        ResourceError, match=r"--workers 3 with --spares 5000 needs .* Lower --workers or --spares"
    ):
        workers(CPU, workers=3, spares=5000, parallel_strategy="expert_parallel")


def test_on_cpus_a_few_here_and_one_for_each_node_elsewhere():
    assert workers(machine(cores=2)).value == 2
    assert workers(machine(cores=64)).value == 4
    assert workers(machine(cores=1)).value == 1
    assert workers(cluster(0, 0, 0)).value == 3
    assert workers(cluster(4, 4), gpu_mode="cpu").value == 2
    assert workers(cluster()).value == 1
    assert not on_gpus(Config.of(gpu_mode="cpu"), cluster(4))
    assert on_gpus(Config(), cluster(4))


def test_a_number_asked_for_is_given_where_there_are_so_many():
    assert workers(TWO, workers=2) == Choice(2, "asked for by --workers 2; this machine has 2 GPUs")
    assert workers(cluster(4, 4), workers=3).value == 3
    assert workers(machine(cores=1), workers=16).value == 16, "on our own CPUs we declare the slots"
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
def test_more_than_there_is_names_both_numbers(
    where: Cluster | Inventory, given: dict[str, Any], words: tuple[str, ...]
):
    with pytest.raises(ResourceError) as caught:
        workers(where, **given)
    assert caught.value.exit_code == 3
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_autoscaler_can_bring_what_is_missing():
    found = workers(cluster(2, most_gpus=8), workers=8)
    assert found.value == 8
    assert "has 2 GPUs" in found.reason
    assert "autoscaler can bring 8" in found.reason
    assert workers(cluster(2, most_gpus=8)).value == 2, "auto takes what is there"
    assert workers(cluster(0, most_gpus=8)).value == 8
    assert workers(cluster(0, cpus=2, most_cpus=16), workers=10).value == 10
    assert workers(cluster(0, most_gpus=2), gpu_mode="multi_gpu").value == 2


def test_gpus_of_a_cluster_are_not_ours_to_choose():
    with pytest.raises(UserError, match=r"--devices 0,1 names GPUs of this machine.*--workers"):
        workers(cluster(2), devices=(0, 1))


def test_a_mode_that_demands_nothing_is_content():
    for mode in ("auto", "cpu"):
        check_gpu_mode(Config.of(gpu_mode=mode), 0, None)


# --- backend


@pytest.mark.parametrize(("asked", "on_gpu", "expected"), [
    ("auto", True, "nccl"), ("auto", False, "gloo"), ("gloo", True, "gloo"), ("gloo", False, "gloo"), ("nccl", True, "nccl"),
])  # fmt: skip
def test_backend(asked: str, on_gpu: bool, expected: str):
    found = choose_backend(Config.of(backend=asked), on_gpu, 4)
    assert found.value == expected
    assert (found.rejected == ()) == (asked != "auto")


def test_nccl_without_gpus_is_a_resource_error():
    with pytest.raises(
        ResourceError,
        match=r"--backend nccl needs a GPU for each of the 4 workers; they train on CPUs\. Use --backend gloo",
    ):
        choose_backend(Config.of(backend="nccl"), False, 4)


# --- sharding

BIG = model(parameters=10**9, trainable=10**9, blocks=10)  # 16 GB of state


def need(
    form: ShardingForm,
    facts: ModelFacts = BIG,
    count: int = 4,
    offload: bool = False,
    recompute: bool = False,
) -> float:
    return estimate_memory(facts, 1, recompute, None, ModelSharding(count, form, offload)).total


def sharding(
    limit: float, facts: ModelFacts = BIG, count: int = 4, on_gpu: bool = True, **given: Any
) -> Choice[ShardingForm]:
    return choose_sharding(Config.of(**given), facts, count, limit, on_gpu)


def test_as_little_is_divided_as_lets_one_sample_in():
    assert need("none") > need("zero2") > need("zero3", recompute=True)
    assert sharding(need("none")).value == "none"
    assert sharding(need("none", recompute=True) - 1).value == "zero2"
    assert sharding(need("zero2")).value == "zero2"
    assert sharding(need("zero2", recompute=True) - 1).value == "zero3"


def test_recomputing_goes_before_dividing():
    facts = model(blocks=8, activation_bytes=8.0 * GIB, block_bytes=8.0 * GIB)
    limit = need("none", facts) - 1
    assert sharding(limit, facts).value == "none"
    assert need("none", facts, recompute=True) < limit
    assert sharding(limit, facts, activation_checkpointing="off").value != "none"
    assert bytes_text(need("none", facts)) in sharding(80.0 * GIB, facts).reason, (
        "where there is room, nothing is recomputed"
    )


def test_the_plan_says_why_it_does_not_divide_for_any_two_gpus():
    found = sharding(80.0 * GIB)
    assert [rejected.option for rejected in found.rejected] == ["zero2", "zero3"]
    assert "document 003" in found.rejected[0].why
    tight = sharding(need("zero2"))
    assert tight.rejected[0].option == "none"
    assert "would need" in tight.rejected[0].why


def test_where_nothing_fits_it_is_divided_as_far_as_can_be():
    found = sharding(GIB / 100)
    assert found.value == "zero3"
    assert "more than" in found.reason


def test_what_is_asked_for_is_given():
    for asked in ("none", "zero2", "zero3"):
        assert sharding(80.0 * GIB, sharding=asked) == Choice(asked, f"asked for by --sharding {asked}")
    assert sharding(1.0, sharding="none").value == "none"


def test_one_worker_cpus_and_no_auto_divide_nothing():
    assert sharding(1.0, count=1).value == "none"
    assert sharding(1.0, on_gpu=False).value == "none"
    assert sharding(1.0, auto=False) == Choice("none", PLAIN)


def test_offloading_needs_shards():
    assert sharding(80.0 * GIB, cpu_offload=True).value == "zero2"
    assert sharding(need("zero2", offload=True, recompute=True) - 1, cpu_offload=True).value == "zero3"
    assert sharding(80.0 * GIB, count=1, cpu_offload=True).value == "zero2"
    assert "--cpu-offload" in sharding(80.0 * GIB, cpu_offload=True, auto=False).reason


@pytest.mark.parametrize("flag", ["cpu_offload", "sync_batchnorm"])
def test_what_torch_does_on_gpus_only_is_refused_on_cpus(flag: str):
    given: dict[str, Any] = {flag: True}
    with pytest.raises(
        UserError,
        match=f"^--{flag.replace('_', '-')} works for workers with GPUs, and these train on CPUs; leave it out",
    ):
        sharding(1.0, on_gpu=False, **given)
    sharding(1.0, on_gpu=True, **given)


# --- the whole plan


def planned(
    inventory: Inventory, where: Cluster | None = None, facts: ModelFacts | None = None, **given: Any
) -> Plan:
    return plan(Config.of(**given), inventory, facts or model(), cluster=where)


def test_one_process_is_planned_as_ever():
    found = planned(ONE)
    assert [found.strategy.value, found.workers.value, found.backend.value, found.sharding.value] == [
        "single",
        1,
        "none",
        "none",
    ]
    assert found.device.value == "cuda:0"
    asked = planned(ONE, sharding="zero2").sharding
    assert (asked.value, "in place of --sharding zero2" in asked.reason) == ("none", True)
    planned(CPU, sync_batchnorm=True, backend="nccl")
    with pytest.raises(
        UserError,
        match=r"--cpu-offload .* one process \(one GPU was found\).*--parallel-strategy data_parallel",
    ):
        planned(ONE, cpu_offload=True)


def test_two_gpus_train_together():
    found = planned(TWO)
    assert [found.device.value, found.strategy.value, found.workers.value] == ["cuda", "data_parallel", 2]
    assert [found.backend.value, found.sharding.value, found.precision.value] == ["nccl", "none", "bf16"]
    assert (found.batch_size.value, found.accumulation_steps.value, found.global_batch_size.value) == (
        64,
        1,
        128,
    )
    assert found.flops_per_step == 2 * planned(ONE).flops_per_step


def test_the_smallest_and_oldest_gpu_sets_the_measure():
    mixed = machine(
        gpu(0, total=80 * GIB, free=5 * GIB),
        gpu(1, total=24 * GIB, capability=(8, 6)),
        gpu(2, total=32 * GIB, capability=(7, 0)),
    )
    found = planned(mixed)
    assert found.memory.limit == 5 * GIB
    assert (found.precision.value, found.tf32.value) == ("fp16", False)
    assert choose_precision(Config(), mixed, "cuda").value == "fp16"
    assert "24.0 GiB; planned for the smallest" in found.device.reason
    chosen = planned(mixed, devices=(0, 1))
    assert (chosen.precision.value, chosen.workers.value) == ("bf16", 2)
    assert planned(mixed, devices=(1, 2)).memory.limit == pytest.approx(0.9 * 24 * GIB)


@pytest.mark.parametrize(("cores", "count", "threads"), [(8, 2, 4), (7, 2, 3), (2, 4, 1), (8, 1, 8)])
def test_workers_share_the_cores_of_their_node(cores: int, count: int, threads: int):
    found = planned(machine(cores=cores), workers=count, parallel_strategy="data_parallel").threads
    assert found.value == threads
    assert ("workers on a node" in found.reason) == (count > 1)


def test_cores_are_shared_with_those_on_the_same_node_only():
    assert planned(machine(gpu(), gpu(1), cores=8), cluster(2, 2)).threads.value == 4
    assert planned(machine(gpu(), cores=8), cluster(1, 1, 1, 1)).threads.value == 8
    assert planned(machine(cores=8), cluster(0, 0), workers=4).threads.value == 4


def test_loader_processes_by_the_cores_of_a_worker():
    read_singly = model(gathered_bytes=None)
    found = planned(machine(gpu(), gpu(1), cores=8), facts=read_singly).loader_workers
    assert (found.value, "2 workers" in found.reason) == (3, True)
    assert planned(machine(gpu(), gpu(1), cores=2), facts=read_singly).loader_workers.value == 0
    roomy = machine(
        gpu(), gpu(1), cores=4, ram_free=12 * GIB
    )  # enough for one loader process, not for one per worker
    assert planned(roomy, facts=read_singly).prefetch.value == 2
    assert planned(roomy, cluster(1, 1), facts=read_singly, loader_workers=1).prefetch.value == 4


def test_workers_on_cpus_share_the_memory_of_their_node():
    found = planned(machine(ram_free=10 * GIB, cores=4), parallel_strategy="data_parallel")
    assert (found.workers.value, found.device.value, found.backend.value) == (4, "cpu", "gloo")
    assert found.memory.limit == 2 * GIB
    assert found.global_batch_size.value == 256
    assert planned(machine(ram_free=10 * GIB), cluster(0, 0), workers=2).memory.limit == 8 * GIB


def test_gpus_that_a_cluster_counts_and_cuda_does_not_show_leave_the_cpu():
    found = planned(CPU, cluster(2))
    assert (found.device.value, found.workers.value, found.backend.value) == ("cpu", 2, "gloo")
    assert found.device.reason == "the cluster counts 2, but CUDA shows none"
    assert choose_worker_device(Config(), BROKEN, 2).reason == BROKEN.gpu_error
    assert planned(CPU, cluster(2), gpu_mode="cpu", workers=2).device.reason == "asked for by --gpu-mode cpu"


def test_a_joined_cluster_means_workers_whatever_its_node_has():
    """The inventory is that of one worker's node: one GPU there does not make the run one process."""
    found = planned(ONE, cluster(1, 1, 1))
    assert (found.strategy.value, found.workers.value, found.device.value) == ("data_parallel", 3, "cuda")
    assert plan(Config(), ONE, model(), in_cluster=True).strategy.value == "data_parallel"


def test_a_state_that_does_not_fit_is_divided():
    found = planned(machine(*(gpu(index, total=16 * GIB) for index in range(4))), facts=BIG)
    assert found.sharding.value == "zero2"
    assert found.memory.fits
    whole = planned(machine(*(gpu(index, total=16 * GIB) for index in range(4))), facts=BIG, sharding="none")
    assert not whole.memory.fits


def test_offloading_is_in_the_estimate():
    inventory = machine(*(gpu(index, total=16 * GIB) for index in range(4)))
    found = planned(inventory, facts=BIG, cpu_offload=True)
    assert (found.sharding.value, found.memory.optimizer) == ("zero2", 0)


def test_a_resumed_run_keeps_its_global_batch_on_other_workers():
    found = plan(Config(), TWO, model(), {"global_batch_size": 256})
    assert (found.global_batch_size.value, found.global_batch_size.reason) == (256, "the run began with it")
    assert found.batch_size.value * found.accumulation_steps.value * found.workers.value == 256


def test_no_auto_with_workers_says_so_where_it_chose_plainly():
    found = planned(TWO, auto=False, workers=2)
    assert (found.precision.value, found.sharding.reason, found.workers.value) == ("fp32", PLAIN, 2)
    assert (found.batch_size.value, found.global_batch_size.value) == (32, 64)


def test_the_plan_keeps_its_order_and_its_json():
    names = list(planned(TWO).choices())
    assert names[:6] == ["device", "strategy", "workers", "backend", "sharding", "precision"]
    assert planned(TWO).to_json()["choices"]["workers"]["value"] == 2
