"""Low-rank adapters (LoRA) of experts: two thin matrices beside each frozen one.

An adapted expert multiplies by W + scale · A · B. Rows are multiplied by A and B beside the product with
W: the sum of the three is never formed, neither for the forward pass nor as a gradient, where it would
take the memory of all experts of the layer twice. See ``experts.types`` for the letters of shapes; a
product has inner size K and outer size N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from experts.kernels.packed_product import Matrices

Product = Callable[[Tensor, Matrices], Tensor]
"""Multiplies each group of rows by a matrix of its own."""


@dataclass(frozen=True)
class Adapters:
    """Adapters of one rank on some matrices of each expert. ``scale`` multiplies their products."""

    rank: int
    scale: float
    matrices: tuple[str, ...] = ("up", "down")

    @property
    def roles(self) -> tuple[str, ...]:
        """The parameters of an expert's adapters. Those that end with ``a`` come first in a product."""
        return tuple(f"{matrix}_lora_{factor}" for matrix in self.matrices for factor in "ab")

    def shape(self, role: str, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one expert's parameter, by that of the matrix beside it."""
        return (matrix[0], self.rank) if is_first_factor(role) else (self.rank, matrix[1])

    def scaled(self, weights: Mapping[str, Matrices], multiple: int) -> dict[str, Matrices]:
        """Return stacks by role, with the scale in the second factors.

        Zeros fill the rank up to a multiple of ``multiple``: grouped products need it."""
        missing = -self.rank % multiple
        scaled = dict(weights)
        for matrix in self.matrices:
            a_EKR = _unpacked(weights, f"{matrix}_lora_a")
            b_ERN = _unpacked(weights, f"{matrix}_lora_b") * self.scale
            scaled[f"{matrix}_lora_a"] = F.pad(a_EKR, (0, missing)) if missing else a_EKR
            scaled[f"{matrix}_lora_b"] = F.pad(b_ERN, (0, 0, 0, missing)) if missing else b_ERN
        return scaled

    def merged(self, matrix: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a matrix with its adapter, in the matrix's type. The sum is computed in the adapter's."""
        return (matrix.to(a.dtype) + self.scale * (a @ b)).to(matrix.dtype)


def is_first_factor(role: str) -> bool:
    """Whether a role is that of an adapter's first matrix, which starts from random numbers."""
    return role.endswith("_lora_a")


def adapted_matrix(role: str) -> str:
    """Return the matrix beside an adapter's parameter; the role itself where it is of no adapter."""
    return role.partition("_lora_")[0]


def _unpacked(weights: Mapping[str, Matrices], role: str) -> Tensor:
    stack = weights[role]
    assert isinstance(stack, Tensor), f"{role} is packed, but adapters are trained"
    return stack


def adapted_product(
    product: Product, rows_RK: Tensor, weights: Mapping[str, Matrices], matrix: str
) -> Tensor:
    """Multiply rows by a matrix of their experts, and by its adapters where it has some.

    The scale is in the weights already."""
    output_RN = product(rows_RK, weights[matrix])
    first = weights.get(f"{matrix}_lora_a")
    if first is None:
        return output_RN
    return output_RN + product(product(rows_RK, first), weights[f"{matrix}_lora_b"])
