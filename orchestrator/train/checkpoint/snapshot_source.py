"""The parts of the hosts' snapshots that one host needs to resume: the dense part, its experts, its shards.

A part is fetched as a whole. With the placement of the snapshots a host reads the dense part and its
own part: no more bytes however many hosts there are. Under another placement, or on another number of
hosts, it reads the parts of those hosts that held its experts or rows of its shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from experts.expert_state import held_experts, remote_expert_names, stacked_names
from orchestrator.checkpoint.files import Contents
from orchestrator.checkpoint.saved_experts import OtherExperts
from orchestrator.checkpoint.shard_rows import ShardRows, shard_rows
from orchestrator.errors import OutOfMemory
from orchestrator.train.checkpoint.snapshot_format import (
    Bytes,
    SnapshotHeader,
    SnapshotPart,
    merge_snapshots,
)
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.train.optim.shards import is_sharded, own_rows
from orchestrator.types import first_line


class SnapshotSource(Protocol):
    """Snapshots of one step, from which a host fetches the parts that it needs."""

    @property
    def headers(self) -> Sequence[SnapshotHeader]:
        """The headers of the hosts whose own parts can be fetched."""
        ...

    def fetch_dense(self) -> tuple[SnapshotHeader, Bytes]:
        """Return the main host's header and dense part."""
        ...

    def fetch_own(self, rank: int) -> Bytes: ...


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
    rows = rows_of_dense_part(model)
    own_parts = [
        SnapshotPart(header.rank, header.own_end, source.fetch_own(header.rank))
        for header in hosts_to_read(source.headers, rank, held_experts(model), rows.values())
    ]
    return merge_snapshots(dense, own_parts, rank, remote_expert_names(model), rows)


def rows_of_dense_part(model: nn.Module) -> dict[str, ShardRows]:
    """Return the rows that this host has of each parameter in shards; all rows where the model is whole."""
    parameters = dict(model.named_parameters())
    if is_sharded(model):
        own = {name: own_rows(parameter) for name, parameter in parameters.items()}
        return {name: rows for name, rows in own.items() if rows is not None}
    stacked = stacked_names(model)
    dense = {name: p for name, p in parameters.items() if name not in stacked and p.ndim > 0}
    return {name: shard_rows(len(p), 0, 1) for name, p in dense.items()}


def hosts_to_read(
    headers: Sequence[SnapshotHeader],
    rank: int,
    held: Mapping[str, tuple[int, ...]],
    wanted: Collection[ShardRows] = (),
) -> list[SnapshotHeader]:
    """Return the hosts whose snapshots hold the experts of a bank by their ids (``held``), and wanted rows.

    The host of the same rank comes first, for the state of its random generators too."""
    missing = {(bank, expert) for bank, experts in held.items() for expert in experts}
    chosen: list[SnapshotHeader] = []
    for header in sorted(headers, key=lambda header: (header.rank != rank, header.rank)):
        found = {entry for entry in missing if header.holds(*entry)}
        if found or header.rank == rank or _has_rows(header, wanted):
            chosen.append(header)
            missing -= found
    if missing:
        bank, expert = min(missing)
        raise ExpertsMissing(
            f"no snapshot has expert {expert} of {bank}: the experts are placed otherwise than in the "
            f"snapshots of hosts {[header.rank for header in headers]}; the hosts join again with all of them"
        )
    # A host that wants none of the rows still learns from a part which tensors there are.
    return chosen or [header for header in headers[:1] if header.sharded]


def _has_rows(header: SnapshotHeader, wanted: Collection[ShardRows]) -> bool:
    """Return whether a host's snapshot has any of the wanted rows of the dense part."""
    return header.sharded and any(
        rows.overlap(shard_rows(rows.total, header.rank, header.size)) for rows in wanted
    )
