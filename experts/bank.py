"""The bank: this host's experts, stacked per hidden size, so that each size class is one or two large products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.kernels.grouped import experts_grouped, grouped_is_fused
from experts.kernels.loop import experts_loop, row_counts


@dataclass(frozen=True)
class SizeClass:
    """Experts of one hidden size: their global ids, in the order in which they are stacked."""

    hidden: int
    ids: tuple[int, ...]


def size_classes(sizes: Sequence[int]) -> tuple[SizeClass, ...]:
    """Experts by hidden size, smallest first; within a class in the order of their ids."""
    return tuple(SizeClass(hidden, tuple(i for i, size in enumerate(sizes) if size == hidden)) for hidden in sorted(set(sizes)))


class ExpertBank(nn.Module):
    """SwiGLU experts of any sizes. A slot is an expert's place in the stacked order; ``slot_E`` maps ids to slots."""

    slot_E: Tensor

    def __init__(self, width: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.width = width
        self.classes = size_classes(sizes)
        slots = [i for group in self.classes for i in group.ids]
        self.register_buffer("slot_E", torch.tensor([slots.index(i) for i in range(len(sizes))]), persistent=False)
        for group in self.classes:
            count, hidden = len(group.ids), group.hidden
            self.register_parameter(f"up_{hidden}", nn.Parameter(torch.empty(count, width, 2 * hidden)))
            self.register_parameter(f"down_{hidden}", nn.Parameter(torch.empty(count, hidden, width)))

    def stacks(self) -> Iterator[tuple[SizeClass, str, nn.Parameter]]:
        """Each stacked parameter with its class and its role (``up`` or ``down``)."""
        for group in self.classes:
            for role in ("up", "down"):
                yield group, role, self.get_parameter(f"{role}_{group.hidden}")

    def forward(self, rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        """What the experts make of their rows, which come sorted by slot."""
        device = rows_RD.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else rows_RD.dtype
        with torch.autocast(device.type, enabled=False):
            if len(self.classes) == 1:
                return self._compute(self.classes[0], rows_RD.to(dtype), counts_S, dtype)
            per_class = counts_S.split([len(group.ids) for group in self.classes])
            sizes = row_counts(torch.stack([counts.sum() for counts in per_class]), rows_RD.shape[0])
            pieces = rows_RD.to(dtype).split(sizes)
            made = [self._compute(g, rows, c, dtype) for g, rows, c in zip(self.classes, pieces, per_class, strict=True)]
            return torch.cat(made)

    def _compute(self, group: SizeClass, rows_RD: Tensor, counts_E: Tensor, dtype: torch.dtype) -> Tensor:
        up_EDH = self.get_parameter(f"up_{group.hidden}").to(dtype)
        down_EHD = self.get_parameter(f"down_{group.hidden}").to(dtype)
        fused = grouped_is_fused(rows_RD.device, dtype, self.width, group.hidden)
        if fused:
            return experts_grouped(rows_RD, up_EDH, down_EHD, counts_E)
        if torch.compiler.is_compiling():  # row counts change at every step: compiled, each would be another graph
            uncompiled: Any = torch.compiler.disable(experts_loop)
            return uncompiled(rows_RD, up_EDH, down_EHD, counts_E)
        return experts_loop(rows_RD, up_EDH, down_EHD, counts_E)
