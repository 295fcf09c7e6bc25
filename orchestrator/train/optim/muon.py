"""Muon: momentum whose matrices are made orthogonal, and AdamW for everything that is no matrix.

See https://kellerjordan.github.io/posts/muon/ and https://arxiv.org/abs/2502.16982.

Shapes: a matrix is M × N, a stack of experts' matrices E × M × N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.train.optim.shards import as_shard, full_tensor, is_shard, local_part, shard_like

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The polynomial of an iteration: it moves singular values towards 1."""
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon over the first parameter group, AdamW over the others.

    Where workers have shards of a matrix, each gathers it and takes its own rows of the result: all of them
    must call ``step``, with the same gradients missing. Experts of a stack are whole in each shard.

    The update of a matrix has the size of AdamW's (0.2 × the root of its longer side), so both take the
    same learning rate and weight decay. Each expert of a stack is a matrix of its own. The iteration
    computes in the precision of the weights: in bf16, which torch's own Muon takes, the last digit of a
    gradient decides, and the result would depend on the number of workers."""

    def __init__(
        self, matrices: Sequence[nn.Parameter], adamw: torch.optim.AdamW, lr: float, **settings: Any
    ) -> None:
        """``settings`` are ``momentum`` and ``weight_decay`` of the matrices."""
        group = {"params": list(matrices), "lr": lr, **settings}
        # Both optimizers share the dictionaries of AdamW's groups, so a change to a group changes both.
        super().__init__([group, *adamw.param_groups], {"lr": lr})
        self._adamw = adamw
        self._adamw.state = self.state
        self.one_by_one = False
        """Whether experts are made orthogonal one by one: the product of a matrix in a batch of them may
        depend on their number."""

    def add_adamw_group(self, group: dict[str, Any]) -> None:
        """Add a group of parameters that AdamW trains."""
        self.param_groups.append(group)
        self._adamw.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        del closure
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, group)
        self._adamw.step()

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = local_part(state["momentum_buffer"]).lerp_(local_part(gradient), 1 - group["momentum"])
        # Nesterov: a step ahead in the direction of the gradient.
        ahead = local_part(gradient).lerp(momentum, group["momentum"])
        size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        weight = local_part(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(self._direction(ahead, parameter), alpha=-group["lr"] * size)

    def _direction(self, ahead: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return this worker's part of the orthogonal matrix, or of each expert's."""
        if is_shard(parameter) and parameter.ndim == 2:
            whole = orthogonalized(full_tensor(as_shard(ahead, parameter)))
            return local_part(shard_like(whole, parameter))
        if self.one_by_one and ahead.ndim > 2 and len(ahead):
            # Copies begin at an address that suits all kernels; an expert within a stack may not.
            return torch.stack([orthogonalized(matrix.clone()) for matrix in ahead])
        return orthogonalized(ahead)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, roughly, by Newton-Schulz; of each matrix of a stack."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
