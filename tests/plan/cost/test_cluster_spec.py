"""``--cluster``: the nodes, GPUs and network that it describes."""

from __future__ import annotations

import pytest

from orchestrator.errors import UserError
from orchestrator.plan.cost.cluster_spec import ClusterSpec, machine_of, nodes_of, parse_cluster
from orchestrator.plan.cost.devices import catalogue
from orchestrator.plan.cost.machine import Parallelism
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import MicroBatchOps, ProductOp


def test_a_cluster_is_parsed():
    spec = parse_cluster("nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit")
    assert spec == ClusterSpec(nodes=16, gpus=8, gpu="h200", link="nvlink", net_gbit=400.0, nics=1)
    assert spec.devices == 128
    assert parse_cluster("gpu=L4").link == "pcie"
    assert parse_cluster("gpu=h200,net=50gbyte, nics=8").net_gbit == 400.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs the GPU"),
        ("nodes=2", "needs the GPU"),
        ("gpu=h300", "did you mean 'h.00'"),
        ("gpu=h200,node=2", r"did you mean nodes=2\?"),
        ("gpu=h200,noodes=2", "did you mean 'nodes'"),
        ("node=p4d.24xlarge", r"did you mean 'p4de.24xlarge'\?\); known are dgx-b200"),
        ("8xA100,node=p5.48xlarge", "node=p5.48xlarge has H100, but gpu=a100 is given"),
        ("gpu=h200,nodes", "is not understood"),
        ("gpu=h200,nodes=0", "a whole number from 1 on"),
        ("gpu=h200,gpus=-8", "a whole number from 1 on"),
        ("gpu=h200,gpus=1.5", "a whole number from 1 on"),
        ("gpu=h200,net=fast", "a rate such as 400gbit"),
        ("gpu=h200,net=0gbit", "a rate such as 400gbit"),
        ("gpu=l4,link=nvlink", "has no NVLink"),
        ("gpu=h200,link=infiniband", "must be nvlink or pcie"),
        ("gpu=h200,nodes=1024,gpus=8", "up to 4,096"),
        ("H100", r"'H100' is not understood \(did you mean 1xH100\?\)"),
        ("8h100", r"did you mean 8xH100\?"),
        ("8 x H100,net=400gbit", r"did you mean 8xH100\?"),
        ("8h999", r"'8h999' is not understood; give 8xH100"),
        ("4xH100,4xA100", "different GPUs cannot be planned; .* --cluster 4xH100 and --cluster 4xA100$"),
        ("8xH100+8xA100", "different GPUs cannot be planned; .* --cluster 8xH100 and --cluster 8xA100$"),
        ("2x8xH100+a100", "is not understood"),
        ("4xH100,4xH100", "gpus is given twice"),
    ],
)
def test_a_wrong_cluster_is_refused(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "nics", "net_gbit"),
    [
        ("64x8xH100", 8, 400.0),
        ("16x8xA100", 8, 200.0),
        ("4x8xH200,node=p5en.48xlarge", 16, 200.0),
        ("nodes=4,node=P4DE.24xlarge", 4, 100.0),
        ("2x1xH100", 1, 400.0),
        ("2x4xH100", 4, 400.0),
        ("2x16xH100", 8, 400.0),
        ("2x4xL4", 1, 50.0),
        ("2x8xH100,nics=4", 4, 400.0),
        ("2x8xH100,net=100gbit", 1, 100.0),
        ("2x8xRTX4090", 1, 100.0),
    ],
)
def test_a_network_that_is_not_given_is_that_of_a_known_node(text: str, nics: int, net_gbit: float):
    """Of a node with fewer GPUs, their share of it."""
    spec = parse_cluster(text)
    assert (spec.nics, spec.net_gbit) == (nics, net_gbit)


def test_every_known_node_has_a_known_gpu_and_a_source():
    for name, node in catalogue().nodes.items():
        spec = parse_cluster(f"nodes=2,node={name}")
        assert (spec.gpu, spec.gpus, spec.node, spec.network_assumed) == (node.gpu, node.gpus, name, False)
        assert node.source
    assert [name for name in catalogue().devices if not nodes_of(name)] == ["rtx4090"]


def test_nodes_of_h100_scale_to_hundreds_of_devices():
    """A transformer of 1.3 billion parameters: 16 GiFLOP of products to a step's 5 GB of gradients."""
    products = (ProductOp(16384, 2048, 8192, precision="bf16", times=150),)
    ops = MicroBatchOps(8, products=products, parameters=1_300_000_000)
    cluster = machine_of(parse_cluster("64x8xH100"))

    def speed(devices: int) -> float:
        strategy = "data_parallel" if devices > 1 else "single"
        return predict(ops, cluster, Parallelism(devices, strategy)).samples_per_second

    assert speed(16) / speed(8) > 1.8
    assert speed(512) / speed(8) > 0.8 * 64


def test_faster_links_shorten_the_step():
    ops = MicroBatchOps(1, products=(ProductOp(4096, 4096, 4096, precision="bf16"),), parameters=10**9)
    from_slow_to_fast = [
        "nodes=2,gpus=8,gpu=h200,link=pcie,net=10gbit",
        "nodes=2,gpus=8,gpu=h200,net=10gbit",
        "nodes=2,gpus=8,gpu=h200,net=400gbit",
    ]
    parallelism = Parallelism(16, "data_parallel")
    machines = [machine_of(parse_cluster(text)) for text in from_slow_to_fast]
    seconds = [predict(ops, cluster, parallelism).step_seconds for cluster in machines]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu=h200,net=1gbit", "1 × 1 H200, nvlink, 1 Gbit/s between nodes"),
        ("nodes=2,gpu=l4,gpus=4,nics=2", "2 × 4 L4, pcie, 2 × 100 Gbit/s between nodes"),
    ],
)
def test_a_cluster_describes_itself(text: str, expected: str):
    assert parse_cluster(text).text() == expected
