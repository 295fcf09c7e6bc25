"""The rows of a tensor that a worker holds, where the first dimension is divided among the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardRows:
    """Consecutive rows of a tensor."""

    first: int
    end: int
    total: int
    """The rows of the whole tensor."""

    @property
    def are_all(self) -> bool:
        return (self.first, self.end) == (0, self.total)

    def overlap(self, other: ShardRows) -> bool:
        return max(self.first, other.first) < min(self.end, other.end)


def shard_rows(total: int, rank: int, shards: int) -> ShardRows:
    """Return the rows of one shard, as FSDP2 divides them: the last shards may have fewer, or none."""
    most = -(-total // shards)
    first = min(rank * most, total)
    return ShardRows(first, min(first + most, total), total)


def join_rows(pieces: Sequence[tuple[ShardRows, Tensor]], wanted: ShardRows) -> Tensor:
    """Return the wanted rows from pieces of a tensor. Rows that one piece has share its memory.

    Raises ``ValueError`` if some are missing."""
    found: list[Tensor] = []
    row = wanted.first
    for rows, piece in sorted(pieces, key=lambda entry: entry[0].first):
        if rows.total != wanted.total:
            raise ValueError(f"a shard is of {rows.total} rows, and the tensor has {wanted.total}")
        end = min(rows.end, wanted.end)
        if rows.first <= row < end:
            found.append(piece[row - rows.first : end - rows.first])
            row = end
    if row < wanted.end:
        raise ValueError(f"rows {row} to {wanted.end - 1} of {wanted.total} are missing")
    if not found:  # no row is wanted: any piece has the type and the other dimensions
        return pieces[0][1][:0]
    return found[0] if len(found) == 1 else torch.cat(found)
