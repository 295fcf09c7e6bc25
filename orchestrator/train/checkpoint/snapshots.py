"""Snapshots of a host's state in memory, taken every few steps.

The driver fetches them and keeps them on other nodes; after a failure a run resumes from them
without the disk."""

from __future__ import annotations

import time
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
    OptimizerState,
    TrainState,
    model_tensors,
    optimizer_state,
    plain_state,
)
from orchestrator.train.group.world import World

_BLOCK_BYTES = 2**16


class SnapshotSink(Protocol):
    """Holds a snapshot until the driver has fetched it."""

    def wait_for_space(self, membership: GroupMembership) -> None:
        """Wait until the last snapshot is being fetched; the one before it has then arrived."""
        ...

    def put(self, header: Any, experts: Any, dense: Any) -> None: ...


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
        self._experts_layout = SnapshotLayout([])

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
        dense, experts = self._collect(Progress())
        self._target.buffers.prepare(_begin_of_experts(dense) + experts.num_bytes)

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
        dense, experts = self._collect(progress)
        begin = _begin_of_experts(dense)
        buffer = self._target.buffers.next_buffer(begin + experts.num_bytes)
        dense_data = dense.copy_into(buffer) if dense is not None else buffer.numpy()[:0]
        experts_data = experts.copy_into(buffer[begin:])
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        header = SnapshotHeader(
            self._target.generation,
            progress.step,
            self._world.rank,
            self._world.size,
            experts.layout.tensor_bytes,
            dense.layout.tensor_bytes if dense is not None else 0,
            held_experts(self._state.model),
            stall_s=time.perf_counter() - began_s,
            taken_at=time.time(),
        )
        self._target.sink.put(header, experts_data, dense_data)

    def _collect(self, progress: Progress) -> tuple[CollectedPart | None, CollectedPart]:
        """Return the dense part, which the main host alone copies, and the experts of this host."""
        stacked = stacked_names(self._state.model)
        optimizer = optimizer_state(self._state, stacked)
        state = plain_state(self._state, optimizer, progress)
        live_tensors = self._live_tensors(optimizer, stacked)
        experts = [live for live in live_tensors if live.experts is not None]
        if not self._experts_layout.fits(experts):
            self._experts_layout = SnapshotLayout(experts)
        # The list of all experts is in the dense part: the parts of hosts must not grow with their number.
        own_state = {key: value for key, value in state.items() if key not in ("experts", "evolution")}
        experts_part = _part(self._experts_layout, experts, own_state)
        if not self._world.is_main:
            return None, experts_part
        dense = [live for live in live_tensors if live.experts is None]
        if not self._dense_layout.fits(dense):
            self._dense_layout = SnapshotLayout(dense)
        return _part(self._dense_layout, dense, state), experts_part

    def _live_tensors(self, optimizer: OptimizerState, stacked: dict[str, list[str]]) -> list[LiveTensor]:
        """Return all tensors of this host's model and optimizer."""
        live_tensors = [
            LiveTensor("model", name, tensor.detach(), stacked.get(name))
            for name, tensor in model_tensors(self._state.model).items()
        ]
        for slot, tensors in optimizer.slots.items():
            for name, tensor in tensors.items():
                live_tensors.append(LiveTensor("optimizer", f"{slot}/{name}", tensor, stacked.get(name)))
        return live_tensors


def _part(layout: SnapshotLayout, tensors: list[LiveTensor], state: dict[str, Any]) -> CollectedPart:
    return CollectedPart(layout, [live.tensor for live in tensors], layout.describe(state))


def _begin_of_experts(dense: CollectedPart | None) -> int:
    """Return where the experts' part begins, after the dense part.

    The length of a text varies a little from step to step. Whole blocks keep the place, and with it
    the layout's views."""
    num_blocks = -(-dense.num_bytes // _BLOCK_BYTES) if dense is not None else 0
    return num_blocks * _BLOCK_BYTES
