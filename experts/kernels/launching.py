"""Launches of Triton kernels, and their operators of torch.

The kernels need a CUDA device and Triton, which comes with torch there and is imported at the first
launch; ``available`` tells."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(x: Tensor | None = None) -> bool:
    """Whether the kernels work: for this tensor, or at all.

    They sum in fp32, so that fp64 is left to plain torch."""
    if x is None:
        return _TRITON and torch.cuda.is_available()
    return _TRITON and x.is_cuda and x.dtype in DTYPES


@dataclass(frozen=True)
class Tile:
    """The block that one program computes, and its number of warps."""

    rows: int
    columns: int
    warps: int


def tile(width: int, max_columns: int) -> Tile:
    """Choose a tile with eight elements per thread (16 bytes of bf16).

    A program takes several rows where rows are short. Fastest on an H200 were at most 1,024 columns
    for copies and sums and 2,048 for the SwiGLU: 3.5 to 4.3 TB/s, where a plain copy reaches 4.2."""
    columns = min(1 << max(width - 1, 15).bit_length(), max_columns)
    return Tile(max(1, 1024 // columns), columns, max(4, columns // 256))


def launch(
    kernel: Callable[..., None],
    shape: Tile,
    grid: tuple[int, int],
    *arguments: Any,
    **constants: float,
) -> None:
    """Launch a kernel on the device of its first argument; an empty grid is no launch."""
    if not (grid[0] and grid[1]):
        return
    with torch.cuda.device_of(arguments[0]):
        compiled(kernel)[grid](
            *arguments, **constants, ROWS=shape.rows, COLUMNS=shape.columns, num_warps=shape.warps
        )


@cache
def compiled(kernel: Callable[..., None]) -> Any:
    """Return a kernel that Triton compiles at its first launch."""
    import triton
    import triton.language

    # Triton resolves ``tl`` in the module that defines the kernel, where it is None until now.
    kernel.__globals__["tl"] = triton.language
    return triton.jit(kernel)


@dataclass(frozen=True)
class Span:
    """Rows that a kernel computes, as numbers on the device: the first one, and the end."""

    begin_1: Tensor
    end_1: Tensor


def contiguous_like(tensor: Tensor) -> Tensor:
    """Return an empty tensor, contiguous: ``torch.empty_like`` keeps the strides of a transposed one."""
    return tensor.new_empty(tensor.shape)


def num_blocks(size: int, block: int) -> int:
    return -(-size // block)


def refuse_second_derivative() -> None:
    """Raise in a backward pass whose gradients are to have gradients (``create_graph``).

    Autograd does not see into our operators: such gradients would lack a part, without an error."""
    # A compiler refuses second derivatives itself.
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "gradients of gradients (create_graph=True) do not pass through the kernels of MoE layers on a "
            "GPU; compute them on a CPU"
        )


_library = torch.library.Library("experts", "FRAGMENT")


def register(schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Register an operator of torch.

    Tracing and compiling then see the shapes of the results and not the body of the operator."""
    name = _library.define(schema)
    _library.impl(name, compute, "CUDA")
    _library.impl(name, shapes, "Meta")
