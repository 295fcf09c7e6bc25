"""Balance of a language model's experts: by an auxiliary loss, or by the routers' biases.

The auxiliary loss is that of ``transformers`` for the whole batch, from counts of all workers. Its
gradient needs the choices of all passes of a step, and its scale the labels of all: both are counted
before the step's first pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.transformers.balance import (
    BalanceCounts,
    RouterOutputs,
    balance_loss,
    pass_counts,
    use_balance_bias,
)
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.task import StepPreview

Forward = Callable[[nn.Module, Any], RouterOutputs]
_NO_LABEL = -100


def has_balance_loss(model_config: Any) -> bool:
    """Return whether models of this configuration have an auxiliary loss."""
    return getattr(model_config.get_text_config(), "router_aux_loss_coef", None) is not None


class StepBalance:
    """The auxiliary loss, with the counts of the step that is trained."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._counts: BalanceCounts | None = None
        self._labels = torch.zeros(())

    @classmethod
    def of(cls, weight: float | None, model_config: Any) -> StepBalance | None:
        """Return the auxiliary loss with the given weight, else that of the model; None without one."""
        text_config = model_config.get_text_config()
        if weight and not has_balance_loss(model_config):
            raise UserError(
                f"--balance-loss is {weight}, but {text_config.model_type} models have no auxiliary loss; "
                "leave it out"
            )
        own_weight = getattr(text_config, "router_aux_loss_coef", None)
        if weight is None:
            weight = own_weight if getattr(text_config, "output_router_logits", False) else None
        return cls(weight) if weight else None

    def prepare(self, preview: StepPreview, forward: Forward) -> None:
        """Count the labels of a step over all workers and, where it has several passes, the choices."""
        labels = sum((batch["labels"] != _NO_LABEL).sum() for batch in preview.batches())
        self._labels = preview.all_reduce(torch.as_tensor(labels).double())
        self._counts = None
        if preview.is_single_pass:
            return  # the pass counts its own choices
        model = preview.model
        counts = preview.forward(lambda batch: pass_counts(model, *forward(model, batch)))
        self._counts = _over_workers(reduce(BalanceCounts.plus, counts, _no_counts(model)), preview)

    def loss(self, model: nn.Module, router_logits: Any, mask_BS: Tensor) -> Tensor:
        """Return this pass's share, in fp64, as a part of a sum over the labels."""
        share = balance_loss(model, router_logits, mask_BS, self._counts)
        return share * self._weight * self._labels.to(share)


def balance_by_bias(model: nn.Module, config: Config) -> None:
    """Let the routers' biases move after each step, if ``--balance-bias`` asks for it."""
    rate = config.moe.balance_bias
    if not rate:
        return
    if config.model.lora is not None:
        raise UserError(
            f"--balance-bias is {rate}, and --lora leaves the model's weights as they are, routing biases "
            "included; leave one of them out"
        )
    try:
        use_balance_bias(model, rate)
    except ValueError as error:
        raise UserError(
            f"--balance-bias is {rate}, but {error}: leave it out, or use --balance-loss"
        ) from None


@contextmanager
def counting(model: nn.Module, mask_BS: Tensor) -> Iterator[None]:
    """Leave padding out of the counts of experts in a forward pass."""
    layers = moe_layers(model)
    if not layers:
        yield
        return
    context = layers[0][1].context
    with context.use_step(replace(context.step, counted_T=mask_BS)):
        yield


def _no_counts(model: nn.Module) -> BalanceCounts:
    load_E = moe_layers(model)[0][1].load_E
    return BalanceCounts(torch.zeros_like(load_E), torch.zeros_like(load_E[0]))


def _over_workers(counts: BalanceCounts, preview: StepPreview) -> BalanceCounts:
    vector = preview.all_reduce(torch.cat([counts.choices_E, counts.rows.reshape(1)]).double())
    return BalanceCounts(vector[:-1], vector[-1])
