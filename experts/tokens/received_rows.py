"""Checks of the rows that came from other hosts.

When a group is aborted, a receive buffer holds anything, and kernels that read it are queued
already. So every id is bounded on the device before it is an index, and nothing there asserts: that
would end the CUDA context of a healthy host. The device only counts, and the host reads the result
where it waits for the device anyway. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


class InvalidRows(RuntimeError):
    """Rows from another host name experts that this host does not have."""


def local_slots(ids_GK: Tensor, slot_E: Tensor) -> Tensor:
    """Return the slot of each received expert id: -1 for no expert, and for any id not held here."""
    # One entry after the last expert, which an id of -1 and all ids out of range lead to.
    padded_slot_E = F.pad(slot_E, (0, 1), value=-1)
    return padded_slot_E[ids_GK.clamp(-1, len(slot_E))]


@dataclass(frozen=True)
class RowCheck:
    """The check of a chunk's received rows. Its figures are on their way from the device."""

    layer: str
    receive_counts: tuple[int, ...]
    num_choices: int
    """Choices of this host's experts that the other hosts announced."""
    top_k: int
    figures: Tensor
    """Flat index of the first wrong id, -1 for none, and the number of choices found. To be read
    after the host has waited for the device."""

    @classmethod
    def start(
        cls, layer: str, ids_GK: Tensor, slots_GK: Tensor, receive_counts: Sequence[int], num_choices: int
    ) -> RowCheck:
        is_local_GK = slots_GK >= 0
        is_wrong_GK = (ids_GK != -1) ^ is_local_GK
        first_wrong = torch.nonzero_static(is_wrong_GK.reshape(-1), size=1, fill_value=-1).reshape(1)
        figures = torch.cat([first_wrong, is_local_GK.sum().reshape(1)])
        # To pinned memory, without waiting.
        figures = figures.to("cpu", non_blocking=True)
        return cls(layer, tuple(receive_counts), num_choices, ids_GK.shape[1], figures)

    def finish(self) -> None:
        """Raise ``InvalidRows`` if the rows were wrong. The host must have waited for the device."""
        first_wrong, found = self.figures.tolist()
        if first_wrong >= 0:
            row = first_wrong // self.top_k
            ends = accumulate(self.receive_counts)
            host = next(host for host, end in enumerate(ends) if row < end)
            num_rows = sum(self.receive_counts)
            raise InvalidRows(
                f"{self._where()}: row {row} of {num_rows}, from host {host}, names an expert that this host "
                f"does not have; {_ADVICE}"
            )
        if found != self.num_choices:
            senders = [host for host, count in enumerate(self.receive_counts) if count]
            raise InvalidRows(
                f"{self._where()}: the rows from hosts {senders} name {found} experts of this host; "
                f"{self.num_choices} were announced; {_ADVICE}"
            )

    def _where(self) -> str:
        return f"layer {self.layer or '(unnamed)'}"


_ADVICE = (
    "they were damaged on the way, or the hosts run different versions. If it happens again, check the "
    "network between the hosts"
)
