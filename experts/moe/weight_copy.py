"""Weights in the place of a parameter: a copy in a shorter type, and weights whose gradients go elsewhere.

Casting the weights of all experts in every forward pass, and their gradients in every backward pass, takes
as long as a tenth of the products. The optimizer that writes the weights can write the copy as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class WeightCopy:
    """The weights of a parameter in a shorter type: a leaf of the graph in the parameter's place.

    Its gradient is handed to the parameter when it is complete. Every write to the parameter counts up its
    version, so an outdated copy is noticed and written again. Writes through
    ``parameter.data`` and those of torch's fused optimizers are not counted: the optimizer of a copied
    parameter must be one that calls ``written``. A pass that uses the weights twice sums their gradients
    in the shorter type."""

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.parameter = parameter
        # The parameter accepts gradients in the shorter type, as the products give them.
        parameter.grad_dtype = None
        self.weights = parameter.detach().to(dtype).requires_grad_()
        self.keeps_short_gradient = False
        self._source = self._parameter_state()
        self.weights.register_post_accumulate_grad_hook(_handing_over(self))

    def release(self) -> None:
        """Restrict the gradients of the parameter to its own type again.

        The present gradient is dropped: it may be of the shorter type."""
        self.parameter.grad = None
        self.parameter.grad_dtype = self.parameter.dtype

    def refresh(self) -> None:
        """Write the copy again if the parameter was written since."""
        if self._source == self._parameter_state():
            return
        with torch.no_grad():
            if self.weights.device == self.parameter.device:
                self.weights.copy_(self.parameter)
            else:
                self.weights.data = self.parameter.detach().to(self.weights.dtype)
        self.written()

    def written(self) -> None:
        """Note that parameter and copy were both written, and are equal."""
        self._source = self._parameter_state()

    def _parameter_state(self) -> tuple[int, int, torch.device]:
        parameter = self.parameter
        return parameter._version, parameter.data_ptr(), parameter.device

    def hand_over_gradient(self, weights: Tensor) -> None:
        """Add the gradient of a pass to the parameter's. In steps of several passes, sum in its type."""
        gradient = weights.grad
        weights.grad = None
        assert gradient is not None
        parameter = self.parameter
        if parameter.grad is not None:
            parameter.grad += gradient
        elif self.keeps_short_gradient:
            parameter.grad = gradient
        else:
            parameter.grad = gradient.to(parameter.dtype)


def _handing_over(copy: WeightCopy) -> Callable[[Tensor], None]:
    """Return a hook of the copy's weights that does not keep the copy alive.

    Torch holds hooks where the garbage collector does not find them: a hook that names its own tensor
    would keep it for ever."""
    reference = weakref.ref(copy)

    def hand_over(weights: Tensor) -> None:
        alive = reference()
        assert alive is not None, "the gradient of a copy that was dropped"
        alive.hand_over_gradient(weights)

    return hand_over


class GradientSink(Protocol):
    """Takes the gradient of one use of a parameter."""

    def __call__(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...


def diverted(parameter: nn.Parameter, weights: Tensor, sink: GradientSink) -> Tensor:
    """Return ``weights``, those of a parameter in some type, whose gradient goes to ``sink``.

    ``parameter.grad`` stays as it is.

    Autograd would add up the gradients of all uses in an order, and a rounding, that follow the hosts."""
    result: Tensor = _Diverted.apply(parameter, weights.detach(), sink)
    return result


class _Diverted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, weights: Tensor, sink: GradientSink) -> Tensor:
        ctx.parameter = parameter
        ctx.sink = sink
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.sink(ctx.parameter, grads[0])
        return None, None, None
