"""Routed experts of one layer: token exchange between hosts, dispatch and bank.

The router is not part of it: ``MoELayer`` adds our gate, models of ``transformers`` have routers of their
own. See ``types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experts.host_copy import to_host
from experts.kernels import launching
from experts.kernels.compiling import uncompiled
from experts.moe.bank import ExpertBank
from experts.moe.capacity import capacity_mask
from experts.moe.context import MoEContext
from experts.moe.shared_expert import SharedExpert
from experts.moe.token_exchange import ExchangeChunk, TokenExchange
from experts.structure import SETTLED, LayerStructure
from experts.tokens.dispatch import copy_rows, every_choice, sort_by_slot, sum_rows
from experts.tokens.received_rows import local_slots
from experts.tokens.routes import route_table
from experts.types import Choices

Number = TypeVar("Number", int, Tensor)


class RoutedExperts(nn.Module):
    """Experts of any sizes, on this host or on several.

    - ``capacity`` limits the rows of an expert to that multiple of its even share of a micro-batch.
      Later choices are dropped first, and among equal choices later tokens.
    - ``shared`` computes every token, while tokens are on their way.
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

    def __init__(
        self, bank: ExpertBank, capacity: float | None = None, shared: SharedExpert | None = None
    ) -> None:
        super().__init__()
        num_experts = len(bank.sizes)
        self.bank = bank
        self.shared = shared
        self.capacity = capacity
        self.context = MoEContext()
        self.layer_id = 0
        self.layer_name = ""
        self.register_buffer("load_E", torch.zeros(num_experts, dtype=torch.int64))
        self.register_buffer("host_E", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("route_EB", None, persistent=False)
        self.structure = LayerStructure.initial("", bank.sizes)
        self.host = (0, 1)
        """The rank of this host and the number of hosts."""

    def use_structure(
        self,
        structure: LayerStructure,
        host: tuple[int, int] = (0, 1),
        step: int = SETTLED,  # noqa: ARG002 - gates have priors that depend on it
    ) -> None:
        """Route by the hosts of a structure, which the bank has already.

        ``host`` is the rank of this host and the number of hosts. ``step`` counts the steps done."""
        rank, num_hosts = host
        experts = structure.experts
        device = self.load_E.device
        self.structure = structure
        self.host = host
        self.host_E = torch.tensor([expert.hosts[0] for expert in experts], device=device)
        self.bank.owned = tuple(row for row in self.bank.held if experts[row].hosts[0] == rank)
        has_copies = any(len(expert.hosts) > 1 for expert in experts)
        self.route_EB = None
        if has_copies:
            self.route_EB = torch.tensor(route_table(structure, rank, num_hosts), device=device)

    @property
    def top_k(self) -> int:
        """Experts per token."""
        raise NotImplementedError

    @property
    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters that have a row for each expert; none of a router that is not ours."""
        return []

    def move_bias(self, counts_E: Tensor) -> None:
        """Move the bias of the router's choices by the counts of an optimizer step, if it has one."""

    @property
    def dense_dtype(self) -> torch.dtype:
        """The type of the layer's dense part."""
        return torch.get_default_dtype()

    @property
    def chooses_all(self) -> bool:
        """Whether each token goes to all experts, however many there will be."""
        return False

    def compute(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, wherever they live."""
        if self.context.by_choice:
            local = self._sums_by_choice(x_TD)
            # Uncompiled on one host too: fused with its neighbours, an operation rounds in another way.
            y_TD = uncompiled(self._forward_local if local else self._forward_by_choice)(x_TD, choices)
        elif self.context.exchange.size > 1:
            return uncompiled(self._forward_exchanged)(x_TD, choices)
        else:
            y_TD = self._forward_local(x_TD, choices)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def _sums_by_choice(self, x_TD: Tensor) -> bool:
        """Whether the local layer adds up the outputs of a token in the order of its choices anyway.

        The kernels of a GPU do; on a CPU rows are added in the order of experts."""
        return self.context.exchange.size == 1 and launching.available(x_TD)

    def _forward_by_choice(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """Compute a layer so that its bits do not depend on the hosts of the experts.

        A token is sent to each of its experts, also to two on one host, and the outputs come back one by
        one: their sum has the order of the choices. The rows of each host are computed apart, as one process
        computes the micro-batch that they come from."""
        num_tokens, top_k = choices.experts_TK.shape
        rows = every_choice(num_tokens, top_k, x_TD.device)
        kept_TK = self._kept(choices)
        single = replace(
            choices,
            experts_TK=choices.experts_TK.reshape(-1, 1),
            weights_TK=choices.weights_TK.reshape(-1, 1),
        )
        kept_R1 = None if kept_TK is None else kept_TK.reshape(-1, 1)
        x_RD = copy_rows(x_TD, rows)
        if self.context.exchange.size > 1:
            y_RD = self._exchange_choices(x_RD, single, self._hosts(choices.experts_TK).view(-1, 1), kept_R1)
        else:
            slots_R1 = self.bank.slot_E[single.experts_TK]
            num_rows = None
            if kept_R1 is not None:
                slots_R1 = torch.where(kept_R1, slots_R1, -1)
                num_rows = int(kept_R1.sum())
            y_RD = self._compute(x_RD, slots_R1, single.weights_TK, num_rows)
        return sum_rows(y_RD, rows)

    def _exchange_choices(
        self, x_RD: Tensor, choices: Choices, host_R1: Tensor, kept_R1: Tensor | None
    ) -> Tensor:
        """Return the output of each choice, computed by the host of its expert."""
        if kept_R1 is not None:
            host_R1 = torch.where(kept_R1, host_R1, -1)
        header = (self.layer_id, len(self.load_E))
        tokens = TokenExchange.plan(x_RD, choices, host_R1, self.context, header)
        tokens.send()
        for chunk in tokens.chunks:
            rows_GD, weights_G1, ids_G1 = chunk.receive()
            slots_G1 = self._received_slots(ids_G1, chunk)
            counts = list(chunk.outbound.plan.receive_counts)
            if chunk.bound is not None:
                counts = [chunk.bound.block] * self.context.exchange.size
            parts = zip(rows_GD.split(counts), slots_G1.split(counts), weights_G1.split(counts), strict=True)
            chunk.send_back(torch.cat([self._compute_of_host(*part, chunk) for part in parts]))
        return tokens.receive_back()

    def _compute_of_host(
        self, rows_GD: Tensor, slots_G1: Tensor, weights_G1: Tensor, chunk: ExchangeChunk
    ) -> Tensor:
        """Return the outputs for the rows of one host."""
        num_rows = None
        is_bounded = False
        if chunk.bound is not None:
            max_rows = min(chunk.bound.rows, chunk.bound.expert_rows)
            is_bounded = self.bank.fuses(rows_GD, max_rows)
            num_rows = max_rows if is_bounded else int(to_host((slots_G1 >= 0).sum()))
        # A host without rows for this one has nothing to compute: its part of each gradient is zero. Padding,
        # which a message may consist of, is summed like rows.
        if num_rows == 0 or not len(rows_GD):
            return rows_GD.masked_fill(slots_G1 < 0, 0.0)
        return self._compute(rows_GD, slots_G1, weights_G1, num_rows, is_bounded)

    def _forward_local(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """Compute a layer whose experts are all on this host."""
        slots_TK = self.bank.slot_E[choices.experts_TK]
        num_rows = None
        # A traced layer has shapes and no numbers: all choices are kept.
        if self.capacity is not None and not isinstance(x_TD, FakeTensor):
            kept_TK = capacity_mask(choices.experts_TK, len(self.load_E), self.capacity, self.context)
            slots_TK = torch.where(kept_TK, slots_TK, -1)
            num_rows = int(kept_TK.sum())
        return self._compute(x_TD, slots_TK, choices.weights_TK, num_rows)

    def _forward_exchanged(self, x_TD: Tensor, choices: Choices) -> Tensor:
        """Compute a layer whose experts are on several hosts.

        The shared expert computes while tokens are on their way."""
        host_TK = self._hosts(choices.experts_TK)
        kept_TK = self._kept(choices)
        if kept_TK is not None:
            host_TK = torch.where(kept_TK, host_TK, -1)
        header = (self.layer_id, len(self.load_E))
        tokens = TokenExchange.plan(x_TD, choices, host_TK, self.context, header)
        # All chunks are sent before the first is received, and each output is sent back at once:
        # rows are on their way while the experts compute.
        tokens.send()
        shared_TD = self.shared(x_TD) if self.shared is not None else None
        for chunk in tokens.chunks:
            rows_GD, weights_GK, ids_GK = chunk.receive()
            slots_GK = self._received_slots(ids_GK, chunk)
            output_GD = self._compute_received(rows_GD, slots_GK, weights_GK, chunk)
            chunk.send_back(output_GD)
        y_TD = tokens.receive_back()
        return y_TD if shared_TD is None else y_TD + shared_TD

    def _hosts(self, experts_TK: Tensor) -> Tensor:
        """Return the host that computes each choice."""
        if self.route_EB is None:
            return self.host_E[experts_TK]
        step = self.context.step
        if self.context.by_choice:
            # One copy computes all rows of a micro-batch, as one process does; over many micro-batches the
            # copies get their shares.
            return self.route_EB[:, self._bucket(step.seed + step.first_sample)][experts_TK]
        bucket_T = self._bucket(torch.arange(len(experts_TK), device=experts_TK.device))
        return self.route_EB[experts_TK, bucket_T.unsqueeze(1)]

    def _bucket(self, number: Number) -> Number:
        """Return the bucket of a number.

        Multiplicative hashing: the upper bits of the product spread neighbours, and tokens at the same
        position of different samples, over the buckets."""
        assert self.route_EB is not None
        return ((number * 2654435769) >> 26) % self.route_EB.shape[1]

    def _received_slots(self, ids_GK: Tensor, chunk: ExchangeChunk) -> Tensor:
        """Return the local slots of received ids, and start the check of these ids."""
        slots_GK = local_slots(ids_GK, self.bank.slot_E)
        if not self.context.replaying:
            chunk.check_choices(self.layer_name, ids_GK, slots_GK)
        return slots_GK

    def _compute_received(
        self, rows_GD: Tensor, slots_GK: Tensor, weights_GK: Tensor, chunk: ExchangeChunk
    ) -> Tensor:
        """Return the weighted sums for received tokens."""
        num_rows = chunk.num_rows
        if num_rows is None:
            assert chunk.bound is not None
            max_rows = min(chunk.bound.expert_rows, slots_GK.numel())
            if self.bank.fuses(rows_GD, max_rows):
                return self._compute(rows_GD, slots_GK, weights_GK, max_rows, bounded=True)
            num_rows = int(to_host((slots_GK >= 0).sum()))
        return self._compute(rows_GD, slots_GK, weights_GK, num_rows)

    def _kept(self, choices: Choices) -> Tensor | None:
        """Return the choices that are not dropped; None where all are kept."""
        capacity = self.capacity
        # A traced layer has shapes and no numbers: all choices are kept.
        if capacity is None or isinstance(choices.experts_TK, FakeTensor):
            return None
        return self.context.replayed(
            lambda: capacity_mask(choices.experts_TK, len(self.load_E), capacity, self.context)
        )

    def _compute(
        self,
        x_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        num_rows: int | None,
        bounded: bool = False,
    ) -> Tensor:
        """Return the weighted sum of the outputs of this host's experts for each token."""
        trip = sort_by_slot(slots_TK, weights_TK, len(self.bank.held), num_rows, bounded)
        return self.bank(x_TD, trip.counts_L, trip.weights_R, trip.row_map)
