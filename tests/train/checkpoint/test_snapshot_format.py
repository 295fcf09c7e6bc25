"""The snapshots of all hosts, merged, are the checkpoint of the same step to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import nn

from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, run_steps
from harness.runs.tiny_model import Tiny
from harness.storage.snapshots import (
    CPU,
    GENERATION,
    HOST_OF,
    SIZES,
    TASK,
    HostResult,
    HostSnapshots,
    assert_same_contents,
    dense_part,
    merge_all,
    merge_parts,
    own_part,
    snapshot_and_checkpoint,
    state_of,
    take_snapshots,
)
from orchestrator.checkpoint.files import Contents
from orchestrator.train.checkpoint.snapshot_format import LiveTensor, _entries, read_part
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.optim.optimizer import ScheduledOptimizer

NONE_ON_LAST_HOST = ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 0, 0, 1))


def test_merged_snapshots_are_the_checkpoint(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    snapshots, contents = three_hosts
    assert_same_contents(merge_all(snapshots), contents)
    assert_same_contents(merge_all(list(reversed(snapshots))), contents)


def test_a_snapshot_names_its_host_and_its_tensors(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    snapshots, _ = three_hosts
    headers = [header for header, _, _ in snapshots]
    origins = [(header.generation, header.step, header.rank, header.size) for header in headers]
    assert origins == [(GENERATION, 4, rank, 3) for rank in range(3)]
    held = [dict(header.held) for header in headers]
    placed = [
        {
            f"blocks.{layer}.ffn.bank": tuple(e for e in range(7) if hosts[e] == rank)
            for layer, hosts in enumerate(HOST_OF)
        }
        for rank in range(3)
    ]
    assert held == placed
    entries = [read_part(own_part(snapshot))[0] for snapshot in snapshots]
    main, second, third = [{(entry.kind, entry.name) for entry in of_host} for of_host in entries]
    assert not main & second
    assert not second & third
    assert all(".bank." in name for _, name in main | second | third)
    dense = read_part(dense_part(snapshots[0]))[0]
    assert dense
    assert not any(".bank." in entry.name for entry in dense)
    assert all(entry.offset % 64 == 0 for entry in dense)
    assert [dense.size > 0 for _, _, dense in snapshots] == [True, False, False], "the main host's alone"


def test_names_that_a_host_does_not_need_are_left_out(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    snapshots, contents = three_hosts
    not_needed = {name for name in contents.tensors["model"] if ".bank.3." in name}
    merged = merge_all(snapshots, 1, not_needed)
    assert not_needed
    assert contents.tensors["model"].keys() - merged.tensors["model"].keys() == not_needed
    missing = contents.tensors["optimizer"].keys() - merged.tensors["optimizer"].keys()
    assert missing == {f"{slot}/{name}" for slot in ("step", "exp_avg", "exp_avg_sq") for name in not_needed}


def test_each_rank_gets_its_own_random_state(
    three_hosts: tuple[HostSnapshots, Contents],
) -> None:
    snapshots, _ = three_hosts
    states = [merge_all(snapshots, rank).state["random"] for rank in range(4)]
    assert states[:3] == [read_part(own_part(snapshot))[1]["random"] for snapshot in snapshots]
    assert states[0] != states[1] != states[2] != states[0]
    assert states[3] == states[0], "a new host gets the state of the main host"


def test_a_host_without_experts_has_an_empty_snapshot() -> None:
    snapshots, contents = take_snapshots(TASK, NONE_ON_LAST_HOST)
    entries, state = read_part(own_part(snapshots[2]))
    assert (entries, snapshots[2][0].own_end) == ([], 0)
    expected = replace(contents, state={**contents.state, "random": state["random"]})
    assert_same_contents(merge_all(snapshots, 2), expected)


def low_precision_host(rank: int, size: int, store: str) -> HostResult:
    """Weights in bf16, moments in fp32 and scalar counters: the mixture of types that a GPU has."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        task = Tiny((SIZES,), dtype=torch.float32)
        stepper, _ = make_stepper(task, 4, 12, world=world, host_of=HOST_OF[:1])
        model = stepper.strategy.model
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().bfloat16()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for name, parameter in model.named_parameters():
            # By name: the hosts hold the same dense parameters, with the same gradients.
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        for _ in range(3):
            optimizer.step()
        for slots in optimizer.state.values():
            slots["exp_avg"] = slots["exp_avg"].float() + 1e-6
        return snapshot_and_checkpoint(TrainState(model, optimizer, stepper.precision), world)


def test_types_and_step_counters_of_experts_are_kept() -> None:
    results = run_ranks(low_precision_host, 3)
    contents = merge_parts([part for _, part in results])
    merged = merge_all([snapshot for snapshot, _ in results])
    assert_same_contents(merged, contents)
    assert torch.bfloat16 in {tensor.dtype for tensor in merged.tensors["model"].values()}
    counters = [
        tensor
        for name, tensor in merged.tensors["optimizer"].items()
        if name.startswith("step/") and ".bank." in name
    ]
    assert len(counters) == 2 * len(SIZES), "each expert has its own"
    assert {(tensor.shape, tensor.item()) for tensor in counters} == {(torch.Size([]), 3.0)}


def test_slashes_in_the_name_of_a_module_are_part_of_the_name() -> None:
    weights = LiveTensor("optimizer", "exp_avg/a/b.bank.up", torch.zeros(2, 3), ["a/b.bank.0", "a/b.bank.1"])
    names = [entry.name for entry in _entries(weights, 0)]
    assert names == ["exp_avg/a/b.bank.0", "exp_avg/a/b.bank.1"]


class CountingSGD(torch.optim.SGD):
    """Keeps a plain number next to its tensors."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1
        return result


def counting_host(rank: int, size: int, store: str) -> HostResult:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        stepper, feed = make_stepper(TASK, 4, 12, world=world, host_of=HOST_OF)
        parameters = stepper.strategy.model.parameters()
        optimizer = CountingSGD(parameters, lr=1e-2, momentum=0.9)
        stepper.optimizer = ScheduledOptimizer(optimizer, lambda _: 1.0)
        run_steps(stepper, feed, 2)
        return snapshot_and_checkpoint(state_of(stepper), world)


def test_plain_values_of_an_optimizer_are_kept() -> None:
    results = run_ranks(counting_host, 3)
    contents = merge_parts([part for _, part in results])
    merged = merge_all([snapshot for snapshot, _ in results])
    same_random = replace(merged, state={**merged.state, "random": contents.state["random"]})
    assert_same_contents(same_random, contents)
    assert set(merged.state["optimizer"]["values"].values()) == {2}
