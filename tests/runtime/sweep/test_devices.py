"""Tests of the share of the devices that each worker of a sweep gets."""

from __future__ import annotations

import pytest

from harness.fakes.inventories import gpu, machine
from orchestrator.config.settings import Config
from orchestrator.config.sweep.space_parser import parse_space, points_space
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.errors import ResourceError
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.devices import SweepDevices, check_feasible


def single_node(cpus: int, cores: int, joined: bool = False) -> Cluster:
    return Cluster((Node("here", cpus, 0, cores),), joined=joined)


def test_the_cores_are_shared_by_the_largest_possible_number_of_workers() -> None:
    space = parse_space(["workers=1,2,3,16"])
    devices = SweepDevices.of(Config(), space, machine(cores=4), single_node(4, 4))
    assert (devices.cores, devices.devices, devices.on_gpu) == (1, 4, False)
    assert [devices.num_workers(Config.of(workers=count)) for count in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(
        ResourceError, match="16 workers with 1 core each were asked for; this machine has 4 CPUs"
    ):
        devices.num_workers(Config.of(workers=16))


def test_a_single_worker_gets_all_cores() -> None:
    space = parse_space(["batch-size=1,2"])
    devices = SweepDevices.of(Config(), space, machine(cores=4), single_node(4, 4))
    assert (devices.cores, devices.num_workers(Config())) == (4, 1)


def test_workers_that_the_plan_chooses_fit() -> None:
    config = Config.of(parallel_strategy="data_parallel")
    devices = SweepDevices.of(config, parse_space(["batch-size=1,2"]), machine(cores=2), single_node(2, 2))
    assert (devices.cores, devices.num_workers(config)) == (1, 2)


def test_a_node_with_fewer_slots_than_cores_has_workers_by_its_slots() -> None:
    one_slot = single_node(1, 2, joined=True)
    devices = SweepDevices.of(Config(), parse_space(["workers=1,2"]), machine(cores=2), one_slot)
    assert (devices.cores, devices.devices, devices.num_workers(Config.of(workers=1))) == (1, 1, 1)


@pytest.mark.parametrize("config", [Config.of(workers=2), Config.of(parallel_strategy="data_parallel")])
def test_given_points_without_a_number_of_workers_count_too(config: Config) -> None:
    space = points_space([{"workers": 1}, {"batch_size": 8}], "points.yaml")
    devices = SweepDevices.of(config, space, machine(cores=2), single_node(2, 2))
    assert (devices.cores, devices.num_workers(config.but(batch_size=8))) == (1, 2)


def test_a_number_of_workers_that_does_not_fit_does_not_count() -> None:
    space = points_space([{"workers": 1}, {"batch_size": 8}], "points.yaml")
    devices = SweepDevices.of(Config.of(workers=64), space, machine(cores=2), single_node(2, 2))
    assert devices.cores == 2


def test_workers_are_spread_over_the_nodes() -> None:
    three_nodes = Cluster(tuple(Node(f"n{number}", 3, 0, 3) for number in range(3)), joined=True)
    devices = SweepDevices.of(Config(), parse_space(["workers=1,3"]), machine(cores=3), three_nodes)
    assert (devices.cores, devices.devices) == (3, 3)


@pytest.mark.parametrize(
    ("inventory", "found"),
    [
        (machine(), "the device is the CPU"),
        (machine(gpu(capability=(8, 0))), "GPU of 80 GiB has compute capability 8.0"),
    ],
    ids=["cpu", "gpu without fp8"],
)
def test_fp8_is_infeasible_on_devices_without_it(inventory: Inventory, found: str) -> None:
    space = parse_space(["precision=fp32,fp8"])
    devices = SweepDevices.of(Config(), space, inventory, Cluster.of(inventory))
    assert devices.workers_or_refusal(Config(), {"precision": "fp32"}) == 1
    row = devices.workers_or_refusal(Config(), {"precision": "fp8"})
    assert isinstance(row, TrialRow)
    assert row.status == "infeasible"
    assert found in row.reason


@pytest.mark.parametrize("setting", ["cpu_offload", "sync_batchnorm"])
def test_settings_for_gpus_are_infeasible_on_cpus(setting: str) -> None:
    config = Config.of(workers=2, parallel_strategy="data_parallel")
    space = parse_space([f"{setting}=true,false"])
    devices = SweepDevices.of(config, space, machine(), Cluster.of(machine()))
    assert devices.workers_or_refusal(config, {setting: False}) == 2
    row = devices.workers_or_refusal(config, {setting: True})
    assert isinstance(row, TrialRow)
    assert row.status == "infeasible"
    assert "these train on CPUs" in row.reason


def test_fp8_is_tried_on_gpus_that_have_it() -> None:
    inventory = machine(gpu())
    devices = SweepDevices.of(Config(), parse_space(["precision=fp8"]), inventory, Cluster.of(inventory))
    assert devices.workers_or_refusal(Config(), {"precision": "fp8"}) == 1


def test_fp8_alone_is_refused_before_a_cluster_starts() -> None:
    with pytest.raises(ResourceError, match=r"none of the 1 points can be tried here; the first: .*fp8"):
        check_feasible(Sweep(parse_space(["precision=fp8"])), Config(), machine())
