"""The bank: this host's experts, stacked per hidden size, so that each size class is one or two large products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.kernels.choice import choose_kernel
from experts.kernels.grouped import experts_grouped
from experts.kernels.loop import experts_loop, row_counts
from experts.types import Kernel, Kind


@dataclass(frozen=True)
class SizeClass:
    """Experts of one hidden size: their global ids, in the order in which they are stacked."""

    hidden: int
    ids: tuple[int, ...]


def size_classes(sizes: Sequence[int], held: Sequence[int]) -> tuple[SizeClass, ...]:
    """The held experts by hidden size, smallest first; within a class in the order of their ids."""
    hiddens = sorted({sizes[i] for i in held})
    return tuple(
        SizeClass(hidden, tuple(i for i in sorted(held) if sizes[i] == hidden)) for hidden in hiddens
    )


_WITHOUT_MEMORY: ContextVar[bool] = ContextVar("banks are built without memory", default=False)


@contextmanager
def without_memory() -> Iterator[None]:
    """Banks that are built meanwhile have shapes and no memory, until ``materialise`` gives it to those that are left."""
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


class ExpertBank(nn.Module):
    """Experts of any sizes: all of a layer's, or those that live on this host, by their global ids. A slot is an expert's
    place in the stacked order; ``slot_E`` maps ids to slots, -1 for experts that live elsewhere."""

    slot_E: Tensor

    def __init__(
        self, width: int, sizes: Sequence[int], kind: Kind = "swiglu", held: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.width, self.sizes = width, tuple(sizes)
        self.kind: Kind = kind
        self.kernel: Kernel = "auto"
        self.held = tuple(range(len(sizes))) if held is None else tuple(sorted(held))
        self.classes = size_classes(sizes, self.held)
        self.register_buffer("slot_E", self.slots(), persistent=False)
        device = "meta" if _WITHOUT_MEMORY.get() else None
        for group in self.classes:
            count, hidden = len(group.ids), group.hidden
            inner = 2 * hidden if kind == "swiglu" else hidden
            for role, shape in (("up", (count, width, inner)), ("down", (count, hidden, width))):
                drawn = torch.empty(shape, device=device).normal_(0.0, shape[1] ** -0.5)
                self.register_parameter(f"{role}_{hidden}", nn.Parameter(drawn))

    def slots(self) -> Tensor:
        order = [i for group in self.classes for i in group.ids]
        return torch.tensor(
            [order.index(i) if i in self.held else -1 for i in range(len(self.sizes))], dtype=torch.int64
        )

    def stacks(self) -> Iterator[tuple[SizeClass, str, nn.Parameter]]:
        """Each stacked parameter with its class and its role (``up`` or ``down``)."""
        for group in self.classes:
            for role in ("up", "down"):
                yield group, role, self.get_parameter(f"{role}_{group.hidden}")

    @torch.no_grad()
    def materialise(self) -> None:
        """Give the weights memory, to be filled."""
        for group, role, stack in list(self.stacks()):
            if stack.is_meta:
                made = nn.Parameter(torch.zeros_like(stack, device="cpu"), requires_grad=stack.requires_grad)
                self.register_parameter(f"{role}_{group.hidden}", made)

    @torch.no_grad()
    def part(self, held: Sequence[int]) -> ExpertBank:
        """A bank of some of these experts, with copies of their weights, on the same device."""
        with without_memory():
            bank = ExpertBank(self.width, self.sizes, self.kind, held)
        bank.kernel, bank.slot_E = self.kernel, bank.slot_E.to(self.slot_E.device)
        for group, role, _ in list(bank.stacks()):
            whole = self.get_parameter(f"{role}_{group.hidden}")
            places = [self._place(expert) for expert in group.ids]
            part = nn.Parameter(
                whole[torch.tensor(places, device=whole.device)].clone(), requires_grad=whole.requires_grad
            )
            bank.register_parameter(f"{role}_{group.hidden}", part)
        return bank

    def _place(self, expert: int) -> int:
        """Where in its stack an expert lies."""
        return next(group.ids.index(expert) for group in self.classes if expert in group.ids)

    def forward(self, rows_RD: Tensor, counts_S: Tensor, weights_R: Tensor) -> Tensor:
        """What the experts make of their rows, which come sorted by slot, each times its weight."""
        device, dtype = rows_RD.device, computing_dtype(rows_RD)
        rows_RD = rows_RD.to(dtype)
        with torch.autocast(device.type, enabled=False):
            if not self.classes:
                return rows_RD
            if len(self.classes) == 1:
                return self._compute(self.classes[0], rows_RD, counts_S, weights_R)
            per_class = counts_S.split([len(group.ids) for group in self.classes])
            sizes = row_counts(torch.stack([counts.sum() for counts in per_class]), rows_RD.shape[0])
            pieces = zip(self.classes, rows_RD.split(sizes), per_class, weights_R.split(sizes), strict=True)
            return torch.cat([self._compute(*piece) for piece in pieces])

    def _compute(self, group: SizeClass, rows_RD: Tensor, counts_E: Tensor, weights_R: Tensor) -> Tensor:
        dtype = rows_RD.dtype
        up_EDH = self.get_parameter(f"up_{group.hidden}").to(dtype)
        down_EHD = self.get_parameter(f"down_{group.hidden}").to(dtype)
        known = (
            dtype == torch.bfloat16 or not torch.compiler.is_compiling()
        )  # the compiler takes grouped products in bf16 alone
        chosen = choose_kernel(self.kernel, rows_RD.device, dtype, self.width, group.hidden)
        if (
            chosen == "grouped" and known and not isinstance(rows_RD, FakeTensor)
        ):  # traced, their arithmetic would not be counted
            return experts_grouped(rows_RD, up_EDH, down_EHD, counts_E, weights_R, self.kind)
        if (
            torch.compiler.is_compiling()
        ):  # row counts change at every step: compiled, each would be another graph
            uncompiled: Any = torch.compiler.disable(experts_loop)
            return uncompiled(rows_RD, up_EDH, down_EHD, counts_E, weights_R, self.kind)
        return experts_loop(rows_RD, up_EDH, down_EHD, counts_E, weights_R, self.kind)


def computing_dtype(x: Tensor) -> torch.dtype:
    """What experts compute in: autocast's type where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
