"""AdamW with averages of one byte per weight, in blocks with a scale each.

See https://arxiv.org/abs/2110.02861. The codes have the shape of their weight, and blocks lie within a row
of its first dimension: the state of one expert of a stack is a slice of the stack's.

Shapes: R rows, B blocks of a row, K numbers of a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 256
_DECADES = 7


class Codes(NamedTuple):
    """Numbers of one byte each: the value of a byte in a table, times the scale of its block."""

    data: Tensor
    scale_RB: Tensor


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose averages are kept in 8 bit; those of vectors, which are small, in full.

    The root of the second average is kept instead of the average: it has the range of the first, so that no
    weight has a first average next to a second one that was rounded to zero."""

    def __init__(self, groups: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._tables: dict[tuple[bool, torch.device, torch.dtype], Table] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        # In 16 bit the second average would not change: its weight of a gradient is a thousandth. Nor would
        # a weight that decays by less than a half of its last digit.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        gradient = gradient.to(dtype)
        state = self.state[parameter]
        if "step" not in state:
            self._start(parameter, dtype)
        state["step"] += 1
        num_steps = float(state["step"])
        beta1, beta2 = group["betas"]
        mean = self._read(parameter, "exp_avg", dtype).lerp_(gradient, 1 - beta1)
        root = self._read(parameter, "exp_avg_sq_root", dtype)
        root = root.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        step_size = group["lr"] / (1 - beta1**num_steps)
        divisor = (root / (1 - beta2**num_steps) ** 0.5).add_(group["eps"])
        weight = parameter.to(dtype)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, divisor, value=-step_size)
        if weight is not parameter:
            parameter.copy_(weight)
        self._write(parameter, "exp_avg", mean)
        self._write(parameter, "exp_avg_sq_root", root)

    def _start(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.state[parameter]["step"] = torch.tensor(0.0)
        zeros = torch.zeros_like(parameter, dtype=dtype)
        self._write(parameter, "exp_avg", zeros)
        self._write(parameter, "exp_avg_sq_root", zeros.clone())

    def _read(self, parameter: nn.Parameter, slot: str, dtype: torch.dtype) -> Tensor:
        state = self.state[parameter]
        if parameter.ndim < 2:
            return state[slot]
        codes = Codes(state[slot], state[f"{slot}_scale"])
        return decode(codes, self._table(slot, parameter.device, dtype))

    def _write(self, parameter: nn.Parameter, slot: str, values: Tensor) -> None:
        state = self.state[parameter]
        if parameter.ndim < 2:
            state[slot] = values
            return
        state[slot], state[f"{slot}_scale"] = encode(values, self._table(slot, values.device, values.dtype))

    def _table(self, slot: str, device: torch.device, dtype: torch.dtype) -> Table:
        key = (slot == "exp_avg", device, dtype)
        if key not in self._tables:
            self._tables[key] = Table.of(*key)
        return self._tables[key]


class Table(NamedTuple):
    """The 256 values of a byte, in order, between -1 or 0 and 1.

    Seven decades: the largest has half of the values, each further one half as many."""

    values: Tensor
    middles: Tensor
    """The middles between neighbouring values: a number is rounded to the value on its side."""
    signed: bool

    @classmethod
    def of(cls, signed: bool, device: torch.device, dtype: torch.dtype) -> Table:
        values = [0.0, 1.0]
        for decade in range(_DECADES):
            num_values = 2 ** (decade if signed else decade + 1)
            bounds = torch.linspace(0.1, 1, num_values + 1, dtype=torch.float64)
            found = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade + 1 - _DECADES)).tolist()
            values += [*found, *(-value for value in found)] if signed else found
        table = torch.tensor(sorted(values), dtype=torch.float64).to(device, dtype)
        return cls(table, (table[1:] + table[:-1]) / 2, signed)


def encode(values: Tensor, table: Table) -> Codes:
    """Return the nearest codes. Without a sign, a number other than zero never gets the code of zero."""
    values_RBK = _in_blocks(values)
    scale_RB = values_RBK.abs().amax(-1)
    divisor_RB1 = torch.where(scale_RB > 0, scale_RB, 1).unsqueeze(-1)
    codes_RBK = torch.bucketize(values_RBK / divisor_RB1, table.middles, out_int32=True)
    if not table.signed:
        codes_RBK = torch.where(values_RBK > 0, codes_RBK.clamp(min=1), codes_RBK)
    codes = _from_blocks(codes_RBK.to(torch.uint8), values.shape)
    # A view would keep the numbers that fill up the last block of each row.
    return Codes(codes.contiguous(), scale_RB)


def decode(codes: Codes, table: Table) -> Tensor:
    """Return the numbers of codes, in the type of the table."""
    values_RBK = table.values[_in_blocks(codes.data).int()] * codes.scale_RB.unsqueeze(-1)
    return _from_blocks(values_RBK, codes.data.shape)


def _in_blocks(tensor: Tensor) -> Tensor:
    """Return the rows of the first dimension in blocks; the last one of a row is filled up with zeros."""
    rows = tensor.flatten(1)
    return F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _from_blocks(tensor_RBK: Tensor, shape: torch.Size) -> Tensor:
    row_size = shape[1:].numel()
    return tensor_RBK.flatten(1)[:, :row_size].reshape(shape)
