"""The snapshots of any number of hosts of one model, and the bytes that a host reads to resume.

Taking, choosing, merging and restoring are the real code; only the object store is this process. Each
host holds as many experts as any other, so that more hosts have more experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from experts.model import place
from experts.moe.layer import MoELayer
from harness.storage.snapshots import CPU, CopyingSink
from orchestrator.checkpoint.progress import Progress
from orchestrator.runtime.expert_parallel import snapshot_references
from orchestrator.runtime.expert_parallel.snapshot_references import (
    ReferencedSnapshots,
    SnapshotReferences,
    references_for,
)
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.snapshot_source import fetch_contents
from orchestrator.train.checkpoint.snapshots import Snapshots, SnapshotTarget
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World

GENERATION = 3


@dataclass(frozen=True)
class ManyHosts:
    """A model on many hosts, its experts in turn. ``dense_rows`` sets the size of the dense part."""

    hosts: int
    experts: int
    width: int = 16
    hidden: int = 32
    dense_rows: int = 2000

    def state_of(self, rank: int, seed: int) -> TrainState:
        """Return the state of one host after a step, different for each seed."""
        torch.manual_seed(seed)
        layer = MoELayer(self.width, (self.hidden,) * self.experts, 2)
        model = nn.ModuleDict({"embedding": nn.Embedding(self.dense_rows, self.width), "moe": layer})
        place(model, [[expert % self.hosts for expert in range(self.experts)]], rank)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.data = torch.rand_like(parameter)
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        return TrainState(model, optimizer, Precision("fp32", CPU))

    def take_snapshots(self) -> list[SnapshotReferences]:
        """Take a snapshot of each host. An array stands for the reference to it."""
        sink = CopyingSink()
        buffers = PinnedBuffers(CPU)
        for rank in range(self.hosts):
            target = SnapshotTarget(sink, buffers, GENERATION)
            state = self.state_of(rank, seed=rank)
            Snapshots(state, World(rank, self.hosts, CPU), target).take(Progress(step=1))
        return [SnapshotReferences(*parts) for parts in sink.snapshots]

    def restore(self, snapshots: list[SnapshotReferences], rank: int) -> tuple[TrainState, int]:
        """Restore one host. Return its state, and the bytes that it has read."""
        offered = references_for(snapshots, rank, self.hosts, GENERATION + 1)
        state = self.state_of(rank, seed=1_000_000)
        fetched: list[int] = []

        def get(reference: Any) -> Any:
            fetched.append(reference.nbytes)
            return reference

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snapshot_references.ray, "get", get)
            source: Any = ReferencedSnapshots(offered)
            restore(fetch_contents(source, rank, state.model), state)
        return state, sum(fetched)
