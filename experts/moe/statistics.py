"""Statistics of a layer's routing, from which decisions about its experts are made.

Sums over tokens are kept per host and added up over the hosts when they are needed. Their memory does not
grow with the length of a run. See ``types`` for the letters of shapes; P counts sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from experts.kernels.autocast import without_autocast
from experts.moe.gate import Gate, mix_bits
from experts.types import Routing

NUM_SAMPLES = 32
"""Tokens of a step that experts are compared on."""
_MAX_PAIRS = 256  # experts; beyond, a table of pairs would outgrow the other statistics
_GRID = 2**20
"""Steps of the grid per unit: fp64 adds up to 2**33 units exactly."""
_ROUNDER = 1.5 * 2**52 / _GRID
"""A number whose neighbours in fp64 are one step of the grid apart: adding it rounds."""
_NO_PRIORITY = torch.iinfo(torch.int64).max


class ExpertStatistics(nn.Module):
    """Sums since the last decision: tokens, entropy of the gate, use of each expert, choices per pair.

    The use of an expert is the number of tokens that chose it, or the sum of its weights where every
    token goes to every expert."""

    sums: Tensor
    local_sums: Tensor
    sample_PD: Tensor
    priority_P: Tensor

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._samples = True
        num_pairs = num_experts**2 if num_experts <= _MAX_PAIRS else 0
        # One vector, so that all layers are added up over the hosts in one collective.
        self.register_buffer("sums", torch.zeros(2 + num_experts + num_pairs, dtype=torch.float64))
        self.register_buffer("local_sums", torch.zeros_like(self.sums), persistent=False)
        self.register_buffer("sample_PD", torch.zeros(NUM_SAMPLES, width), persistent=False)
        self.register_buffer("priority_P", torch.full((NUM_SAMPLES,), _NO_PRIORITY), persistent=False)

    @torch.no_grad()
    def observe(self, x_TD: Tensor, routing: Routing, gate: Gate, position_T: Tensor) -> None:
        """Count the routing of one pass, and keep some of its tokens."""
        # Autocast would round the probabilities and the counts.
        with without_autocast(x_TD):
            self._count(x_TD, routing, gate)
        if self._samples:
            self._sample(x_TD, position_T)

    def _count(self, x_TD: Tensor, routing: Routing, gate: Gate) -> None:
        """Add the sums of one pass. In few operations: in small models each of them counts."""
        probabilities_TE = gate.probabilities(x_TD)
        use_E = routing.counts_E
        if gate.chooses_all:
            weights_R = routing.weights_TK.detach().double().flatten()
            use_E = self.local_sums.new_zeros(len(use_E))
            use_E.scatter_add_(0, routing.experts_TK.flatten(), weights_R)
        tokens = self.local_sums.new_full((1,), len(x_TD))
        entropy = torch.special.entr(probabilities_TE).sum().view(1)
        parts = [tokens, entropy, use_E]
        if self.num_experts <= _MAX_PAIRS:
            chosen_TE = torch.zeros_like(probabilities_TE).scatter_(1, routing.experts_TK, 1.0)
            parts.append((chosen_TE.t() @ chosen_TE).view(-1))
        # The concatenation is in fp64, as the number of tokens is.
        self.local_sums.add_(_round(torch.cat(parts)))

    def _sample(self, x_TD: Tensor, position_T: Tensor) -> None:
        """Keep the tokens of the step with the lowest hashes of their positions, on any host."""
        priority = torch.cat([self.priority_P, mix_bits(position_T)])
        tokens = torch.cat([self.sample_PD, x_TD.to(self.sample_PD.dtype)])
        lowest_P, order_P = priority.topk(NUM_SAMPLES, largest=False)
        # In place: a step that is repeated puts these buffers back.
        self.priority_P.copy_(lowest_P)
        self.sample_PD.copy_(tokens[order_P])

    @property
    def of_step(self) -> tuple[Tensor, ...]:
        """The buffers that the passes of a step change."""
        return self.local_sums, self.sample_PD, self.priority_P

    def begin_step(self, samples: bool = True) -> None:
        """Begin to observe a step. ``samples`` if tokens of it are kept, in place of those before."""
        self._samples = samples
        if samples:
            self.priority_P.fill_(_NO_PRIORITY)

    def reset(self) -> None:
        """Begin a new window."""
        self.sums.zero_()
        self.local_sums.zero_()

    def gather_sample(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sampled tokens of all hosts. ``gather`` returns a tensor of each host, stacked.

        The same tokens are sampled however many hosts there are."""
        priorities = gather(self.priority_P).reshape(-1)
        tokens = gather(self.sample_PD).flatten(0, 1)
        lowest_P, order_P = priorities.topk(NUM_SAMPLES, largest=False)
        return tokens[order_P[lowest_P != _NO_PRIORITY]]

    @property
    def tokens(self) -> float:
        return float(self.sums[0])

    @property
    def entropy(self) -> float:
        """The mean entropy of the gate's probabilities, as a fraction of the largest possible."""
        if not self.tokens or self.num_experts == 1:
            return 0.0
        largest = float(torch.tensor(self.num_experts, dtype=torch.float64).log())
        return float(self.sums[1]) / self.tokens / largest

    @property
    def use_E(self) -> Tensor:
        return self.sums[2 : 2 + self.num_experts]

    @property
    def together_EE(self) -> Tensor:
        """The tokens that chose both of two experts; zero beyond a number of experts."""
        pairs = self.sums[2 + self.num_experts :]
        if not len(pairs):
            return torch.zeros(self.num_experts, self.num_experts, dtype=torch.float64)
        return pairs.view(self.num_experts, self.num_experts)


def _round(sums: Tensor) -> Tensor:
    """Round sums in place, to a grid on which additions are exact.

    Sums then have the same bits in any order: a snapshot may add up the hosts earlier."""
    return sums.add_(_ROUNDER).sub_(_ROUNDER)


def reduce_statistics(statistics: list[ExpertStatistics], all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Add the sums of all hosts, which ``all_reduce`` adds up, to the totals of each layer."""
    if not statistics:
        return
    vector = all_reduce(torch.cat([layer.local_sums for layer in statistics]))
    for layer, sums in zip(statistics, vector.split([len(s.sums) for s in statistics]), strict=True):
        layer.sums += sums
        layer.local_sums.zero_()
