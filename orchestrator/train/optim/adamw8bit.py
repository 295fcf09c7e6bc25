"""AdamW with averages of one byte per weight, in blocks with a scale each.

See https://arxiv.org/abs/2110.02861. The codes have the shape of their weight, and blocks lie within a row
of its first dimension: the state of one expert of a stack is a slice of the stack's, and the codes of a shard
do not depend on where it begins.

Shapes: R rows, B blocks of a row, K numbers of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.kernels.packed import dynamic_values
from orchestrator.train.optim.shards import as_shard, is_shard, local_part

BLOCK = 256
MEAN = "exp_avg"
ROOT = "exp_avg_sq_root"
SQUARE = "exp_avg_sq"
SCALE = "_scale"
"""The end of the slots with the scales of codes."""


class Codes(NamedTuple):
    """Numbers of one byte each: the value of a byte in a table, times the scale of its block."""

    data: Tensor
    scale_RB: Tensor


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose averages are kept in 8 bit; those of vectors, which are small, in full.

    The root of the second average is kept instead of the average: it has the range of the first, so that no
    weight has a first average next to a second one that was rounded to zero."""

    row_slots = frozenset({f"{MEAN}{SCALE}", f"{ROOT}{SCALE}"})
    """Slots with the rows of their weight, and fewer columns."""

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
        gradient = local_part(gradient).to(dtype)
        state = self.state[parameter]
        if "step" not in state:
            self._start(parameter, dtype)
        state["step"] += 1
        num_steps = float(state["step"])
        beta1, beta2 = group["betas"]
        mean = self._read(state, MEAN).lerp_(gradient, 1 - beta1)
        root = self._read(state, ROOT)
        root = root.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        step_size = group["lr"] / (1 - beta1**num_steps)
        divisor = (root / (1 - beta2**num_steps) ** 0.5).add_(group["eps"])
        stored = local_part(parameter)
        weight = stored.to(dtype)
        weight.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, divisor, value=-step_size)
        if weight is not stored:
            stored.copy_(weight)
        self._keep(parameter, self._entries(MEAN, mean) | self._entries(ROOT, root))

    def _start(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.state[parameter]["step"] = torch.tensor(0.0)
        zeros = torch.zeros_like(local_part(parameter), dtype=dtype)
        self._keep(parameter, self._entries(MEAN, zeros) | self._entries(ROOT, zeros.clone()))

    def expanded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state of a parameter, or of some of its rows, with the averages that AdamW keeps."""
        found = {slot: value for slot, value in state.items() if slot.removesuffix(SCALE) not in (MEAN, ROOT)}
        if MEAN in state:
            found |= {MEAN: self._read(state, MEAN), SQUARE: self._read(state, ROOT).square()}
        return found

    def compressed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state as this optimizer keeps it: the inverse of ``expanded``, but for rounding."""
        found = {slot: value for slot, value in state.items() if slot not in (MEAN, SQUARE)}
        if MEAN in state:
            found |= self._entries(MEAN, state[MEAN]) | self._entries(ROOT, state[SQUARE].sqrt())
        return found

    def _read(self, state: Mapping[str, Tensor], slot: str) -> Tensor:
        kept = local_part(state[slot])
        if f"{slot}{SCALE}" not in state:
            return kept
        scale_RB = local_part(state[f"{slot}{SCALE}"])
        return decode(Codes(kept, scale_RB), self._table(slot, kept.device, scale_RB.dtype))

    def _entries(self, slot: str, values: Tensor) -> dict[str, Tensor]:
        """Return the slots that hold an average."""
        if values.ndim < 2:
            return {slot: values}
        codes = encode(values, self._table(slot, values.device, values.dtype))
        return {slot: codes.data, f"{slot}{SCALE}": codes.scale_RB}

    def _keep(self, parameter: nn.Parameter, entries: Mapping[str, Tensor]) -> None:
        for slot, tensor in entries.items():
            self.state[parameter][slot] = as_shard(tensor, parameter) if is_shard(parameter) else tensor

    def _table(self, slot: str, device: torch.device, dtype: torch.dtype) -> Table:
        key = (slot == MEAN, device, dtype)
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
        values = dynamic_values(signed)
        table = torch.tensor(values, dtype=torch.float64).to(device, dtype)
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
    return F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (num_blocks(rows.shape[1]), BLOCK))


def num_blocks(row_size: int) -> int:
    return -(-row_size // BLOCK)


def _from_blocks(tensor_RBK: Tensor, shape: torch.Size) -> Tensor:
    row_size = shape[1:].numel()
    return tensor_RBK.flatten(1)[:, :row_size].reshape(shape)
