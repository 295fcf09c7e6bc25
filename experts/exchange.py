"""Between hosts: each sends the rows that the others' experts want, and gets what they made of them, with gradients.

Counts go first, with a header that says what is about to travel; a host that is out of step, or has another shape in mind,
is an error on both sides before a row moves. Rows travel in one message each way: a row is a token's features, and on the
way out the ids and weights of the experts that want it. A journey begins and ends in two functions, so that experts can
compute on one while the next is under way, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from experts.dispatch import summed
from experts.group import Group, Work
from experts.types import RowMap

_COLUMNS = 64  # numbers that tables of counts are filled up to, or a multiple
_ALIGNED = 8  # bytes that each part of a row begins at a multiple of


class Exchange(Protocol):
    """What hosts do with each other. ``rank`` and ``size`` are this host's place among them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def counts(self, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        """Row n goes to host n; the rows that the others sent here. ``agreed`` must be the same on all hosts."""
        ...

    def rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> PendingRows: ...


@dataclass
class Meter:
    """What the exchange has cost this host since it was last read."""

    bytes: int = 0
    rows: int = 0
    seconds: float = 0.0

    def take(self) -> tuple[int, int, float]:
        taken = self.bytes, self.rows, self.seconds
        self.bytes, self.rows, self.seconds = 0, 0, 0.0
        return taken


@dataclass
class PendingRows:
    """Rows that are on their way here."""

    received: Tensor
    work: Work | None
    meter: Meter
    sent: Tensor | None = None
    """Kept until it has left."""

    def wait(self) -> Tensor:
        if self.work is not None:
            begun = perf_counter()
            self.work.wait()
            self.meter.seconds += perf_counter() - begun
            self.work = self.sent = None
        return self.received


class LocalExchange:
    """One host: nothing travels."""

    rank, size = 0, 1

    def counts(self, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:  # noqa: ARG002
        return mine_NC.tolist()

    def rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> PendingRows:  # noqa: ARG002
        return PendingRows(rows, None, Meter())


@dataclass
class GroupExchange:
    """Hosts that talk over a process group."""

    group: Group
    meter: Meter = field(default_factory=Meter)
    _number: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def counts(self, mine_NC: Tensor, agreed: Sequence[int]) -> list[list[int]]:
        self._number += 1
        header = [self._number, *agreed]
        sent = torch.cat([mine_NC.new_tensor(header).expand(self.size, -1), mine_NC], dim=1)
        sent = F.pad(
            sent, (0, -sent.shape[1] % _COLUMNS)
        )  # gloo aborts where lengths differ, before a header can be read
        received = torch.empty_like(sent)
        begun = perf_counter()
        self.group.all_to_all(received, sent, [], []).wait()
        table = received.tolist()
        self.group.check()
        self.meter.seconds += perf_counter() - begun
        for host, row in enumerate(table):
            if row[: len(header)] != header:
                raise RuntimeError(
                    f"host {self.rank} is at exchange {header}, host {host} at {row[: len(header)]}: out of step; nothing was sent"
                )
        return [row[len(header) : len(header) + mine_NC.shape[1]] for row in table]

    def rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> PendingRows:
        rows = rows.contiguous()
        if sum(sends) != len(rows):
            raise RuntimeError(f"{sum(sends)} rows were promised to the others, and there are {len(rows)}")
        received = rows.new_empty((sum(receives), *rows.shape[1:]))
        away = len(rows) - sends[self.rank]
        self.meter.rows += away
        self.meter.bytes += away * rows.stride(0) * rows.itemsize
        return PendingRows(received, self.group.all_to_all(received, rows, receives, sends), self.meter, rows)


@dataclass(frozen=True)
class TransferPlan:
    """Rows that leave together: which tokens, how many to each host, and how many come from each."""

    fan: RowMap
    sends: tuple[int, ...]
    receives: tuple[int, ...]


class Transfer:
    """One crossing, out and, in the backward pass, back again. What has arrived is handed over and not held on to: the graph
    holds the journey, and would never be freed."""

    def __init__(self, exchange: Exchange, load: TransferPlan) -> None:
        self.exchange, self.load = exchange, load
        self.out: PendingRows | None = None
        self.back: PendingRows | None = None

    def arrived(self) -> Tensor:
        under_way, self.out = self.out, None
        assert under_way is not None, "nothing is under way"
        return under_way.wait()

    def returned(self) -> Tensor:
        under_way, self.back = self.back, None
        assert under_way is not None, "nothing is on its way back"
        return under_way.wait()


@dataclass(frozen=True)
class Layout:
    """Where the parts of a row lie, in bytes: features, weights, ids."""

    features: int
    weights: int
    ids: int
    size: int

    @classmethod
    def of(cls, x_TD: Tensor, weights_TK: Tensor) -> Layout:
        features = _aligned(x_TD.shape[1] * x_TD.itemsize)
        weights = features + _aligned(weights_TK.shape[1] * weights_TK.itemsize)
        return cls(0, features, weights, weights + _aligned(weights_TK.shape[1] * 4))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _rows(count: int, size: int, used: int, device: torch.device) -> Tensor:
    """Room for packed rows of which so many bytes will be used; where that is not all, the rest is zero."""
    return (torch.empty if used == size else torch.zeros)(count, size, dtype=torch.uint8, device=device)


def _part(packed: Tensor, begin: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A part of packed rows, sharing their memory."""
    return packed[:, begin : begin + columns * dtype.itemsize].view(dtype)


def send(x_TD: Tensor, weights_TK: Tensor, ids_SK: Tensor, anchor: Tensor, journey: Transfer) -> Tensor:
    """Send tokens to the hosts of their experts. Returns a ticket, to be handed to ``arrive``. ``anchor`` is any tensor with
    a gradient: all hosts must come by in the backward pass, also one whose rows need none."""
    ticket: Tensor = _Send.apply(x_TD, weights_TK, ids_SK, anchor, journey)  # pyright: ignore[reportAssignmentType]
    return ticket


def receive(
    ticket: Tensor, journey: Transfer, x_TD: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that other hosts sent: features, weights and ids. The last two arguments say of which kind they are."""
    return _Receive.apply(ticket, journey, x_TD.shape[1], x_TD.dtype, weights_TK.shape[1], weights_TK.dtype)  # pyright: ignore


def send_back(rows_GD: Tensor, anchor: Tensor, journey: Transfer) -> Tensor:
    """Send what became of the tokens back to where they came from."""
    ticket: Tensor = _SendBack.apply(rows_GD, anchor, journey)  # pyright: ignore[reportAssignmentType]
    return ticket


def receive_back(ticket: Tensor, journey: Transfer) -> Tensor:
    """What the hosts made of this host's tokens: a row for each host that a token was sent to."""
    rows: Tensor = _ReceiveBack.apply(ticket, journey)  # pyright: ignore[reportAssignmentType]
    return rows


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_SK: Tensor, anchor: Tensor, journey: Transfer
    ) -> Tensor:
        load, layout = journey.load, Layout.of(x_TD, weights_TK)
        source_S = load.fan.source_R
        used = x_TD.shape[1] * x_TD.itemsize + weights_TK.shape[1] * (weights_TK.itemsize + ids_SK.itemsize)
        packed = _rows(len(source_S), layout.size, used, x_TD.device)
        torch.index_select(x_TD, 0, source_S, out=_part(packed, layout.features, x_TD.shape[1], x_TD.dtype))
        torch.index_select(
            weights_TK, 0, source_S, out=_part(packed, layout.weights, weights_TK.shape[1], weights_TK.dtype)
        )
        _part(packed, layout.ids, ids_SK.shape[1], torch.int32).copy_(ids_SK)
        journey.out = journey.exchange.rows(packed, load.sends, load.receives)
        ctx.journey, ctx.layout = journey, layout
        ctx.kinds = x_TD.shape[1], x_TD.dtype, weights_TK.shape[1], weights_TK.dtype
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # noqa: ARG004
        journey: Transfer = ctx.journey
        packed = journey.returned()
        width, dtype, top_k, weight_dtype = ctx.kinds
        fan = journey.load.fan
        grad_TD = summed(_part(packed, 0, width, dtype), fan.source_R, fan.back_TK, fan.full)
        grad_TK = summed(
            _part(packed, ctx.layout.weights, top_k, weight_dtype), fan.source_R, fan.back_TK, fan.full
        )
        return grad_TD, grad_TK, None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ticket: Tensor,
        journey: Transfer,
        width: int,
        dtype: torch.dtype,
        top_k: int,
        weight_dtype: torch.dtype,
    ) -> Any:
        packed = journey.arrived()
        layout = Layout.of(
            torch.empty(0, width, dtype=dtype, device="meta"),
            torch.empty(0, top_k, dtype=weight_dtype, device="meta"),
        )
        rows_GD = _part(packed, layout.features, width, dtype)
        weights_GK = _part(packed, layout.weights, top_k, weight_dtype).contiguous()
        ids_GK = _part(packed, layout.ids, top_k, torch.int32).long()
        ctx.journey, ctx.layout, ctx.ticket = journey, layout, (ticket.dtype, ticket.device)
        ctx.mark_non_differentiable(ids_GK)
        return rows_GD, weights_GK, ids_GK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        journey: Transfer = ctx.journey
        grad_GD, grad_GK, _ = grads
        used = grad_GD.shape[1] * grad_GD.itemsize + grad_GK.shape[1] * grad_GK.itemsize
        packed = _rows(len(grad_GD), ctx.layout.ids, used, grad_GD.device)
        _part(packed, ctx.layout.features, grad_GD.shape[1], grad_GD.dtype).copy_(grad_GD)
        _part(packed, ctx.layout.weights, grad_GK.shape[1], grad_GK.dtype).copy_(grad_GK)
        journey.back = journey.exchange.rows(packed, journey.load.receives, journey.load.sends)
        dtype, device = ctx.ticket
        return torch.zeros((), dtype=dtype, device=device), None, None, None, None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_GD: Tensor, anchor: Tensor, journey: Transfer) -> Tensor:
        journey.out = journey.exchange.rows(rows_GD, journey.load.receives, journey.load.sends)
        ctx.journey = journey
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ARG004
        journey: Transfer = ctx.journey
        return journey.returned(), None, None


class _ReceiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, journey: Transfer) -> Tensor:
        ctx.journey, ctx.ticket = journey, (ticket.dtype, ticket.device)
        return journey.arrived()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        journey: Transfer = ctx.journey
        journey.back = journey.exchange.rows(grads[0], journey.load.sends, journey.load.receives)
        dtype, device = ctx.ticket
        return torch.zeros((), dtype=dtype, device=device), None
