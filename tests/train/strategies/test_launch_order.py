"""All hosts launch the collectives of their two groups in one order.

NCCL runs each group's collectives as kernels of the device. Two hosts that launch them in different orders
may wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from experts.hosts.group import Group
from harness.hosts.ranks import run_ranks
from harness.runs.host_runs import step_batches
from harness.runs.steppers import make_stepper
from harness.runs.tiny_model import HostCase, Tiny, random_case
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.strategies import expert_parallel

CPU = torch.device("cpu")
SIZES = (3, 9, 3, 5, 9, 2, 4)
NO_SAMPLES_ON_LAST_HOST = HostCase(
    Tiny((SIZES, SIZES), samples=14), 3, ((0, 1, 1, 0, 1, 0, 1),) * 2, micro_batch=2, global_batch=6
)


def record_launches(patch: pytest.MonkeyPatch) -> list[str]:
    """Record the collectives of this process in the order of their launch, with the group of each."""
    launches: list[str] = []
    groups: list[Group] = []

    def record(name: str) -> None:
        original = getattr(Group, name)

        def launch(group: Group, *arguments: Any) -> Any:
            if group not in groups:
                groups.append(group)
            launches.append(f"{name} in group {groups.index(group)}")
            return original(group, *arguments)

        patch.setattr(Group, name, launch)

    for name in ("all_to_all", "all_reduce", "broadcast"):
        record(name)
    return launches


def launches_on_host(rank: int, size: int, store: str, cases: Sequence[HostCase]) -> list[list[str]]:
    results = []
    for number, case in enumerate(cases):
        with (
            pytest.MonkeyPatch.context() as patch,
            process_group_world(file_store(f"{store}-{number}", size), rank, size, CPU, "gloo", 60) as world,
        ):
            # A bucket per parameter, so that the sums are spread over the backward pass.
            patch.setattr(
                expert_parallel, "gradient_buckets", lambda parameters, _: [[p] for p in parameters]
            )
            launches = record_launches(patch)
            if case.data_on_main:
                world = world.with_data_on_main()
            elif case.shares:
                world = world.with_shares(case.shares)
            stepper, feed = make_stepper(
                case.task,
                case.micro_batch,
                case.global_batch,
                world=world,
                host_of=case.host_of,
                chunks=case.chunks,
                recompute=case.recompute,
            )
            for step, batch in enumerate(step_batches(feed, 4)):
                stepper.run(batch, step)
            results.append(launches)
    return results


@pytest.mark.extended
def test_hosts_launch_collectives_in_one_order() -> None:
    """Experts of any sizes anywhere, hosts without experts, without tokens, without samples."""
    cases = [random_case(seed, 3, torch.float64) for seed in range(8)]
    cases += [NO_SAMPLES_ON_LAST_HOST, replace(NO_SAMPLES_ON_LAST_HOST, data_on_main=True)]
    hosts = run_ranks(launches_on_host, 3, cases, timeout=240.0)
    for number, case in enumerate(cases):
        launches = [host[number] for host in hosts]
        assert launches[0] == launches[1] == launches[2], case


def test_gradients_are_summed_while_the_backward_pass_exchanges_tokens() -> None:
    case = replace(NO_SAMPLES_ON_LAST_HOST, task=Tiny((SIZES, SIZES), samples=24))
    (launches,), *_ = run_ranks(launches_on_host, 3, [case], timeout=240.0)
    text = " ".join(launches)
    assert "all_reduce in group 1 all_to_all in group 0" in text
