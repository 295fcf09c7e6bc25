"""The averages of gradients that an optimizer keeps, for experts whose gradients add up or are divided.

The tokens of two experts go to the one that they are merged into: its gradient is the sum of theirs, and so
is each average that is linear in the gradient (Adam's first, the momentum of SGD and of Muon). The average
of its square lies between the squares of difference and sum of the two roots. Where both experts have the
same tokens, their gradients rise and fall together, and the square of the sum is taken, which is never too
small. Experts with tokens of their own have independent noise, which is most of the average of squares:
these add up."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

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
