"""The MoE layer: gate, exchange between hosts, dispatch, bank, combine, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.bank import ExpertBank, computing_dtype
from experts.context import MoEContext
from experts.dispatch import combine, dispatch
from experts.gate import Gate, noise
from experts.kernels.loop import activate
from experts.token_exchange import TokenExchange, kept_choices
from experts.types import Kind, Routing, Scores


class MoELayer(nn.Module):
    """Routed experts of any sizes in place of a feed-forward block. Returns its output and what the gate decided.

    ``load_E`` counts the tokens per expert of the previous optimizer step. ``forward`` only reads it; whoever runs the
    steps sums the counts of a step's routings and hands them to ``load.settle``. ``shared`` is the hidden size of an expert
    that sees every token. ``capacity`` bounds the rows of an expert to that multiple of its even share of a micro-batch;
    later choices are dropped first, and among them later tokens. ``context`` and ``host_E`` say where experts live: here, all
    of them, until ``model.place`` says otherwise."""

    load_E: Tensor
    host_E: Tensor

    def __init__(
        self,
        width: int,
        sizes: Sequence[int],
        top_k: int,
        *,
        kind: Kind = "swiglu",
        scores: Scores = "softmax",
        normalise: bool = True,
        bias_rate: float = 0.0,
        jitter: float = 0.0,
        capacity: float | None = None,
        shared: int | None = None,
    ) -> None:
        super().__init__()
        self.gate = Gate(width, len(sizes), top_k, scores=scores, normalise=normalise, bias_rate=bias_rate)
        self.bank = ExpertBank(width, sizes, kind)
        self.shared = SharedExpert(width, shared, kind) if shared else None
        self.jitter, self.capacity = jitter, capacity
        self.context = MoEContext()
        self.number = 0
        self.register_buffer("load_E", torch.zeros(len(sizes), dtype=torch.int64))
        self.register_buffer("host_E", torch.zeros(len(sizes), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self._route(x_TD, x.shape[0])
        sent_TD = x_TD.to(computing_dtype(x_TD))
        if self.context.exchange.size == 1:
            y_TD = self._forward_local(sent_TD, routing)
            if self.shared is not None:
                y_TD = y_TD + self.shared(sent_TD)
        else:
            y_TD = uncompiled(self._forward_exchanged)(sent_TD, routing)
        return y_TD.reshape(x.shape).to(x.dtype), routing

    def _route(self, x_TD: Tensor, samples: int) -> Routing:
        context = self.context
        noise_TD = None
        if self.jitter and self.training:
            step = context.step
            per_sample = len(x_TD) // max(1, step.num_samples or samples)
            position_T = step.first_sample * per_sample + torch.arange(len(x_TD), device=x_TD.device)
            exact = torch.promote_types(x_TD.dtype, torch.float32)
            noise_TD = noise(step.seed + self.number, position_T, x_TD.shape[1], self.jitter, exact)
        return self.gate(x_TD, self.load_E, noise_TD, context.replayed if context.cache is not None else None)

    def _forward_local(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """All experts are here: tokens go straight to them."""
        slots_TK, rows = self.bank.slot_E[routing.experts_TK], None
        if self.capacity is not None and not isinstance(
            x_TD, FakeTensor
        ):  # traced, there are no numbers: all are kept
            kept_TK = kept_choices(routing.experts_TK, len(self.load_E), self.capacity, self.context)
            slots_TK = torch.where(kept_TK, slots_TK, -1)
            rows = int(kept_TK.sum())
        rows_RD, trip = dispatch(x_TD, slots_TK, routing.weights_TK, len(self.bank.held), rows)
        return combine(self.bank(rows_RD, trip.counts_S, trip.weights_R), trip)

    def _forward_exchanged(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Tokens travel to their experts' hosts, in parts, and back; the shared expert computes meanwhile."""
        context = self.context
        kept_TK = None
        if self.capacity is not None:
            kept_TK = context.replayed(
                lambda: kept_choices(routing.experts_TK, len(self.load_E), self.capacity or 0.0, context)
            )
        crossing = TokenExchange.of(x_TD, routing, self.host_E, kept_TK, context, self.number)
        crossing.set_out()
        beside_TD = self.shared(x_TD) if self.shared is not None else None
        for part in crossing.parts:
            rows_GD, weights_GK, ids_GK = part.arrive()
            slots_GK = torch.where(ids_GK < 0, -1, self.bank.slot_E[ids_GK.clamp(min=0)])
            rows_RD, trip = dispatch(rows_GD, slots_GK, weights_GK, len(self.bank.held), part.pairs)
            part.set_out_back(combine(self.bank(rows_RD, trip.counts_S, trip.weights_R), trip))
        y_TD = crossing.back_home()
        return y_TD if beside_TD is None else y_TD + beside_TD


def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as it is, where the compiler comes by: it neither sees through an exchange nor likes its changing shapes."""
    return (
        cast("Callable[..., Tensor]", torch.compiler.disable(function))
        if torch.compiler.is_compiling()
        else function
    )


class SharedExpert(nn.Module):
    """An expert that every token goes to, with a weight of one."""

    def __init__(self, width: int, hidden: int, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.up = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        one = torch.ones((), dtype=x_TD.dtype, device=x_TD.device)
        return self.down(activate(self.up(x_TD), one.expand(len(x_TD)), self.kind))
