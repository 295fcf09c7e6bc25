"""Copies a host's part of the state of a run to host memory, as it goes into a checkpoint.

Each host writes its own experts. Parameters that all hosts hold, and their optimizer state, are
shared out among the hosts by bytes. No host sends its state to another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.expert_state import copied_expert_names, is_expert_parallel, split_experts, stacked_names
from orchestrator.checkpoint.files import HostPart
from orchestrator.checkpoint.hashed_file import no_progress
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.tensor_file import check_dtype
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import mask_tree
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.state import (
    OptimizerState,
    StateTensor,
    TrainState,
    optimizer_state,
    plain_state,
    state_tensors,
)
from orchestrator.train.group.world import World
from orchestrator.train.optim.shards import full_tensor, reshard_all

_ALIGNMENT_BYTES = 64

Stacked = Mapping[str, list[str]]
"""The names of the experts in each stacked parameter."""


@dataclass(frozen=True)
class HostShare:
    """The tensors of the state that this host holds, and which of them it writes."""

    tensors: Sequence[StateTensor]
    """All of them, in the same order on all workers: a sharded tensor is gathered by all."""
    own: Set[int]
    """The indices of the tensors that this host writes."""
    shared_digest: str
    """Identifies the tensors that are shared out. It must be the same on all hosts."""

    @property
    def num_bytes(self) -> int:
        """The host memory that a copy takes."""
        return sum(_aligned(self.tensors[index].num_bytes) for index in self.own)


def host_share(state: TrainState, world: World) -> HostShare:
    """Return the tensors that this host writes."""
    optimizer = optimizer_state(state, stacked_names(state.model))
    stacked = stacked_names(state.model) if is_expert_parallel(state.model) else {}
    parameters = {name for name, _ in state.model.named_parameters()}
    tensors = sorted(state_tensors(state.model, optimizer), key=lambda t: (t.kind, t.name, t.slot))
    shared = [tensor for tensor in tensors if tensor.name not in stacked]
    writers = _assign_writers(shared, world.size, parameters)
    own = {
        index
        for index, tensor in enumerate(tensors)
        if tensor.name in stacked or writers[tensor.kind, tensor.key] == world.rank
    }
    described = [(t.kind, t.key, str(t.tensor.dtype), list(t.tensor.shape)) for t in shared]
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    return HostShare(tensors, own, digest)


def _assign_writers(
    shared: Sequence[StateTensor], size: int, parameters: Set[str]
) -> dict[tuple[str, str], int]:
    """Return the rank that writes each tensor that all hosts hold, by kind and key.

    The largest come first, each to the host with the fewest bytes so far: the hosts' bytes differ by
    no more than one tensor. Buffers may differ from host to host, so the main host writes them."""
    writers: dict[tuple[str, str], int] = {}
    num_bytes = [0] * size
    for tensor in sorted(shared, key=lambda t: (-t.num_bytes, t.kind, t.key)):
        is_buffer = tensor.name not in parameters
        writer = 0 if is_buffer else num_bytes.index(min(num_bytes))
        num_bytes[writer] += tensor.num_bytes
        writers[tensor.kind, tensor.key] = writer
    return writers


@dataclass(frozen=True)
class Captured:
    """A copy in host memory of what this host writes, and the digest of what is shared out."""

    part: HostPart
    shared_digest: str


def capture(
    state: TrainState,
    progress: Progress,
    world: World,
    buffers: PinnedBuffers,
    on_tensor: Callable[[], None] = no_progress,
) -> Captured:
    """Copy the part of the state that this host writes into the next of the buffers.

    Where the model is sharded, every worker must call it."""
    # An evaluation may have left parameters gathered. The shards are the state.
    reshard_all(state.model)
    share = host_share(state, world)
    copies = _copy_to_host(share, world.device, buffers, on_tensor)
    stacked = stacked_names(state.model)
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    experts: set[str] = set()
    copied = copied_expert_names(state.model)
    parts = [
        (name, share.tensors[index], part)
        for index, copy in copies.items()
        for name, part in _split_by_expert(share.tensors[index].name, copy, stacked).items()
        if name not in copied
    ]
    # By the experts' names, so that in the files all tensors of an expert lie together.
    for name, tensor, part in sorted(parts, key=lambda entry: (entry[0], entry[1].slot)):
        tensors[tensor.kind][tensor.key_of(name)] = part
        if tensor.name in stacked:
            experts.add(tensor.key_of(name))
    optimizer = optimizer_state(state, stacked)
    if not world.is_main:
        values = _expert_values(optimizer, stacked, copied) if is_expert_parallel(state.model) else {}
        return Captured(HostPart(tensors, experts, values), share.shared_digest)
    plain = plain_state(state, optimizer, progress)
    # Mask secrets in the names of metrics alone, which come from the user's code: the state is restored by
    # all other names.
    plain["progress"]["validation"] = mask_tree(progress.validation, secret_values())
    return Captured(HostPart(tensors, experts, state=plain), share.shared_digest)


def _copy_to_host(
    share: HostShare, device: torch.device, buffers: PinnedBuffers, on_tensor: Callable[[], None]
) -> dict[int, Tensor]:
    """Copy the tensors that this host writes into a buffer, and return them by index.

    One tensor at a time: a sharded model is never whole on a device."""
    buffer = buffers.next_buffer(share.num_bytes)
    copies: dict[int, Tensor] = {}
    offset = 0
    for index, tensor in enumerate(share.tensors):
        whole = full_tensor(tensor.tensor.detach())
        if index in share.own:
            check_dtype(tensor.key, whole)
            place = buffer[offset : offset + tensor.num_bytes].view(whole.dtype).view(whole.shape)
            copies[index] = place.copy_(whole, non_blocking=True)
            offset += _aligned(tensor.num_bytes)
        on_tensor()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _split_by_expert(name: str, tensor: Tensor, stacked: Stacked) -> dict[str, Tensor]:
    """Split a stacked tensor by expert.

    A scalar (Adam's step counter) becomes each expert's own."""
    if name in stacked and tensor.ndim == 0:
        tensor = tensor.expand(len(stacked[name]))
    return split_experts({name: tensor}, stacked)


def _expert_values(optimizer: OptimizerState, stacked: Stacked, copied: Set[str]) -> dict[str, Any]:
    names = {name for names in stacked.values() for name in names} - copied
    return {key: value for key, value in optimizer.values.items() if key.partition("/")[2] in names}
