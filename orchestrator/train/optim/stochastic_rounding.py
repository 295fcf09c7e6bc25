"""Updates of weights in bf16: computed in fp32, with stochastic rounding.

Rounding to the nearest number loses every update below half of a weight's last digit, step after step. Here
a weight goes up with a probability equal to its distance from the lower number, so that updates count in full
on average. No copy of the weights in fp32 is kept.

The numbers drawn for an element follow from the seed, the step, the name of its parameter (of an expert: its
own name, with its global id) and its index in the whole parameter. So they are the same for every placement
of experts, every division into shards, and in a step that is repeated.

Shapes: R rows with a draw of their own (the experts of a stack, or one parameter), C elements of a row, B
blocks of four elements, which share a hash of 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experts.expert_state import stacked_names
from experts.model import mix
from experts.moe.gate import mix_bits
from orchestrator.train.optim.shards import local_part, own_rows

_WIDE_ELEMENTS = 2**26
"""Elements that are in fp32 at a time, unless a single parameter has more: 256 MiB."""
_CHUNK = 2**15
_CHUNK_ON_GPU = 2**24
"""Elements that are rounded at a time, in the cache of a CPU; about ten integers are kept of each."""
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number
_PER_BLOCK = 4


class WeightRounding:
    """The step of an optimizer over parameters in bf16, which the optimizer sees in fp32."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._seed = seed
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Take over the parameters that the model has now, and let their gradients add up in fp32."""
        stacked = stacked_names(self._model)
        self._rounded: dict[nn.Parameter, _Rounded] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32
                keys = [mix(self._seed, "rounding", entry) for entry in stacked.get(name, [name])]
                key_R = torch.tensor(keys, device=local_part(parameter).device)
                self._rounded[parameter] = _Rounded(key_R, is_stack=name in stacked)

    def step(self, step: int, update: Callable[[], None]) -> None:
        """Call ``update``, the step of the optimizer, for some parameters after the other."""
        step_key = mix(self._seed, "step", step)
        for parameters in self._slices():
            self._update(parameters, update, step_key)

    def _update(self, parameters: Sequence[nn.Parameter], update: Callable[[], None], step_key: int) -> None:
        """Update some parameters. Their copies are free again before those of the next are made."""
        with self._in_fp32(parameters) as wide_of:
            update()
        for parameter, wide in wide_of.items():
            self._rounded[parameter].write(parameter, wide, step_key)

    def _slices(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters of each group that have gradients, as many as are in fp32 at a time.

        By their whole sizes: an optimizer may gather shards, in the same order on all workers."""
        for group in self._optimizer.param_groups:
            total = 0
            members: list[nn.Parameter] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if members and total + parameter.numel() > _WIDE_ELEMENTS:
                    yield members
                    members = []
                    total = 0
                members.append(parameter)
                total += parameter.numel()
            if members:
                yield members

    @contextmanager
    def _in_fp32(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Let the optimizer have these parameters alone, those in bf16 as copies in fp32."""
        groups = self._optimizer.param_groups
        state = self._optimizer.state
        whole = [group["params"] for group in groups]
        wide_of = {p: _widened(p) for p in parameters if p in self._rounded}
        chosen = set(parameters)
        for group, members in zip(groups, whole, strict=True):
            group["params"] = [wide_of.get(p, p) for p in members if p in chosen]
        _move_state(state, wide_of)
        try:
            yield wide_of
        finally:
            _move_state(state, {wide: parameter for parameter, wide in wide_of.items()})
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members


def _widened(parameter: nn.Parameter) -> nn.Parameter:
    wide = nn.Parameter(parameter.detach().float())
    wide.grad = parameter.grad
    return wide


def _move_state(state: dict[Tensor, dict], target_of: dict[nn.Parameter, nn.Parameter]) -> None:
    for source, target in target_of.items():
        if source in state:
            state[target] = state.pop(source)


@dataclass(frozen=True)
class _Rounded:
    """The keys of a parameter's draws: one, or one for each expert of a stack."""

    key_R: Tensor
    is_stack: bool

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, wide: nn.Parameter, step_key: int) -> None:
        """Write new weights into a parameter."""
        weights = local_part(parameter.detach())
        if not weights.numel():
            return
        key_R = self.key_R
        first = 0
        rows = own_rows(parameter)
        if rows is not None and self.is_stack:  # a shard of a stack is some of its experts
            key_R = key_R[rows.first : rows.end]
        elif rows is not None:
            first = rows.first * weights[0].numel()
        values_RC = local_part(wide.detach()).reshape(len(key_R), -1)
        rounded_RC = round_rows(values_RC, mix_bits(key_R + step_key), first)
        weights.copy_(rounded_RC.view(weights.shape))


def round_rows(values_RC: Tensor, key_R: Tensor, first: int = 0) -> Tensor:
    """Return values in bf16, rounded stochastically.

    The first column has the index ``first`` in the whole parameter."""
    rounded_RC = torch.empty_like(values_RC, dtype=torch.bfloat16)
    columns = values_RC.shape[1]
    chunk = _CHUNK_ON_GPU if values_RC.is_cuda else _CHUNK
    width = max(_PER_BLOCK, chunk // len(values_RC))
    for begin in range(0, columns, width):
        end = min(begin + width, columns)
        draws_RC = draws(key_R, first + begin, end - begin)
        rounded_RC[:, begin:end] = rounded(values_RC[:, begin:end], draws_RC)
    return rounded_RC


def rounded(values: Tensor, draws: Tensor) -> Tensor:
    """Return values in bf16: up if the lower 16 bits of a value and its draw of 16 bits exceed 16 bits."""
    bits = values.contiguous().view(torch.int32)
    upper = (bits + draws) & -0x10000
    return torch.where(values.isfinite(), upper.view(torch.float32), values).to(torch.bfloat16)


def draws(key_R: Tensor, first: int, columns: int) -> Tensor:
    """Return numbers of 16 bits for the elements of each row from number ``first`` on.

    A row has the numbers of SplitMix64 that begin with its key, in pieces of 16 bits."""
    first_block = first // _PER_BLOCK
    last_block = -(-(first + columns) // _PER_BLOCK)
    number_B = torch.arange(first_block + 1, last_block + 1, device=key_R.device)
    mixed_RB = mix_bits(key_R.unsqueeze(1) + number_B * _GOLDEN)
    mixed_RB = mixed_RB ^ ((mixed_RB >> 31) & 0x1FFFFFFFF)
    skipped = first - first_block * _PER_BLOCK
    pieces_RC = mixed_RB.view(torch.int16)[:, skipped : skipped + columns]
    return pieces_RC.int() & 0xFFFF
