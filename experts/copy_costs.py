"""Cost of the sum of copied gradients: the one formula of the balancer and of the plan.

``experts/copies.py`` sums them: a reduce-scatter and an all-gather among the copies, in pieces."""

from __future__ import annotations

import math

PIECE_ELEMENTS = 2**21
"""Elements of a host's gradients that are summed at a time: few enough for any memory, and long enough
that the bytes of their messages and not the number of messages set the time."""
_FP32_BYTES = 4


def ring_factor(copies: int) -> float:
    """Return the bytes that the host of a copy sends in a step, as a multiple of the expert's gradient.

    It sends to each other copy the share that this copy sums, then its own share of the sum: as many bytes as
    in a ring all-reduce, which is the minimum. It receives as many."""
    return 2 * (copies - 1) / copies


def piece_count(copied_gradient_bytes: float) -> int:
    """Return the pieces in which a host's gradients are summed: two exchanges each."""
    return math.ceil(copied_gradient_bytes / (_FP32_BYTES * PIECE_ELEMENTS))


def held_bytes(copied_gradient_bytes: float) -> float:
    """Return the bytes that a host holds beside its gradients while they are summed.

    It holds a piece to send and a piece that it receives."""
    return 2 * min(copied_gradient_bytes, float(_FP32_BYTES * PIECE_ELEMENTS))
