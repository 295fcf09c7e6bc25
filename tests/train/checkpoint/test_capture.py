"""The shares of the state that each host writes: every tensor once, by bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.hosts.save_hosts import CPU, make_state
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.train.checkpoint.capture import StateTensor, _assign_writers, capture, host_share
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.group.world import World


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 9))
def test_shares_differ_by_no_more_than_the_largest_tensor(sizes: list[int], num_hosts: int) -> None:
    tensors = [StateTensor("model", "", str(number), torch.empty(size)) for number, size in enumerate(sizes)]
    writers = _assign_writers(tensors, num_hosts, {tensor.name for tensor in tensors})
    assert len(writers) == len(tensors)
    num_bytes = [0] * num_hosts
    for tensor in tensors:
        num_bytes[writers[tensor.kind, tensor.key]] += tensor.num_bytes
    largest = max((tensor.num_bytes for tensor in tensors), default=0)
    assert max(num_bytes) - min(num_bytes) <= largest


def test_every_tensor_belongs_to_one_of_seven_hosts() -> None:
    state = make_state()
    shares = [host_share(state, World(rank, 7, CPU)) for rank in range(7)]
    assert sorted(index for share in shares for index in share.own) == list(range(len(shares[0].tensors)))
    assert len({share.shared_digest for share in shares}) == 1


def test_other_parameters_have_another_digest() -> None:
    state = make_state()
    before = host_share(state, World(0, 2, CPU)).shared_digest
    assert host_share(state, World(1, 2, CPU)).shared_digest == before
    state.optimizer.state.clear()
    assert host_share(state, World(1, 2, CPU)).shared_digest != before


def test_a_copy_does_not_follow_the_state() -> None:
    state = make_state()
    part = capture(state, Progress(), World.single_process(), PinnedBuffers(CPU, 1)).part
    name, parameter = next(iter(state.model.named_parameters()))
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.zero_()
    assert torch.equal(part.tensors["model"][name], before)


def test_the_memory_of_evolution_is_part_of_the_state() -> None:
    memory = EvolutionState(policy={"streak": 3}, losses=[0.5, 0.4], window_count=2.0, balance_step=7)
    state = replace(make_state(), evolution=memory)
    saved = capture(state, Progress(), World.single_process(), PinnedBuffers(CPU, 1)).part.state
    assert saved is not None
    restored = EvolutionState()
    restored.restore(saved["evolution"])
    assert restored == memory
