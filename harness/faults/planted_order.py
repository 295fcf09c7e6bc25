"""Errors in the order of sums, in shapes and in draws, planted in a rank: with them the bits of a run depend
on its hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.model import mix
from experts.moe.routed import RoutedExperts
from experts.moe.token_exchange import TokenExchange
from orchestrator.train.optim.exact_sums import ExactSums
from orchestrator.train.stepper import Stepper, seed_torch

Patch = Callable[[pytest.MonkeyPatch, int], None]


def sum_in_the_order_of_ranks(patch: pytest.MonkeyPatch, _rank: int) -> None:
    """Sum gradients as they come, in fp32: on a host first, then over the hosts."""

    def add(sums: ExactSums, parameter: nn.Parameter, gradient: Tensor) -> None:
        if gradient.numel():
            total = sums.multiples(parameter)
            total += gradient.detach() * 2.0**-sums.exponent

    def multiples(sums: ExactSums, parameter: nn.Parameter) -> Tensor:
        return sums._sums.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32))

    patch.setattr(ExactSums, "add", add)
    patch.setattr(ExactSums, "multiples", multiples)


def draw_by_rank(patch: pytest.MonkeyPatch, rank: int) -> None:
    def seed(stepper: Stepper, step: int, number: int) -> None:
        seed_torch(mix(stepper.seed, "step", step, "rank", rank, number), stepper.world.device)

    patch.setattr(Stepper, "_seed_micro_batch", seed)


def multiply_the_rows_of_all_sources_together(patch: pytest.MonkeyPatch, _rank: int) -> None:
    def exchange(layer: Any, x_RD: Tensor, choices: Any, host_R1: Tensor, kept_R1: Tensor | None) -> Tensor:
        if kept_R1 is not None:
            host_R1 = torch.where(kept_R1, host_R1, -1)
        header = (layer.layer_id, len(layer.load_E))
        tokens = TokenExchange.plan(x_RD, choices, host_R1, layer.context, header)
        tokens.send()
        (chunk,) = tokens.chunks
        rows_GD, weights_G1, ids_G1 = chunk.receive()
        chunk.send_back(layer._compute(rows_GD, layer._received_slots(ids_G1, chunk), weights_G1, None))
        return tokens.receive_back()

    patch.setattr(RoutedExperts, "_exchange_choices", exchange)


def choose_the_grid_by_one_host(patch: pytest.MonkeyPatch, _rank: int) -> None:
    """Choose the grid of the next step by the largest gradient that this host has seen."""
    original = ExactSums.why_repeat

    def why_repeat(sums: ExactSums, largest: float, norm: float) -> str | None:
        own = float(sums.largest(torch.device("cpu")))
        reason = original(sums, largest, norm)
        sums.exponent = round(own * 2) - 40
        return reason

    patch.setattr(ExactSums, "why_repeat", why_repeat)


ERRORS: dict[str, Patch] = {
    "a sum in the order of ranks": sum_in_the_order_of_ranks,
    "a random number drawn by rank": draw_by_rank,
    "a product over the rows of all sources": multiply_the_rows_of_all_sources_together,
    "a grid chosen by one host": choose_the_grid_by_one_host,
}


@contextmanager
def planted(rank: int, name: str) -> Iterator[None]:
    """Plant an error in the process of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        ERRORS[name](patch, rank)
        yield
