"""Functions that the compiler must not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def uncompiled(function: Callable[..., T]) -> Callable[..., T]:
    """Exclude a function from compilation.

    The compiler cannot trace an exchange, and numbers of rows change at every step."""
    if not torch.compiler.is_compiling():
        return function
    return cast("Callable[..., T]", torch.compiler.disable(function))
