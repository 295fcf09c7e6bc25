"""The same bits on any number of workers, with experts on hosts or whole on every worker.

Each micro-batch is computed whole by one worker, with the same shapes everywhere, and its gradients are added
to exact sums. So neither the number of workers nor the place of an expert shows in a bit of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.copies import CopiedGradients
from experts.host_copy import to_host
from experts.model import attach
from experts.moe.bank import ExpertBank, SizeClass
from experts.moe.context import MoEContext
from experts.tokens.exchange import GroupExchange, LocalExchange
from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.optim.exact_sums import ExactSums
from orchestrator.train.optim.gradient_norm import exact_square
from orchestrator.train.strategies.base import Strategy, num_weights, placed_stacks
from orchestrator.train.strategies.buckets import BUCKET_MB, gradient_buckets
from orchestrator.train.strategies.buffers import persistent_buffers


class ReproducibleStrategy(Strategy):
    """A model whose gradients are summed exactly over micro-batches and workers."""

    reproducible = True

    def __init__(self, model: nn.Module, task: Task, world: World, divided: bool, chunks: int = 1) -> None:
        """``divided`` says that the model has the experts of this host alone; they are placed already.

        Tokens are exchanged in ``chunks``."""
        self.world = world
        self._divided = divided and world.size > 1
        exchange = GroupExchange(world.axis("expert")) if self._divided else LocalExchange()
        super().__init__(model, task, MoEContext(exchange, chunks, by_choice=True))
        self.lockstep = self._divided
        self.sums = ExactSums()
        self._group = world.axis("data") if world.size > 1 else None
        self._in_dummy_pass = False
        self._norm: Tensor | None = None
        self._squares: dict[nn.Parameter, Tensor | None] = {}
        """The squared norm of each expert in a stack of trained weights."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._find_parameters()
        world.broadcast([tensor.detach() for tensor in [*self._shared, *persistent_buffers(model)]])

    def _find_parameters(self) -> None:
        """Find the parameters of the experts and of the dense part, and receive their gradients."""
        layers = [layer for _, layer in moe_layers(self.model)]
        self._banks = list(dict.fromkeys(layer.bank for layer in layers))
        self._stacks = [stack for bank in self._banks for _, _, stack in bank.stacks()]
        stack_ids = {id(stack) for stack in self._stacks}
        dense = [p for p in self.model.parameters() if id(p) not in stack_ids]
        self._shared = dense if self._divided else [*dense, *self._stacks]
        """Parameters that every worker has."""
        self._dense = [p for p in dense if p.requires_grad]
        self.num_expert_grads = sum(map(num_weights, self._banks))
        self._squares = {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = [p.register_post_accumulate_grad_hook(self._take_dense) for p in self._dense]
        for bank in self._banks:
            bank.gradient_sink = self.sums.add
        self._copied = None
        if self._exchange is not None:
            self._copied = CopiedGradients(layers, self._exchange, self.sums.multiples)

    def _take_dense(self, parameter: Tensor) -> None:
        """Move the gradient of a micro-batch into the sums; that of a dummy pass is dropped.

        Experts of a host that does a dummy pass compute the tokens of other hosts: their gradients count."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if not self._in_dummy_pass and id(parameter) in self._trained_ids:
            self.sums.add(parameter, parameter.grad)
        parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for bank in self._banks:
            bank.gradient_sink = None
        self.sums.begin()
        self._squares = {}
        attach(self.model, MoEContext())

    @property
    def grid_exponent(self) -> int:
        return self.sums.exponent

    @grid_exponent.setter
    def grid_exponent(self, exponent: int | None) -> None:
        if exponent is not None:
            self.sums.exponent = exponent

    def experts_changed(self) -> None:
        super().experts_changed()
        self._find_parameters()

    def begin_step(self, all_have_samples: bool) -> None:
        super().begin_step(all_have_samples)
        self.model.zero_grad(set_to_none=True)
        self.sums.begin()
        self._norm = None

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        self._in_dummy_pass = True
        try:
            yield
        finally:
            self._in_dummy_pass = False

    @torch.no_grad()
    def all_reduce_gradients(self) -> float:
        """Add up the integers of all workers, and give each parameter its gradient."""
        self._squares = dict.fromkeys(self._trained_stacks())
        shared = self._dense if self._divided else [*self._dense, *self._squares]
        exists = [self.sums.has(p) for p in shared]
        if self._group is not None:
            exists = self._all_reduce(shared)
        if self._copied is not None:
            self._copied.add_up()
        for parameter, has_gradient in zip(shared, exists, strict=True):
            # An expert without tokens has a gradient of zero, as in a step of one pass.
            if has_gradient or parameter in self._squares:
                self._take(parameter)
        for stack in self._squares:
            if stack.grad is None:
                self._take(stack)
        return 1.0

    def _take(self, parameter: nn.Parameter) -> None:
        """Give a parameter its gradient, and keep the squares of a stack of experts."""
        self._fill(parameter)
        is_stack = parameter in self._squares
        value, squares = self.sums.take(parameter, by_row=is_stack)
        parameter.grad = self._as_gradient(value, parameter)
        if is_stack:
            self._squares[parameter] = squares

    def _fill(self, parameter: nn.Parameter) -> None:
        """Make sure that a parameter has a sum, of zeros if no gradient was added."""
        self.sums.multiples(parameter)

    def _as_gradient(self, value: Tensor, parameter: nn.Parameter) -> Tensor:  # noqa: ARG002
        """Return a sum as the gradient of its parameter."""
        return value

    def _trained_stacks(self) -> list[nn.Parameter]:
        return [stack for stack in self._stacks if stack.requires_grad]

    def _all_reduce(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Sum the integers of all workers. Return whether each parameter has a gradient on some worker."""
        assert self._group is not None
        flags = torch.tensor([self.sums.has(p) for p in parameters], dtype=torch.int64)
        flags = flags.to(self.world.device)
        multiples = [self.sums.multiples(p) for p in parameters]
        buckets = list(gradient_buckets(multiples, BUCKET_MB))
        flats = [flags, *(torch.cat([each.flatten() for each in bucket]) for bucket in buckets)]
        for work in [self._group.all_reduce(flat) for flat in flats]:
            work.wait()
        for bucket, flat in zip(buckets, flats[1:], strict=True):
            for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                each.copy_(part.view_as(each))
        return [bool(count) for count in flags.tolist()]

    def why_repeat(self, expert_squares: Tensor | None) -> str | None:
        # Before the sums are looked at: without some rows they say nothing about the next step.
        reason = super().why_repeat(expert_squares)
        if reason is not None:
            return reason
        # Before the clipping: the gradients are the sums themselves.
        norm = self._norm_of(expert_squares)
        # One transfer for both: the device has nothing to do until the host knows them.
        figures = torch.stack([self.sums.largest(self.world.device), norm])
        largest, found = to_host(self.world.max_over_workers(figures)).tolist()
        self.world.membership.check()
        self._norm = norm if largest < torch.inf else torch.full_like(norm, torch.nan)
        return self.sums.why_repeat(largest, found)

    def expert_grad_squares(self) -> Tensor | None:
        if not self._banks:
            return None
        squares = torch.zeros(self.num_expert_grads, dtype=torch.float64, device=self.world.device)
        for bank, group, stack, first in placed_stacks(self._banks):
            found = self._squares.get(stack)
            if found is None or id(stack) not in self._trained_ids:
                continue
            own = self._counted(bank, group, stack)
            places = torch.tensor([first + row for _, row in own], dtype=torch.int64)
            squares[places.to(found.device)] = found[[place for place, _ in own]]
        return squares

    def _counted(self, bank: ExpertBank, group: SizeClass, stack: nn.Parameter) -> list[tuple[int, int]]:  # noqa: ARG002
        """Return the experts of a stack that this worker counts: their places in it, and their rows.

        Of the workers that hold an expert, one counts it."""
        counted = set(bank.owned) if self._divided or self.world.is_main else set()
        return [(place, row) for place, row in enumerate(group.rows) if row in counted]

    def _norm_of(self, expert_squares: Tensor | None) -> Tensor:
        trained = [p.grad for p in self._dense if p.grad is not None and id(p) in self._trained_ids]
        dense = self._dense_square(trained)
        if expert_squares is None:
            return dense.sqrt()
        return torch.cat([dense.reshape(1), expert_squares]).sum().sqrt()

    def _dense_square(self, gradients: list[Tensor]) -> Tensor:
        return exact_square(gradients, self.world.device)

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        assert self._norm is not None, "the norm of a step that was not reduced"
        return self._norm
