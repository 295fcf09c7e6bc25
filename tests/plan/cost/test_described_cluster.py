"""Plans of large models for clusters that are not there, against figures computed by hand."""

from __future__ import annotations

from functools import cache

import pytest

from harness.fakes.inventories import model
from harness.lm.large_models import CONFIGS, PARAMETERS, LargeModel
from orchestrator.config.settings import Config
from orchestrator.measure.tracing.model_facts import model_facts
from orchestrator.plan.cost.cluster_spec import cluster_of, inventory_of, larger_clusters, parse_cluster
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.planning import Plan, plan
from orchestrator.types import Rejected, bytes_text

TOKENS = 512
QWEN = "Qwen3-30B-A3B"
QWEN_EXPERTS = 48 * 128 * 3 * 2048 * 768
QWEN_DENSE = PARAMETERS[QWEN] - QWEN_EXPERTS


@cache
def facts(name: str) -> ModelFacts:
    return model_facts(LargeModel(CONFIGS[name], TOKENS), "cuda", "bf16")


def planned(name: str, cluster: str) -> Plan:
    spec = parse_cluster(cluster)
    return plan(Config.of(evolution="off"), inventory_of(spec), facts(name), None, cluster_of(spec))


def test_a_cluster_by_its_short_name() -> None:
    assert parse_cluster("8xH100") == parse_cluster("gpus=8,gpu=h100")
    assert parse_cluster("2x8xH100,net=400gbit") == parse_cluster("nodes=2,gpus=8,gpu=h100,net=400gbit")
    spec = parse_cluster("2x8xH100")
    cluster = cluster_of(spec)
    assert cluster is not None
    assert [node.gpus for node in cluster.nodes] == [8, 8]
    assert inventory_of(spec).min_gpu_memory == 80e9
    assert cluster_of(parse_cluster("1xH200")) is None


def test_larger_clusters_fill_a_node_before_they_add_one() -> None:
    sizes = [(spec.nodes, spec.gpus) for spec in larger_clusters(parse_cluster("6xH100"))]
    assert sizes[:4] == [(1, 7), (1, 8), (2, 8), (3, 8)]
    assert sizes == sorted(sizes)
    assert all(nodes * gpus <= 4096 for nodes, gpus in sizes)


@pytest.mark.parametrize("in_cluster", [False, True])
def test_the_strategy_on_a_described_cluster_says_nothing_of_ray(in_cluster: bool) -> None:
    spec = parse_cluster("2x8xH100")
    chosen = plan(Config(), inventory_of(spec), model(), None, cluster_of(spec), in_cluster).strategy
    assert chosen.value == "data_parallel"
    assert chosen.reason == "the cluster has 16 GPUs (2 nodes × 8)"
    assert Rejected("single", "the other devices would be idle") in chosen.rejected


@pytest.mark.extended
def test_flops_of_a_forward_pass_are_those_of_its_products() -> None:
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512  # query and output; key and value
    experts = 2048 * 128 + 8 * 3 * 2048 * 768  # the router, and eight experts
    products = 48 * (attention + experts) + 2048 * 151_936
    causal = 48 * 2 * 32 * TOKENS**2 * 128
    assert facts(QWEN).flops_per_sample == pytest.approx(2 * TOKENS * products + causal, rel=1e-3)
    dense = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336) + 4096 * 128_256
    causal = 32 * 2 * 32 * TOKENS**2 * 128
    assert facts("Llama-3-8B").flops_per_sample == pytest.approx(2 * TOKENS * dense + causal, rel=1e-3)


def test_facts_count_experts_and_the_dense_part() -> None:
    found = facts(QWEN)
    assert (found.parameters, found.expert_parameters) == (QWEN_DENSE + QWEN_EXPERTS, QWEN_EXPERTS)
    assert (found.experts, found.moe_layers, found.weight_bytes) == (128, 48, 4.0)
    assert facts("Llama-3-8B").experts == 0


def test_the_state_of_a_host_is_the_dense_part_and_its_experts() -> None:
    """Sixteen bytes for each parameter: weight, gradient and two moments; 8 of 128 experts a host."""
    chosen = planned(QWEN, "2x8xH100")
    assert chosen.strategy.value == "expert_parallel"
    local = QWEN_DENSE + QWEN_EXPERTS / 16
    assert chosen.memory.parameters == pytest.approx(4 * local)
    assert chosen.memory.gradients == pytest.approx(4 * local)
    assert chosen.memory.optimizer == pytest.approx(8 * local)
    assert chosen.memory.fits


def test_a_dense_model_is_sharded() -> None:
    """Eight shards of 16 bytes a parameter; weights, and gradients of one of 32 blocks and of the
    embeddings, are whole."""
    chosen = planned("Llama-3-8B", "8xA100")
    assert (chosen.strategy.value, chosen.sharding.value) == ("data_parallel", "zero2")
    shard = PARAMETERS["Llama-3-8B"] / 8
    whole = PARAMETERS["Llama-3-8B"]
    outer = 2 * 128_256 * 4096 + 4096
    state = chosen.memory.parameters + chosen.memory.gradients + chosen.memory.optimizer
    assert state == pytest.approx(
        4 * (shard + whole) + 4 * (shard + outer + (whole - outer) / 32) + 8 * shard
    )


def test_the_dense_part_is_sharded_where_it_does_not_fit() -> None:
    """Eight hosts of 80 GB: 16 experts each, and of the dense part a shard next to its gathered weights."""
    chosen = planned(QWEN, "8xH100")
    assert (chosen.strategy.value, chosen.sharding.value) == ("expert_parallel", "zero2")
    assert "does not fit" in chosen.sharding.reason
    experts = QWEN_EXPERTS / 8
    assert chosen.memory.parameters == pytest.approx(4 * (experts + QWEN_DENSE / 8 + QWEN_DENSE))
    assert chosen.memory.optimizer == pytest.approx(8 * (experts + QWEN_DENSE / 8))
    assert chosen.memory.fits
    two_sets = bytes_text(2 * 12 * (QWEN_EXPERTS + QWEN_DENSE))
    assert f"need {two_sets} of Ray's object store" in chosen.snapshots.rejected[0].why, "shards included"


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", [QWEN, *sorted(CONFIGS.keys() - {QWEN})])
def test_more_hosts_need_less_memory_each(name: str) -> None:
    clusters = ("2x8xH200", "4x8xH200", "8x8xH200", "16x8xH200")
    memories = [planned(name, cluster).memory for cluster in clusters]
    states = [memory.parameters + memory.gradients + memory.optimizer for memory in memories]
    forms = [planned(name, cluster).sharding.value for cluster in clusters]
    same = [index for index, form in enumerate(forms) if form == forms[-1]]
    assert [states[index] for index in same] == sorted((states[index] for index in same), reverse=True)
