"""The MoE layer: gate, token exchange between hosts, dispatch, bank and combine.

See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.bank import ExpertBank, computing_dtype
from experts.capacity import capacity_mask
from experts.context import MoEContext
from experts.gate import Gate, coin, noise
from experts.kernels.loop import activate
from experts.statistics import ExpertStatistics
from experts.structure import SETTLED, LayerStructure
from experts.token_exchange import ExchangeChunk, TokenExchange
from experts.tokens.dispatch import combine, dispatch
from experts.tokens.received_rows import RowCheck, local_slots
from experts.tokens.routes import route_table
from experts.types import Kind, Routing, Scores

T = TypeVar("T")


class MoELayer(nn.Module):
    """Routed experts of any sizes in place of a feed-forward block.

    ``forward`` returns the output and the gate's routing.

    - ``capacity`` limits the rows of an expert to that multiple of its even share of a micro-batch.
      Later choices are dropped first, and among equal choices later tokens.
    - ``shared`` is the hidden size of an expert that computes every token.
    - ``load_E`` counts the tokens per expert of the previous optimizer step. ``forward`` only reads
      it; the training loop sums the counts of a step and passes them to ``balance.update_balance``.
    - ``structure`` describes the experts. ``host_E`` is the host of each: this one, until
      ``model.place`` distributes them. Where an expert has copies on several hosts, ``route_EB`` is
      the host for each bucket of this host's tokens.
    - ``layer_id`` is a number that is the same on all hosts, and another in each layer.
      ``layer_name`` is for messages."""

    load_E: Tensor
    host_E: Tensor
    route_EB: Tensor | None
    twin_E: Tensor | None
    chosen_row_E: Tensor | None

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
        self.register_buffer("route_EB", None, persistent=False)
        self.register_buffer("twin_E", None, persistent=False)
        self.register_buffer("chosen_row_E", None, persistent=False)
        self.structure = LayerStructure.initial("", sizes)
        self.statistics: ExpertStatistics | None = None

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

    def use_structure(
        self, structure: LayerStructure, host: tuple[int, int] = (0, 1), step: int = SETTLED
    ) -> None:
        """Route by the hosts, twins and priors of a structure, which the bank and the gate have already.

        ``host`` is the rank of this host and the number of hosts. ``step`` counts the steps done."""
        rank, num_hosts = host
        experts = structure.experts
        device = self.load_E.device
        self.structure = structure
        self.host_E = torch.tensor([expert.hosts[0] for expert in experts], device=device)
        self.bank.owned = tuple(row for row in self.bank.held if experts[row].hosts[0] == rank)
        has_copies = any(len(expert.hosts) > 1 for expert in experts)
        self.route_EB = None
        if has_copies:
            self.route_EB = torch.tensor(route_table(structure, rank, num_hosts), device=device)
        self._use_twins()
        self.use_priors(step)

    def _use_twins(self) -> None:
        """Set the twin of each expert, and the expert that the gate chose where a twin computes."""
        experts = self.structure.experts
        device = self.load_E.device
        twins = {expert.twin_of: row for row, expert in enumerate(experts) if expert.twin_of is not None}
        self.twin_E = None
        self.chosen_row_E = None
        if twins:
            twin_rows = [twins.get(expert.id, -1) for expert in experts]
            parents = [e.id if e.twin_of is None else e.twin_of for e in experts]
            chosen_rows = [self.structure.index(parent) for parent in parents]
            self.twin_E = torch.tensor(twin_rows, device=device)
            self.chosen_row_E = torch.tensor(chosen_rows, device=device)

    def use_priors(self, step: int) -> None:
        """Set the gate's priors for the step after ``step``."""
        self.gate.use_priors([expert.prior_at(step) for expert in self.structure.experts])

    def gate_counts(self, counts_E: Tensor) -> Tensor:
        """Return the tokens that the gate chose each expert for: a twin's are its parent's."""
        if self.chosen_row_E is None:
            return counts_E
        return torch.zeros_like(counts_E).scatter_add_(0, self.chosen_row_E, counts_E)

    def _route(self, x_TD: Tensor, first_dimension: int) -> Routing:
        context = self.context
        noise_TD = self._noise(x_TD, first_dimension) if self.jitter and self.training else None
        replay = context.replayed if context.cache is not None else None
        routing = self.gate(x_TD, self.gate_counts(self.load_E), noise_TD, replay)
        if self.twin_E is not None and self.training:
            routing = self._share_with_twins(routing, self._positions(x_TD, first_dimension))
        if self.statistics is not None and self.training and context.observes:
            position_T = self._positions(x_TD, first_dimension)
            uncompiled(self.statistics.observe)(x_TD, routing, self.gate, position_T)
        return routing

    def _share_with_twins(self, routing: Routing, position_T: Tensor) -> Routing:
        """Send about half of the tokens of an expert that has a twin to the twin."""
        assert self.twin_E is not None
        twins_TK = self.twin_E[routing.experts_TK]
        goes_T = coin(self.context.step.seed + self.layer_id, position_T)
        experts_TK = torch.where((twins_TK >= 0) & goes_T.unsqueeze(1), twins_TK, routing.experts_TK)
        expert_R = experts_TK.flatten()
        counts_E = torch.zeros_like(self.load_E).scatter_add_(0, expert_R, torch.ones_like(expert_R))
        return replace(routing, experts_TK=experts_TK, counts_E=counts_E)

    def _positions(self, x_TD: Tensor, first_dimension: int) -> Tensor:
        """Return the positions of the tokens in the global batch."""
        step = self.context.step
        # Inputs may be flattened to (samples * tokens, width), so the first dimension counts
        # samples only by default.
        num_samples = step.num_samples or first_dimension
        tokens = len(x_TD)
        tokens_per_sample = tokens // max(1, num_samples)
        first_position = step.first_sample * tokens_per_sample
        return first_position + torch.arange(tokens, device=x_TD.device)

    def _noise(self, x_TD: Tensor, first_dimension: int) -> Tensor:
        position_T = self._positions(x_TD, first_dimension)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        seed = self.context.step.seed + self.layer_id
        return noise(seed, position_T, x_TD.shape[1], self.jitter, dtype)

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
        host_TK = self._hosts(routing.experts_TK)
        kept_TK = self._kept(routing)
        if kept_TK is not None:
            host_TK = torch.where(kept_TK, host_TK, -1)
        header = (self.layer_id, len(self.load_E))
        tokens = TokenExchange.plan(x_TD, routing, host_TK, self.context, header)
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

    def _hosts(self, experts_TK: Tensor) -> Tensor:
        """Return the host that computes each choice."""
        if self.route_EB is None:
            return self.host_E[experts_TK]
        token_T = torch.arange(len(experts_TK), device=experts_TK.device)
        # The upper bits of a product: tokens at one place of their samples are in different buckets.
        bucket_T = ((token_T * 2654435769) >> 26) % self.route_EB.shape[1]
        return self.route_EB[experts_TK, bucket_T.unsqueeze(1)]

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


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Exclude a function from compilation.

    The compiler cannot trace an exchange, and its shapes change at every step."""
    if not torch.compiler.is_compiling():
        return function
    return cast("Callable[..., T]", torch.compiler.disable(function))


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
