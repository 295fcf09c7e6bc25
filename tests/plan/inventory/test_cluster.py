"""The devices of a cluster, those that its autoscaler can reach, and messages about them."""

from __future__ import annotations

import pytest

from harness.fakes.inventories import cluster, gpu, machine
from orchestrator.errors import ResourceError
from orchestrator.plan.inventory.cluster import Cluster, Node, chosen_gpus


def test_a_machine_is_a_cluster_of_one_node():
    local = Cluster.of(machine(gpu(0), gpu(1), cores=6))
    assert local == Cluster((Node("127.0.0.1", cpus=6, gpus=2, cores=6),), joined=False)
    assert (local.gpus, local.cpus, local.autoscaling) == (2, 6, False)
    assert Cluster.of(machine()).gpus == 0


def test_devices_limits_the_gpus_of_a_machine():
    mixed = machine(gpu(0), gpu(1, total=2**34), gpu(2))
    assert Cluster.of(mixed, (2, 0)).gpus == 2
    assert Cluster.of(mixed).gpus == 3


def test_devices_are_summed_over_nodes_and_an_autoscaler_reaches_more():
    fixed = cluster(4, 2, 0, cpus=3)
    assert (fixed.gpus, fixed.cpus, fixed.autoscaling) == (6, 9, False)
    assert (fixed.reachable_gpus, fixed.reachable_cpus) == (6, 9)
    grown = cluster(0, most_gpus=16, most_cpus=4)
    assert grown.autoscaling
    assert (grown.reachable_gpus, grown.reachable_cpus) == (16, 8)


@pytest.mark.parametrize(
    ("nodes", "gpus", "cpus"),
    [
        (cluster(2), "the cluster has 2 GPUs (1 node × 2)", "the cluster has 8 CPUs (1 node × 8)"),
        (cluster(8, 8), "the cluster has 16 GPUs (2 nodes × 8)", "the cluster has 16 CPUs (2 nodes × 8)"),
        (
            cluster(4, 0, 1),
            "the cluster has 5 GPUs (3 nodes: 4 + 0 + 1)",
            "the cluster has 24 CPUs (3 nodes × 8)",
        ),
        (cluster(), "the cluster has 0 GPUs (0 nodes)", "the cluster has 0 CPUs (0 nodes)"),
        (Cluster.of(machine(gpu(), cores=2)), "this machine has 1 GPU", "this machine has 2 CPUs"),
    ],
)
def test_the_text_names_nodes_and_devices(nodes: Cluster, gpus: str, cpus: str):
    assert (nodes.text("GPUs"), nodes.text("CPUs")) == (gpus, cpus)


@pytest.mark.parametrize(
    ("nodes", "workers", "on_gpu", "expected"),
    [
        (Cluster.of(machine(gpu(), gpu(1))), 2, True, 2),
        (Cluster.of(machine()), 5, False, 5),
        (cluster(4, 4), 8, True, 4),
        (cluster(4, 4), 3, True, 3),
        (cluster(0, most_gpus=8), 8, True, 8),
        (cluster(0, 0, 0), 7, False, 3),
        (cluster(0, 0), 1, False, 1),
    ],
)
def test_the_most_workers_on_a_node(nodes: Cluster, workers: int, on_gpu: bool, expected: int):
    assert nodes.workers_on_node(workers, on_gpu) == expected


# --- chosen GPUs


def test_gpus_keep_the_order_of_the_flag():
    three = machine(gpu(0), gpu(1), gpu(2))
    assert [gpu.index for gpu in chosen_gpus(three, (2, 0))] == [2, 0]
    assert chosen_gpus(three, ()) == three.gpus


def test_a_missing_gpu_is_refused_with_the_present_ones():
    with pytest.raises(
        ResourceError,
        match=r"^--devices 0,2,5 names GPU 2, 5, but this machine has 2 GPUs, counted from 0 to 1",
    ) as caught:
        chosen_gpus(machine(gpu(0), gpu(1)), (0, 2, 5))
    assert caught.value.exit_code == 3
    with pytest.raises(ResourceError, match=r"has 0 GPUs: the driver is too old\. Leave it out"):
        chosen_gpus(machine(gpu_error="the driver is too old"), (0,))


def test_a_count_given_as_a_device_names_the_flag_for_counts():
    """In Lightning, --devices 4 means four GPUs."""
    four = machine(*(gpu(index) for index in range(4)))
    with pytest.raises(ResourceError, match="for a number of GPUs use --workers 4"):
        chosen_gpus(four, (4,))
    with pytest.raises(ResourceError) as caught:
        chosen_gpus(four, (9,))
    assert "--workers" not in str(caught.value)
