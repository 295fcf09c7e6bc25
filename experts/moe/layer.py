"""The MoE layer: a gate and the experts that it chooses. See ``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from experts.kernels.compiling import uncompiled
from experts.kernels.slot_sort import count_choices
from experts.moe.bank import ExpertBank, computing_dtype
from experts.moe.gate import Gate, coin, noise, shift_bias
from experts.moe.routed import RoutedExperts
from experts.moe.shared_expert import SharedExpert
from experts.moe.statistics import ExpertStatistics
from experts.structure import SETTLED, LayerStructure
from experts.types import Kind, Routing, Scores


class MoELayer(RoutedExperts):
    """Routed experts of any sizes in place of a feed-forward block.

    ``forward`` returns the output and the gate's routing. ``shared`` is the hidden size of an expert
    that computes every token; see ``RoutedExperts`` for the rest."""

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
        num_experts = len(sizes)
        gate = Gate(
            width,
            num_experts,
            top_k,
            scores=scores,
            normalise=normalise,
            bias_rate=bias_rate,
        )
        bank = ExpertBank(width, sizes, kind)
        super().__init__(bank, capacity, SharedExpert(width, shared, kind) if shared else None)
        self.gate = gate
        self.jitter = jitter
        self.register_buffer("twin_E", None, persistent=False)
        self.register_buffer("chosen_row_E", None, persistent=False)
        self.statistics: ExpertStatistics | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self._route(x_TD, x.shape[0])
        # The gate sees the tokens in full precision; experts and the exchange take autocast's type.
        input_TD = x_TD.to(computing_dtype(x_TD))
        y_TD = self.compute(input_TD, routing)
        return y_TD.reshape(x.shape).to(x.dtype), routing

    def use_structure(
        self, structure: LayerStructure, host: tuple[int, int] = (0, 1), step: int = SETTLED
    ) -> None:
        """Route by the hosts, twins and priors of a structure, which the bank and the gate have already.

        ``host`` is the rank of this host and the number of hosts. ``step`` counts the steps done."""
        super().use_structure(structure, host, step)
        self._use_twins()
        self.use_priors(step)

    def _use_twins(self) -> None:
        """Set each expert's twin, and the row that the gate chooses for it: its own, or its parent's."""
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

    @property
    def top_k(self) -> int:
        return self.gate.top_k

    @property
    def router_parameters(self) -> list[nn.Parameter]:
        return [self.gate.weight_ED]

    @property
    def dense_dtype(self) -> torch.dtype:
        return self.gate.weight_ED.dtype

    @property
    def chooses_all(self) -> bool:
        return self.gate.chooses_all

    def gate_counts(self, counts_E: Tensor) -> Tensor:
        """Return the tokens that the gate chose each expert for: a twin's are its parent's."""
        if self.chosen_row_E is None:
            return counts_E
        return torch.zeros_like(counts_E).scatter_add_(0, self.chosen_row_E, counts_E)

    def move_bias(self, counts_E: Tensor) -> None:
        gate = self.gate
        if gate.bias_rate:
            shift_bias(gate.bias_E, self.gate_counts(counts_E), gate.num_choosable, gate.bias_rate)

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
        counts_E = count_choices(experts_TK, len(self.load_E))
        return replace(routing, experts_TK=experts_TK, counts_E=counts_E)

    def _positions(self, x_TD: Tensor, first_dimension: int) -> Tensor:
        """Return the positions of the tokens in the global batch."""
        return self.context.step.positions(len(x_TD), first_dimension, x_TD.device)

    def _noise(self, x_TD: Tensor, first_dimension: int) -> Tensor:
        position_T = self._positions(x_TD, first_dimension)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        seed = self.context.step.seed + self.layer_id
        return noise(seed, position_T, x_TD.shape[1], self.jitter, dtype)
