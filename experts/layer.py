"""The MoE layer: gate, token exchange between hosts, dispatch, bank and combine.

See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.bank import ExpertBank, computing_dtype
from experts.capacity import capacity_mask
from experts.context import MoEContext
from experts.dispatch import combine, dispatch
from experts.gate import Gate, noise
from experts.kernels.loop import activate
from experts.received_rows import RowCheck, local_slots
from experts.token_exchange import ExchangeChunk, TokenExchange
from experts.types import Kind, Routing, Scores


class MoELayer(nn.Module):
    """Routed experts of any sizes in place of a feed-forward block.

    ``forward`` returns the output and the gate's routing.

    - ``capacity`` limits the rows of an expert to that multiple of its even share of a micro-batch.
      Later choices are dropped first, and among equal choices later tokens.
    - ``shared`` is the hidden size of an expert that computes every token.
    - ``load_E`` counts the tokens per expert of the previous optimizer step. ``forward`` only reads
      it; the training loop sums the counts of a step and passes them to ``balance.update_balance``.
    - ``host_E`` is the host of each expert: this one, until ``model.place`` distributes them.
    - ``layer_id`` is a number that is the same on all hosts, and another in each layer.
      ``layer_name`` is for messages."""

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
        num_experts = len(sizes)
        self.gate = Gate(
            width,
            num_experts,
            top_k,
            scores=scores,
            normalise=normalise,
            bias_rate=bias_rate,
        )
        self.bank = ExpertBank(width, sizes, kind)
        self.shared = SharedExpert(width, shared, kind) if shared else None
        self.jitter = jitter
        self.capacity = capacity
        self.context = MoEContext()
        self.layer_id = 0
        self.layer_name = ""
        self.register_buffer("load_E", torch.zeros(num_experts, dtype=torch.int64))
        self.register_buffer("host_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self._route(x_TD, x.shape[0])
        # The gate sees the tokens in full precision; experts and the exchange take autocast's type.
        input_TD = x_TD.to(computing_dtype(x_TD))
        if self.context.exchange.size == 1:
            y_TD = self._forward_local(input_TD, routing)
            if self.shared is not None:
                y_TD = y_TD + self.shared(input_TD)
        else:
            y_TD = uncompiled(self._forward_exchanged)(input_TD, routing)
        return y_TD.reshape(x.shape).to(x.dtype), routing

    def _route(self, x_TD: Tensor, first_dimension: int) -> Routing:
        context = self.context
        noise_TD = self._noise(x_TD, first_dimension) if self.jitter and self.training else None
        replay = context.replayed if context.cache is not None else None
        return self.gate(x_TD, self.load_E, noise_TD, replay)

    def _noise(self, x_TD: Tensor, first_dimension: int) -> Tensor:
        step = self.context.step
        # Inputs may be flattened to (samples * tokens, width), so the first dimension counts
        # samples only by default.
        num_samples = step.num_samples or first_dimension
        tokens, width = x_TD.shape
        tokens_per_sample = tokens // max(1, num_samples)
        first_position = step.first_sample * tokens_per_sample
        position_T = first_position + torch.arange(tokens, device=x_TD.device)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        return noise(step.seed + self.layer_id, position_T, width, self.jitter, dtype)

    def _forward_local(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Compute a layer whose experts are all on this host."""
        slots_TK = self.bank.slot_E[routing.experts_TK]
        num_rows = None
        # A traced layer has shapes and no numbers: all choices are kept.
        if self.capacity is not None and not isinstance(x_TD, FakeTensor):
            kept_TK = capacity_mask(routing.experts_TK, len(self.load_E), self.capacity, self.context)
            slots_TK = torch.where(kept_TK, slots_TK, -1)
            num_rows = int(kept_TK.sum())
        return self._compute(x_TD, slots_TK, routing.weights_TK, num_rows)

    def _forward_exchanged(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Compute a layer whose experts are on several hosts.

        The shared expert computes while tokens are on their way."""
        tokens = TokenExchange.plan(
            x_TD, routing, self.host_E, self._kept(routing), self.context, self.layer_id
        )
        # All chunks are sent before the first is received, and each output is sent back at once:
        # rows are on their way while the experts compute.
        tokens.send()
        shared_TD = self.shared(x_TD) if self.shared is not None else None
        for chunk in tokens.chunks:
            rows_GD, weights_GK, ids_GK = chunk.receive()
            slots_GK = self._received_slots(ids_GK, chunk)
            output_GD = self._compute(rows_GD, slots_GK, weights_GK, chunk.num_rows)
            chunk.send_back(output_GD)
        y_TD = tokens.receive_back()
        return y_TD if shared_TD is None else y_TD + shared_TD

    def _received_slots(self, ids_GK: Tensor, chunk: ExchangeChunk) -> Tensor:
        """Return the local slots of received ids, and start the check of these ids."""
        slots_GK = local_slots(ids_GK, self.bank.slot_E)
        if not self.context.replaying:
            receive_counts = chunk.outbound.plan.receive_counts
            check = RowCheck.start(self.layer_name, ids_GK, slots_GK, receive_counts, chunk.num_rows)
            self.context.row_checks.append(check)
        return slots_GK

    def _kept(self, routing: Routing) -> Tensor | None:
        """Return the choices that are not dropped; None where all are kept."""
        capacity = self.capacity
        # A traced layer has shapes and no numbers: all choices are kept.
        if capacity is None or isinstance(routing.experts_TK, FakeTensor):
            return None
        return self.context.replayed(
            lambda: capacity_mask(routing.experts_TK, len(self.load_E), capacity, self.context)
        )

    def _compute(
        self,
        x_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        num_rows: int | None,
    ) -> Tensor:
        """Return the weighted sum of the outputs of this host's experts for each token."""
        rows_RD, trip = dispatch(x_TD, slots_TK, weights_TK, len(self.bank.held), num_rows)
        return combine(self.bank(rows_RD, trip.counts_L, trip.weights_R), trip)


def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exclude a function from compilation.

    The compiler cannot trace an exchange, and its shapes change at every step."""
    if not torch.compiler.is_compiling():
        return function
    return cast("Callable[..., Tensor]", torch.compiler.disable(function))


class SharedExpert(nn.Module):
    """An expert that computes every token, with a weight of one."""

    def __init__(self, width: int, hidden: int, kind: Kind) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.up = nn.Linear(width, 2 * hidden if kind == "swiglu" else hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        one = torch.ones((), dtype=x_TD.dtype, device=x_TD.device)
        weights_T = one.expand(len(x_TD))
        return self.down(activate(self.up(x_TD), weights_T, self.kind))
