"""AdamW that scales gradients itself, and writes the copies of weights that the next forward pass needs.

Large parameters are updated by a kernel of Triton on a GPU: it reads weight, gradient and averages once and
writes weight, averages and copy once. Small ones are left to torch, whose kernel takes many of them at a
time. ``update_plain`` is the kernel in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experts.kernels.launching import Tile, available, launch, num_blocks
from experts.moe.weight_copy import WeightCopy
from orchestrator.train.optim.shards import local_part

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch

LARGE = 2**22
"""Parameters with at least so many elements get a launch of their own, which is short next to the update."""
_CHUNK = 2**15
_TILE = Tile(rows=1, columns=2048, warps=8)
_STEP_SIZE, _ROOT, _DECAY, _FACTOR, _SKIPPED = range(5)  # columns of the numbers of an update


@dataclass(frozen=True)
class Update:
    """The tensors of one parameter's update. ``copy`` gets the new weights in its own type."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None

    def in_chunks(self) -> Iterator[Update]:
        """Yield updates of a few elements, whose intermediate results stay in the cache of a CPU."""
        tensors = (self.weight, self.gradient, self.mean, self.square)
        if not all(tensor.is_contiguous() for tensor in tensors):
            yield self
            return
        chunks = [tensor.view(-1).split(_CHUNK) for tensor in tensors]
        copies = [None] * len(chunks[0]) if self.copy is None else self.copy.view(-1).split(_CHUNK)
        for weight, gradient, mean, square, copy in zip(*chunks, copies, strict=True):
            yield Update(weight, gradient, mean, square, copy)


class AdamW(torch.optim.AdamW):
    """Torch's fused AdamW, with the same state, on one device.

    ``gradient_factor`` is a number on the device that the next step multiplies gradients by. Gradients may
    have a shorter type than large parameters. ``found_inf`` and a learning rate on the device work as
    in torch."""

    gradient_factor: Tensor | None = None
    found_inf: Tensor | None

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        stack_ids: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """``stack_ids`` returns the ids of parameters that hold several experts. With it, the bits of an
        element depend neither on its place nor on the size of its tensor, and parameters may be shards:
        torch's kernel for CPUs rounds the last elements of a tensor in another way than the others."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.copies: Mapping[Tensor, WeightCopy] = {}
        self._stack_ids = stack_ids

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        large = [self._take_large(group) for group in self.param_groups]
        self._step_small()
        for group, taken in zip(self.param_groups, large, strict=True):
            self._step_large(group, taken)

    def _take_large(self, group: dict[str, Any]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return large parameters and their gradients, which are set aside: torch skips them then."""
        stack_ids = self._stack_ids() if self._stack_ids is not None else ()
        with_gradient = [p for p in group["params"] if p.grad is not None]
        taken = [(p, p.grad) for p in with_gradient if self._is_own(p, stack_ids)]
        for parameter, _ in taken:
            parameter.grad = None
        return taken

    def _is_own(self, parameter: Tensor, stack_ids: Collection[int]) -> bool:
        """Whether a parameter is updated here and not by torch.

        The hosts have other numbers of experts in a stack: its size must not decide."""
        if self._stack_ids is not None and (id(parameter) in stack_ids or not parameter.is_cuda):
            return True
        return is_large(parameter)

    def _step_small(self) -> None:
        if self._stack_ids is not None:
            self._step_small_parts()
            return
        handle: Any = self
        if self.gradient_factor is not None:
            handle.grad_scale = self.gradient_factor.float().reciprocal()
        _torch_step()(self)
        if self.gradient_factor is not None:
            del handle.grad_scale

    def _step_small_parts(self) -> None:
        """Call torch's kernel with ordinary tensors: beside shards it refuses the factor, which is one."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            # A worker whose shard is empty has its state all the same: checkpoints gather those of all.
            states = [self._state(parameter) for parameter in parameters]
            counters = [state["step"] for state in states]
            torch._foreach_add_(counters, 1)
            beta1, beta2 = group["betas"]
            factor = self.gradient_factor
            found_inf = getattr(self, "found_inf", None)
            torch._fused_adamw_(
                [local_part(parameter.detach()) for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                counters,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None if factor is None else factor.float().reciprocal(),
                found_inf=found_inf,
            )
            if found_inf is not None:
                torch._foreach_sub_(counters, [found_inf] * len(counters))

    def _step_large(self, group: dict[str, Any], taken: list[tuple[nn.Parameter, Tensor]]) -> None:
        if not taken:
            return
        counters = [self._state(parameter)["step"] for parameter, _ in taken]
        torch._foreach_add_(counters, 1)
        numbers_PN = self._numbers(group, torch.stack(counters))
        for (parameter, gradient), numbers_N in zip(taken, numbers_PN, strict=True):
            self._update(parameter, gradient, numbers_N, group)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            torch._foreach_sub_(counters, [found_inf] * len(counters))

    def _numbers(self, group: dict[str, Any], counter_P: Tensor) -> Tensor:
        """Return the numbers of each parameter's update, on the device, from the steps that it counts.

        Computed in fp64: in fp32, one minus a power that is close to one has few digits."""
        beta1, beta2 = group["betas"]
        counter_P = counter_P.double()
        ones_P = torch.ones_like(counter_P)
        factor = 1.0 if self.gradient_factor is None else self.gradient_factor
        found_inf = getattr(self, "found_inf", None)
        columns = {
            _STEP_SIZE: group["lr"] / (1 - _powers(beta1, counter_P)),
            _ROOT: (1 - _powers(beta2, counter_P)).sqrt(),
            _DECAY: ones_P * group["lr"] * group["weight_decay"],
            _FACTOR: ones_P * factor,
            _SKIPPED: ones_P * (0.0 if found_inf is None else found_inf),
        }
        numbers_PN = torch.stack([columns[column] for column in sorted(columns)], dim=1)
        return numbers_PN if has_fp64(group["params"]) else numbers_PN.float()

    def _update(
        self, parameter: nn.Parameter, gradient: Tensor, numbers_N: Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        copy = self.copies.get(parameter)
        weight = local_part(parameter.detach())
        tensors = Update(
            weight,
            local_part(gradient).contiguous(),
            local_part(state["exp_avg"]),
            local_part(state["exp_avg_sq"]),
            None if copy is None else copy.weights.detach(),
        )
        if not available(weight):
            for part in tensors.in_chunks():
                update_plain(part, numbers_N, group["betas"], group["eps"])
        elif weight.numel():
            update_fused(tensors, numbers_N, group["betas"], group["eps"])
        torch.autograd.graph.increment_version(parameter)
        parameter.grad = gradient
        if copy is not None:
            copy.written()

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter as torch's AdamW has it, of zeros before the first step."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _powers(base: float, exponent_P: Tensor) -> Tensor:
    """Return powers whose bits do not depend on their number: on a CPU the last ones of a vector round in
    another way."""
    if exponent_P.is_cuda:
        return base**exponent_P
    return torch.stack([base**exponent for exponent in exponent_P.unbind()])


def _torch_step() -> Callable[[torch.optim.AdamW], Any]:
    """Return the step of torch's AdamW without the hooks of an optimizer.

    Torch wraps the steps of a class when its first optimizer is made: the hooks would run twice."""
    step: Any = torch.optim.AdamW.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def has_fp64(parameters: Iterable[Tensor]) -> bool:
    """Return whether some parameters are in fp64: their steps must round nothing to fp32."""
    return any(parameter.dtype == torch.float64 for parameter in parameters)


def is_large(parameter: Tensor) -> bool:
    is_usual = parameter.dtype == torch.float32 and parameter.is_contiguous()
    return is_usual and parameter.numel() >= LARGE


def update_plain(tensors: Update, numbers_N: Tensor, betas: tuple[float, float], eps: float) -> None:
    """Update a parameter in plain torch.

    Each operation is one that IEEE 754 rounds in one way: fused ones may round the last elements of a tensor
    in another way."""
    step_size, root, decay, factor, skipped = numbers_N
    if bool(skipped):
        return
    gradient = tensors.gradient.to(tensors.weight.dtype) * factor
    tensors.mean.mul_(betas[0]).add_(gradient * (1 - betas[0]))
    tensors.square.mul_(betas[1]).add_(gradient.square().mul_(1 - betas[1]))
    divisor = (tensors.square.sqrt() / root).add_(eps)
    tensors.weight.sub_(decay * tensors.weight)
    tensors.weight.sub_(step_size * tensors.mean / divisor)
    if tensors.copy is not None:
        tensors.copy.copy_(tensors.weight)


def update_fused(tensors: Update, numbers_N: Tensor, betas: tuple[float, float], eps: float) -> None:
    """Update a parameter in one pass over its tensors."""
    size = tensors.weight.numel()
    copy = tensors.weight if tensors.copy is None else tensors.copy
    launch(
        _adamw_kernel,
        _TILE,
        (num_blocks(size, _TILE.columns), 1),
        *(tensors.weight, tensors.gradient, tensors.mean, tensors.square, copy, numbers_N),
        *(size, *betas, 1 - betas[0], 1 - betas[1], eps),
        HAS_COPY=tensors.copy is not None,
    )


def _adamw_kernel(
    weight,
    gradient,
    mean,
    square,
    copy,
    numbers,
    size,
    beta1,
    beta2,
    share1,
    share2,
    eps,
    HAS_COPY: tl.constexpr,
    ROWS: tl.constexpr,  # noqa: ARG001
    COLUMNS: tl.constexpr,
) -> None:
    step_size = tl.load(numbers)
    root = tl.load(numbers + 1)
    decay = tl.load(numbers + 2)
    factor = tl.load(numbers + 3)
    goes_on = tl.load(numbers + 4) == 0.0
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (place < size) & goes_on
    g = tl.load(gradient + place, mask=inside).to(tl.float32) * factor
    m = beta1 * tl.load(mean + place, mask=inside) + share1 * g
    v = beta2 * tl.load(square + place, mask=inside) + share2 * g * g
    w = tl.load(weight + place, mask=inside)
    w -= decay * w
    w -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(weight + place, w, mask=inside)
    tl.store(mean + place, m, mask=inside)
    tl.store(square + place, v, mask=inside)
    if HAS_COPY:
        tl.store(copy + place, w.to(copy.dtype.element_ty), mask=inside)
