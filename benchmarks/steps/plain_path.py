"""Steps by torch's own operations, to compare ours with.

Torch's AdamW without copies of weights in bf16, logits of all tokens at once, torch's norm of gradients, sort
and grouped products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from experts.kernels import fused_experts, slot_sort
from orchestrator.tasks import token_loss
from orchestrator.train.optim import adamw, gradient_norm
from orchestrator.train.worker import build_model

_NEVER = 2**62


@contextmanager
def plain_path() -> Iterator[None]:
    """Build and run steps without our kernels."""
    replaced: list[tuple[Any, str, Any]] = [
        (adamw, "LARGE", _NEVER),
        (gradient_norm, "LARGE", _NEVER),
        (token_loss, "LARGE_LOGITS", _NEVER),
        (fused_experts, "works", _refuse),
        (slot_sort, "available", _refuse),
        (build_model, "_weight_copies", _no_copies),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(patch.object(module, name, value))
        yield


def _refuse(*_: Any) -> bool:
    return False


def _no_copies(*_: Any) -> None:
    return None
