"""Snapshots of a host's state in memory, taken every few steps.

The driver fetches them and keeps them on other nodes; after a failure a run resumes from them
without the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from experts.expert_state import stacked_names
from experts.membership import GroupMembership
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.snapshot_format import (
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
from orchestrator.train.parts.world import World


class SnapshotSink(Protocol):
    """Holds a snapshot until the driver has fetched it."""

    def wait_for_space(self, membership: GroupMembership) -> None:
        """Wait until the last snapshot is being fetched; the one before it has then arrived."""
        ...

    def put(self, header: Any, data: Any) -> None: ...


@dataclass(frozen=True)
class SnapshotTarget:
    """Where a host writes its snapshots, and the generation of its process group."""

    sink: SnapshotSink
    buffers: PinnedBuffers
    generation: int


class Snapshots:
    """Takes a snapshot every so many steps. All hosts take theirs after the same steps."""

    def __init__(self, every: int, state: TrainState, world: World, target: SnapshotTarget) -> None:
        self._every = every
        self._state = state
        self._world = world
        self._target = target
        self._last_step = -1
        self._prepared = False
        self._layout = SnapshotLayout([])

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def prepare(self) -> None:
        """Allocate the buffers in the background.

        Called after each step, because an optimizer has no state before its first step."""
        if self._prepared or self._every == 0:
            return
        self._prepared = True
        _, description = self._collect(Progress())
        self._target.buffers.prepare(self._layout.tensor_bytes + len(description))

    def take(self, progress: Progress) -> None:
        """Copy the state of this step into a buffer for the driver, unless that is done already."""
        if progress.step == self._last_step:
            return
        self._last_step = progress.step
        # Before the state is collected: the older of the two buffers may still be on its way to the
        # driver.
        self._target.sink.wait_for_space(self._world.membership)
        tensors, description = self._collect(progress)
        end = self._layout.tensor_bytes
        num_bytes = end + len(description)
        buffer = self._target.buffers.next_buffer(num_bytes)
        _copy_tensors(self._layout.views(buffer), tensors)
        # The text is written while the device still copies; the wait comes last.
        data = buffer.numpy()[:num_bytes]
        data[end:] = np.frombuffer(description, dtype=np.uint8)
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        header = SnapshotHeader(
            self._target.generation,
            progress.step,
            self._world.rank,
            self._world.size,
            end,
        )
        self._target.sink.put(header, data)

    def _collect(self, progress: Progress) -> tuple[list[Tensor], bytes]:
        """Return the tensors that this host copies, and the text that follows them.

        Updates the layout."""
        stacked = stacked_names(self._state.model)
        optimizer = optimizer_state(self._state, stacked)
        live_tensors = self._live_tensors(optimizer, stacked)
        if not self._layout.fits(live_tensors):
            self._layout = SnapshotLayout(live_tensors)
        description = self._layout.describe(plain_state(self._state, optimizer, progress))
        return [live.tensor for live in live_tensors], description

    def _live_tensors(self, optimizer: OptimizerState, stacked: dict[str, list[str]]) -> list[LiveTensor]:
        """Return the tensors of this host: its experts, and on the main host the dense part too."""
        live_tensors = []
        for name, tensor in model_tensors(self._state.model).items():
            if self._world.is_main or name in stacked:
                live_tensors.append(LiveTensor("model", name, tensor.detach(), stacked.get(name)))
        for slot, tensors in optimizer.slots.items():
            for name, tensor in tensors.items():
                if self._world.is_main or name in stacked:
                    entry_name = f"{slot}/{name}"
                    live_tensors.append(LiveTensor("optimizer", entry_name, tensor, stacked.get(name)))
        return live_tensors


def _copy_tensors(views: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(views, tensors, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
