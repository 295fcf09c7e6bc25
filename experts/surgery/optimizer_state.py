"""The optimizer when experts change: its groups, whose parameters are replaced, and the averages it keeps.

The tokens of two experts go to the one that they are merged into: its gradient is the sum of theirs, and so
is each average that is linear in the gradient (Adam's first, the momentum of SGD and of Muon). The average
of its square lies between the squares of difference and sum of the two roots. Where both experts have the
same tokens, their gradients rise and fall together, and the square of the sum is taken, which is never too
small. Experts with tokens of their own have independent noise, which is most of the average of squares:
these add up."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from experts.moe.routed import RoutedExperts


class ParameterGroups:
    """The groups of an optimizer that a layer's parameters belong to."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layer: RoutedExperts,
        groups: Mapping[str, int | None] | None,
    ) -> None:
        """``groups`` are those of the experts by role, where a host may hold none of them."""
        self._optimizer = optimizer
        self._of_parameter = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        own = {role: self._number(stack) for _, role, stack in layer.bank.stacks()}
        self._of_role = own if groups is None else groups
        self._of_router = [self._number(parameter) for parameter in layer.router_parameters]

    def _number(self, parameter: nn.Parameter) -> int | None:
        return self._of_parameter.get(id(parameter))

    def replace(self, model: nn.Module, layer: RoutedExperts, replaced: Set[nn.Parameter]) -> None:
        """Put the layer's new parameters in the places of those ``replaced``, in the order of the model."""
        removed = {id(parameter) for parameter in replaced}
        added: dict[int, int] = {}
        for parameter, number in zip(layer.router_parameters, self._of_router, strict=True):
            if number is not None:
                added[id(parameter)] = number
        for _, role, stack in layer.bank.stacks():
            number = self._of_role.get(role)
            if stack.requires_grad and number is not None:
                added[id(stack)] = number
        # A moved expert leaves the gate as it is.
        removed -= added.keys()
        order = {id(p): number for number, p in enumerate(model.parameters())}
        by_id = {id(p): p for p in model.parameters()}
        for number, group in enumerate(self._optimizer.param_groups):
            kept = [p for p in group["params"] if id(p) not in removed]
            known = {id(p) for p in kept}
            new = [by_id[key] for key, of in added.items() if of == number and key not in known]
            group["params"] = sorted([*kept, *new], key=lambda p: order.get(id(p), -1))
        for parameter in list(self._optimizer.state):
            if id(parameter) in removed:
                del self._optimizer.state[parameter]


@runtime_checkable
class StateCoding(Protocol):
    """An optimizer that keeps some averages of its parameters in codes, which cannot be added up."""

    def expanded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of rows of a parameter with averages in the place of codes."""
        ...

    def compressed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of rows of a parameter with codes in the place of averages."""
        ...


def coding_of(optimizer: torch.optim.Optimizer) -> StateCoding | None:
    return optimizer if isinstance(optimizer, StateCoding) else None


_DEGREES: Mapping[str, int] = {
    "exp_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "momentum_buffer": 1,
    "ema": 0,
}
WEIGHTS = frozenset({"", "ema"})
"""The slots of the weights themselves, and of their moving average, which changes as they do."""


def gradient_degree(slot: str) -> int:
    """Return the power of the gradient that a tensor of the optimizer grows with; 0 for averaged weights."""
    if slot not in _DEGREES:
        raise ValueError(
            f"the optimizer keeps {slot!r} of each parameter; experts can be born and merged with "
            f"{', '.join(_DEGREES)} alone: use AdamW, Adam or SGD, or --evolution off"
        )
    return _DEGREES[slot]


def added(slot: str, first: Tensor, second: Tensor, *, same_tokens: bool) -> Tensor:
    """Return a tensor of the optimizer for the sum of two gradients."""
    if gradient_degree(slot) == 2 and same_tokens:
        return (first.sqrt() + second.sqrt()).square()
    return first + second


def halved(slot: str, whole: Tensor, *, same_tokens: bool) -> Tensor:
    """Return a tensor of the optimizer for half of a gradient: of half of its tokens, or half of each.

    It is the inverse of ``added``."""
    if gradient_degree(slot) == 2 and same_tokens:
        return whole / 4
    return whole / 2
