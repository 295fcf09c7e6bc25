"""The parts of the hosts' snapshots that one host needs to resume: the dense part, and its experts.

A part is fetched as a whole. With the placement of the snapshots a host reads the dense part and its
own experts: the same number of bytes however many hosts there are. Under another placement it reads
the parts of those hosts that held its experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from experts.expert_state import held_experts, remote_expert_names
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.saved_experts import OtherExperts
from orchestrator.errors import OutOfMemory
from orchestrator.train.checkpoint.snapshot_format import (
    Bytes,
    SnapshotHeader,
    SnapshotPart,
    merge_snapshots,
)
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.types import first_line


class SnapshotSource(Protocol):
    """Snapshots of one step, of which a host fetches the parts that it needs."""

    @property
    def headers(self) -> Sequence[SnapshotHeader]:
        """The headers of the hosts whose experts can be fetched."""
        ...

    def fetch_dense(self) -> tuple[SnapshotHeader, Bytes]:
        """Return the main host's header and dense part."""
        ...

    def fetch_experts(self, rank: int) -> Bytes: ...


class ExpertsMissing(RuntimeError):
    """No snapshot that can be fetched holds an expert of this host."""


class SnapshotsUnusable(RuntimeError):
    """The snapshots themselves cannot be read or restored: only a checkpoint can help."""


@contextmanager
def using_snapshots() -> Iterator[None]:
    """Raise ``SnapshotsUnusable`` for an error of the block that only the snapshots can have caused.

    A lost peer, full memory or another placement is no fault of the snapshots."""
    try:
        yield
    except (ExpertsMissing, OtherExperts, OutOfMemory, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_communication_error(error):
            raise
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise SnapshotsUnusable(f"the snapshots cannot be restored: {cause}") from error


def fetch_contents(source: SnapshotSource, rank: int, model: nn.Module) -> Contents:
    """Fetch what the host of ``rank`` needs to restore a model, as the contents of a checkpoint."""
    header, data = source.fetch_dense()
    dense = SnapshotPart(header.rank, header.dense_end, data)
    experts = [
        SnapshotPart(header.rank, header.experts_end, source.fetch_experts(header.rank))
        for header in hosts_to_read(source.headers, rank, held_experts(model))
    ]
    return merge_snapshots(dense, experts, rank, remote_expert_names(model))


def hosts_to_read(
    headers: Sequence[SnapshotHeader], rank: int, held: Mapping[str, tuple[int, ...]]
) -> list[SnapshotHeader]:
    """Return the hosts whose snapshots hold the experts of a bank by their ids (``held``).

    The host of the same rank comes first, for the state of its random generators too."""
    missing = {(bank, expert) for bank, experts in held.items() for expert in experts}
    chosen: list[SnapshotHeader] = []
    for header in sorted(headers, key=lambda header: (header.rank != rank, header.rank)):
        found = {entry for entry in missing if header.holds(*entry)}
        if found or header.rank == rank:
            chosen.append(header)
            missing -= found
    if missing:
        bank, expert = min(missing)
        raise ExpertsMissing(
            f"no snapshot has expert {expert} of {bank}: the experts are placed otherwise than in the "
            f"snapshots of hosts {[header.rank for header in headers]}; the hosts join again with all of them"
        )
    return chosen
