"""Random sequences of births, merges, prunes, moves and copies on one to four real processes, in fp64,
against the same sequence in one process, with the dense part whole or in shards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.moe.evolving import random_script, train_evolving
from harness.runs.host_runs import merge_hosts
from harness.runs.tiny_model import Tiny
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

CPU = torch.device("cpu")
STEPS = 14
SHARDINGS = ("none", "zero2", "zero3")
"""Of the dense part, in turn."""


def make_case(seed: int, hosts: int) -> tuple[Tiny, Any, Any]:
    """Return a task, a placement and a script of changes."""
    draw = random.Random(f"{seed}/{hosts}")
    sizes = tuple(tuple(draw.choice([4, 4, 6]) for _ in range(draw.randint(3, 6))) for _ in range(2))
    top_k = draw.choice([1, 2, 2, 6])  # 6: every token goes to every expert
    options: dict[str, Any] = {"jitter": 0.2} if draw.random() < 0.3 else {}
    options |= {"shared": 3} if seed % 2 else {}
    task = Tiny(sizes, top_k, samples=26, options=options)
    host_of = tuple(tuple(draw.randrange(hosts) for _ in layer) for layer in sizes)
    return task, host_of, random_script(draw, task, host_of, hosts, STEPS)


def evolve_on_host(rank: int, size: int, store: str, cases: list[Any]) -> list[dict[str, Any]]:
    results = []
    for number, (task, host_of, script) in enumerate(cases):
        with process_group_world(file_store(f"{store}-{number}", size), rank, size, CPU, "gloo", 60) as world:
            sharding = SHARDINGS[number % len(SHARDINGS)] if host_of is not None else "none"
            results.append(train_evolving(task, script, world, host_of, STEPS, sharding=sharding))
    return results


def assert_equal_to_one_process(hosts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for name in ("loss", "norm"):
        assert all(host[name] == hosts[0][name] for host in hosts), "the hosts disagree"
        assert hosts[0][name] == pytest.approx(expected[name], rel=1e-9)
    assert hosts[0]["use"] == expected["use"]
    for name in ("weights", "moments"):
        merged = merge_hosts([host[name] for host in hosts])
        assert merged.keys() == expected[name].keys()
        for key, tensor in expected[name].items():
            torch.testing.assert_close(merged[key], tensor, rtol=1e-9, atol=1e-11, msg=key)
    for host in hosts:
        # Copies on several hosts are equal to the bit.
        for key, tensor in host["weights"].items():
            others = [other["weights"][key] for other in hosts if key in other["weights"]]
            assert all(torch.equal(tensor, other) for other in others), key


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_a_random_sequence_of_changes_equals_one_process(hosts: int) -> None:
    cases = [make_case(seed, hosts) for seed in range(4)]
    kinds = {change.kind for _, _, script in cases for changes in script.values() for change in changes}
    assert kinds == {"born", "merged", "pruned", "moved", "copied"}
    results = run_ranks(evolve_on_host, hosts, cases)
    for number, (task, _, script) in enumerate(cases):
        expected = train_evolving(task, script, World.single_process(), None, STEPS)
        assert_equal_to_one_process([result[number] for result in results], expected)


@pytest.mark.extended
def test_data_parallel_workers_change_their_experts_alike() -> None:
    cases = [(task, None, script) for task, _, script in (make_case(seed, 3) for seed in range(3))]
    results = run_ranks(evolve_on_host, 3, cases)
    for number, (task, _, script) in enumerate(cases):
        expected = train_evolving(task, script, World.single_process(), None, STEPS)
        assert_equal_to_one_process([result[number] for result in results], expected)
