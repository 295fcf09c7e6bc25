"""A model on expert hosts: each has the dense part and some of the experts. Tokens travel to the experts, so an expert's
gradient is complete where it lives; gradients of the dense part are summed over the hosts while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.bank import SizeClass
from experts.context import MoEContext
from experts.exchange import GroupExchange
from experts.group import AsyncWork, Group
from orchestrator.tasks.task import Task
from orchestrator.train.parts.optim import norm_of_gradients
from orchestrator.train.parts.world import World
from orchestrator.train.strategies.data_parallel import (
    Strategy,
    gradient_buckets,
    persistent_buffers,
    running_statistics,
)

_BUCKET_MB = 25


class ExpertParallelStrategy(Strategy):
    """The dense part of a model, with this host's experts."""

    lockstep = True

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        world: World,
        chunks: int = 1,
        bucket_mb: int | None = None,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        """The model's experts have been placed already. ``buffers`` are the main host's at the beginning of each step."""
        self.world, self._buffers = world, tuple(buffers)
        assert world.group is not None, "one process has no hosts"
        self._exchange = GroupExchange(world.group)
        super().__init__(model, task, MoEContext(self._exchange, chunks))
        self._banks = list(dict.fromkeys(layer.bank for _, layer in moe_layers(model)))
        expert_ids = {id(p) for bank in self._banks for p in bank.parameters()}
        dense = [p for p in model.parameters() if id(p) not in expert_ids]
        world.broadcast([tensor.detach() for tensor in [*dense, *persistent_buffers(model)]])
        self._dense = [p for p in dense if p.requires_grad]
        self._learned = {id(p) for p in model.parameters()}
        self._sums = GradientSums(self._dense, world.new_group(), bucket_mb or _BUCKET_MB)
        self.num_expert_grads = sum(2 * len(bank.sizes) for bank in self._banks)

    def learns(self, parameters: Sequence[Tensor]) -> None:
        self._learned = {id(p) for p in parameters}

    def loss(self, batch: object, last: bool) -> object:
        self._sums.armed = last and not self.context.step.dummy
        return super().loss(batch, last)

    def begin(self, shared: bool) -> None:
        super().begin(shared)
        self.model.zero_grad(
            set_to_none=True
        )  # an optimizer clears what it has, and sums are of all that is trained
        self.world.broadcast(self._buffers)
        self._exchange.meter.take()  # what an evaluation cost
        self._sums.begin()

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """What a stand-in leaves in the dense part is taken back: a gradient of zero times something infinite, for one."""
        gradients = [None if p.grad is None else p.grad.clone() for p in self._dense]
        statistics = [(buffer, buffer.clone()) for buffer in running_statistics(self.model)]
        yield
        for parameter, gradient in zip(self._dense, gradients, strict=True):
            parameter.grad = gradient
        for buffer, before in statistics:
            buffer.copy_(before)

    def all_reduce_gradients(self) -> float:
        self._sums.finish()
        return 1.0

    def squares(self) -> Tensor | None:
        """Each expert's two gradients have a place of their own, in the order of layers and ids, whoever holds them."""
        pieces: list[Tensor] = []
        for bank in self._banks:
            places = torch.zeros(2, len(bank.sizes), dtype=torch.float64, device=self.world.device)
            for group, role, stack in bank.stacks():
                if stack.grad is not None and id(stack) in self._learned:
                    places[_ROLES.index(role)].index_copy_(
                        0, _ids(group, places.device), _squares(stack.grad)
                    )
            pieces.append(places.reshape(-1))
        return torch.cat(pieces) if pieces else None

    def norm(self, gradients: list[Tensor], squares: Tensor | None) -> Tensor:  # noqa: ARG002
        dense = norm_of_gradients(
            [p.grad for p in self._dense if p.grad is not None and id(p) in self._learned]
        ).to(self.world.device)
        return dense if squares is None else torch.cat([dense.square().reshape(1), squares]).sum().sqrt()

    def exchange_stats(self) -> tuple[float, float, float]:
        sent, rows, seconds = self._exchange.meter.take()
        return float(sent), float(rows), seconds


_ROLES = ("up", "down")


def _ids(group: SizeClass, device: torch.device) -> Tensor:
    return torch.tensor(group.ids, device=device)


def _squares(stack: Tensor) -> Tensor:
    return torch.linalg.vector_norm(stack.flatten(1), dim=1).double().square()


class GradientSums:
    """Sums gradients over the hosts in buckets that are fixed by the list of parameters, the last parameters first, each as
    soon as it is complete. Buckets leave in their order, in a group of their own: what is summed does not depend on when
    a host was ready, and never gets in the way of the exchange. With each gradient travels whether there is one: a parameter
    that no host used stays without, as in one process."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, cap_mb: int) -> None:
        self.armed = False
        self._group = group
        self._buckets = list(gradient_buckets(list(reversed(parameters)), cap_mb))
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._all = [
            torch.ones(len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            for bucket in self._buckets
        ]
        self._left: list[int] = []
        self._sent: list[tuple[Tensor, AsyncWork]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._hook())

    def _hook(self) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if self.armed:
                self._left[self._bucket_of[id(parameter)]] -= 1
                self._send(whatever=False)

        return ready

    def begin(self) -> None:
        """Before a step."""
        self.armed = False
        self._left = [len(bucket) for bucket in self._buckets]
        self._sent = []

    def _send(self, whatever: bool) -> None:
        while len(self._sent) < len(self._buckets) and (whatever or self._left[len(self._sent)] <= 0):
            bucket = self._buckets[len(self._sent)]
            there = self._all[len(self._sent)]
            if any(p.grad is None for p in bucket):
                there = there.new_tensor([float(p.grad is not None) for p in bucket])
            flat = torch.cat(
                [*(p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket), there]
            )
            self._sent.append((flat, self._group.all_reduce(flat)))

    def finish(self) -> None:
        """After the backward pass of a step: send what is left, and put the sums in place."""
        self._send(whatever=True)
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            *parts, there = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for place, (parameter, part) in enumerate(zip(bucket, parts, strict=True)):
                if parameter.grad is not None or float(there[place]):
                    parameter.grad = part.view_as(parameter)
        self._sent = []
