"""Snapshots of a host's state in memory, taken every few steps.

The driver fetches them and keeps them on other nodes; after a failure a run resumes from them
without the disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from experts.expert_state import held_experts, stacked_names
from experts.hosts.membership import GroupMembership
from orchestrator.checkpoint.progress import Progress
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshot_format import (
    CollectedPart,
    LiveTensor,
    SnapshotHeader,
    SnapshotLayout,
)
from orchestrator.train.checkpoint.state import (
    StateTensor,
    TrainState,
    optimizer_state,
    plain_state,
    state_tensors,
)
from orchestrator.train.group.world import World
from orchestrator.train.optim.shards import is_sharded, local_part, own_rows, reshard_all

_BLOCK_BYTES = 2**16


class SnapshotSink(Protocol):
    """Holds a snapshot until the driver has fetched it."""

    def wait_for_space(self, membership: GroupMembership) -> None:
        """Wait until the last snapshot is being fetched; the one before it has then arrived."""
        ...

    def put(self, header: Any, own: Any, dense: Any) -> None: ...


@dataclass(frozen=True)
class SnapshotTarget:
    """Where a host writes its snapshots, and the generation of its process group."""

    sink: SnapshotSink
    buffers: PinnedBuffers
    generation: int


class Snapshots:
    """Takes a snapshot every so many steps. All hosts take theirs after the same steps."""

    def __init__(self, state: TrainState, world: World, target: SnapshotTarget, first_step: int = 0) -> None:
        """``first_step`` is the number of steps that the state has behind it."""
        self.every = 0
        """Steps between two snapshots, the same on all hosts; 0 takes none. May change."""
        self._state = state
        self._world = world
        self._target = target
        self._last_step = first_step
        self._prepared = False
        self._dense_layout = SnapshotLayout([])
        self._own_layout = SnapshotLayout([])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that snapshots are copied into, in host memory."""
        return self._target.buffers.num_bytes

    def due(self, step: int) -> bool:
        return self.every > 0 and step >= self._last_step + self.every

    def prepare(self) -> None:
        """Allocate the buffers in the background.

        Called after each step, because an optimizer has no state before its first step."""
        if self._prepared or self.every == 0:
            return
        self._prepared = True
        dense, own = self._collect(Progress())
        self._target.buffers.prepare(_begin_of_own(dense) + own.num_bytes)

    def take(self, progress: Progress) -> None:
        """Copy the state of this step into a buffer for the driver, unless that is done already."""
        if progress.step == self._last_step:
            return
        self._last_step = progress.step
        # Only the first snapshot waits for memory: exclude that wait from the measured cost.
        self._target.buffers.wait_for_allocation()
        began_s = time.perf_counter()
        # Before the state is collected: the older of the two buffers may still be on its way to the
        # driver.
        self._target.sink.wait_for_space(self._world.membership)
        dense, own = self._collect(progress)
        begin = _begin_of_own(dense)
        buffer = self._target.buffers.next_buffer(begin + own.num_bytes)
        dense_data = dense.copy_into(buffer) if dense is not None else buffer.numpy()[:0]
        own_data = own.copy_into(buffer[begin:])
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        header = SnapshotHeader(
            self._target.generation,
            progress.step,
            self._world.rank,
            self._world.size,
            own.layout.tensor_bytes,
            dense.layout.tensor_bytes if dense is not None else 0,
            held_experts(self._state.model),
            sharded=is_sharded(self._state.model),
            stall_s=time.perf_counter() - began_s,
            taken_at=time.time(),
        )
        self._target.sink.put(header, own_data, dense_data)

    @torch.no_grad()
    def _collect(self, progress: Progress) -> tuple[CollectedPart | None, CollectedPart]:
        """Return the dense part, which the main host alone copies, and what this host alone has: its experts,
        and its shards of the dense part."""
        # An evaluation may have left parameters gathered. The shards are the state.
        reshard_all(self._state.model)
        stacked = stacked_names(self._state.model)
        optimizer = optimizer_state(self._state, stacked)
        state = plain_state(self._state, optimizer, progress)
        live_tensors = [_live_tensor(entry, stacked) for entry in state_tensors(self._state.model, optimizer)]
        own = [live for live in live_tensors if live.is_own]
        if not self._own_layout.fits(own):
            self._own_layout = SnapshotLayout(own)
        # The list of all experts is in the dense part: the parts of hosts must not grow with their number.
        own_state = {key: value for key, value in state.items() if key not in ("experts", "evolution")}
        own_part = _part(self._own_layout, own, own_state)
        if not self._world.is_main:
            return None, own_part
        dense = [live for live in live_tensors if not live.is_own]
        if not self._dense_layout.fits(dense):
            self._dense_layout = SnapshotLayout(dense)
        return _part(self._dense_layout, dense, state), own_part


def _live_tensor(entry: StateTensor, stacked: Mapping[str, list[str]]) -> LiveTensor:
    tensor = entry.tensor
    return LiveTensor(
        entry.kind, entry.key, local_part(tensor).detach(), stacked.get(entry.name), own_rows(tensor)
    )


def _part(layout: SnapshotLayout, tensors: list[LiveTensor], state: dict[str, Any]) -> CollectedPart:
    return CollectedPart(layout, [live.tensor for live in tensors], layout.describe(state))


def _begin_of_own(dense: CollectedPart | None) -> int:
    """Return where a host's own part begins, after the dense part.

    The length of a text varies a little from step to step. Whole blocks keep the place, and with it
    the layout's views."""
    num_blocks = -(-dense.num_bytes // _BLOCK_BYTES) if dense is not None else 0
    return num_blocks * _BLOCK_BYTES
