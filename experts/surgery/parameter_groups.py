"""The groups of an optimizer, whose parameters are replaced when experts change."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import nn

from experts.routed import RoutedExperts


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
