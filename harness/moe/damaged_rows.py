"""An exchange that receives damaged rows, as after an abort of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from experts.model import attach, place
from experts.moe.context import MoEContext
from experts.moe.layer import MoELayer
from experts.tokens.exchange import Meter, PendingRows

WIDTH = 8


@dataclass
class DamagingExchange:
    """Each host announces as many rows as it gets, and damaged ones arrive, of random bits or of one
    byte."""

    size: int
    seed: int = 0
    fill: int | None = None
    rank: int = 0

    def all_to_all_counts(self, counts_NC: Tensor, header: Sequence[int]) -> Tensor:
        return counts_NC.cpu()

    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> PendingRows:
        row_bytes = rows.shape[1] * rows.itemsize
        generator = torch.Generator().manual_seed(self.seed)
        received = torch.randint(256, (sum(receive_counts), row_bytes), generator=generator)
        if self.fill is not None:
            received.fill_(self.fill)
        return PendingRows(received.to(rows.device, torch.uint8).view(rows.dtype), None, Meter())


class LayerWithContext(nn.Module):
    """A model of one MoE layer."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.moe = MoELayer(WIDTH, sizes, 2)


def make_layer(
    exchange: DamagingExchange, sizes: Sequence[int], kernel: Literal["loop", "grouped"], device: str = "cpu"
) -> MoELayer:
    """A layer whose experts go in turn to the hosts of the exchange."""
    model = LayerWithContext(sizes)
    attach(model, MoEContext(exchange))
    place(model, [[expert % exchange.size for expert in range(len(sizes))]], exchange.rank)
    model.moe.bank.kernel = kernel
    return model.moe.to(device)


def compute_layer(layer: MoELayer, tokens: int) -> Tensor:
    """Run forward and backward; return the input, with its gradient."""
    generator = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, WIDTH, generator=generator).to(layer.load_E.device).requires_grad_()
    y_TD, _ = layer(x_TD)
    y_TD.backward(torch.ones_like(y_TD))
    return x_TD
