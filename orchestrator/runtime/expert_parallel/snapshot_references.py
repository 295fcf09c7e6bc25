"""References to snapshots in Ray's object store, and a host's access to what they refer to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray


@dataclass(frozen=True)
class SnapshotReferences:
    """The header of a host's snapshot, and object references to its parts."""

    header: Any
    own: Any
    """None where only the dense part is needed."""
    dense: Any


def references_for(
    references: Sequence[SnapshotReferences], rank: int, size: int, generation: int
) -> tuple[SnapshotReferences, ...]:
    """Return the references that one host of a new generation may need, the main host's first.

    As many hosts as in the generation of the snapshots keep its placement and its shards, so that each
    needs its own part and the main host's dense part. Otherwise the hosts place the experts anew once they
    have joined, and may need the part of any host."""
    if not references:
        return ()
    header = references[0].header
    if (header.size, header.generation) != (size, generation - 1):
        return tuple(references)
    main, own = references[0], references[rank]
    return (main,) if rank == 0 else (replace(main, own=None), own)


class ReferencedSnapshots:
    """Snapshots whose parts are fetched from the object store."""

    def __init__(self, references: Sequence[SnapshotReferences]) -> None:
        self._references = {reference.header.rank: reference for reference in references}

    @property
    def headers(self) -> list[Any]:
        return [entry.header for entry in self._references.values() if entry.own is not None]

    def fetch_dense(self) -> tuple[Any, Any]:
        main = self._references[0]
        return main.header, ray.get(main.dense)

    def fetch_own(self, rank: int) -> Any:
        return ray.get(self._references[rank].own)

    def release(self) -> None:
        """Drop the references: without them the memory can be freed."""
        self._references = {}
