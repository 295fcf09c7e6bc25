"""Expert parallel: each host has the dense part of the model and some of the experts.

Tokens are sent to the experts' hosts, so an expert's gradient is complete where the expert lives. Gradients
of the dense part are all-reduced over the hosts while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.copies import CopiedGradients
from experts.hosts.group import AsyncWork, Group
from experts.moe.bank import ExpertBank, SizeClass
from experts.moe.context import MoEContext
from experts.tokens.exchange import GroupExchange
from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.shards import is_shard, local_part
from orchestrator.train.strategies.base import Strategy, num_weights, placed_stacks
from orchestrator.train.strategies.buckets import BUCKET_MB, gradient_buckets
from orchestrator.train.strategies.buffers import (
    BufferChoice,
    no_buffers,
    persistent_buffers,
    running_statistics,
)
from orchestrator.train.strategies.fsdp import shard_over_hosts, whole_on_hosts


class ExpertParallelStrategy(Strategy):
    """The dense part of a model on every host, and each host's own experts."""

    lockstep = True

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        world: World,
        chunks: int = 1,
        bucket_mb: int | None = None,
        buffers: BufferChoice = no_buffers,
    ) -> None:
        """The model's experts are placed already."""
        self.world = world
        self._choose_buffers = buffers
        exchange = GroupExchange(world.axis("expert"))
        super().__init__(model, task, MoEContext(exchange, chunks))
        self._may_overlap = False
        """Whether gradients are summed while the backward pass runs."""
        self._bucket_mb = bucket_mb or BUCKET_MB
        self._gradient_group = world.axis("data")
        self._all_reduce = GradientAllReduce([], self._gradient_group, self._bucket_mb)
        self._find_parameters()
        dense = [tensor.detach() for tensor in [*self._all_dense, *persistent_buffers(model)]]
        world.broadcast(dense)

    def _find_parameters(self) -> None:
        """Find the parameters of the dense part and of the experts, and the buffers to broadcast."""
        self._buffers = self._choose_buffers(self.model)
        self._banks = list(dict.fromkeys(layer.bank for _, layer in moe_layers(self.model)))
        expert_ids = {id(p) for bank in self._banks for p in bank.parameters()}
        self._all_dense = [p for p in self.model.parameters() if id(p) not in expert_ids]
        self._dense = [p for p in self._all_dense if p.requires_grad]
        self._all_reduce.close()
        self._all_reduce = GradientAllReduce(
            self._reduced_parameters(), self._gradient_group, self._bucket_mb
        )
        assert self._exchange is not None
        self._copied = CopiedGradients([layer for _, layer in moe_layers(self.model)], self._exchange)
        self.num_expert_grads = sum(map(num_weights, self._banks))
        self._positions = [self._positions_of(*entry) for entry in placed_stacks(self._banks)]

    def _reduced_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are all-reduced."""
        return self._dense

    def experts_changed(self) -> None:
        super().experts_changed()
        self._find_parameters()

    def loss(self, batch: object, last: bool) -> object:
        self._all_reduce.armed = last and self._may_overlap
        return super().loss(batch, last)

    def begin_step(self, all_have_samples: bool) -> None:
        super().begin_step(all_have_samples)
        # Gradients of a dummy pass are discarded when it ends, so they must not be sent while it runs.
        # In a step with a dummy pass no host sends gradients early: NCCL may hang where hosts launch the
        # collectives of two communicators in different orders.
        self._may_overlap = all_have_samples
        # An optimizer clears its own parameters only; the all-reduce covers all that require a gradient.
        self.model.zero_grad(set_to_none=True)
        self.world.broadcast(self._buffers)
        self._all_reduce.begin_step()

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """Restore the dense part afterwards: zero times an infinite value, for one, leaves a NaN gradient."""
        reduced = self._reduced_parameters()
        gradients = [None if p.grad is None else p.grad.clone() for p in reduced]
        statistics = [(buffer, buffer.clone()) for buffer in running_statistics(self.model)]
        yield
        for parameter, gradient in zip(reduced, gradients, strict=True):
            # Zeros, not None: without a good sample on any host, the step is one of zero gradients, as in one
            # process.
            is_new = gradient is None and parameter.grad is not None
            zeros = torch.zeros_like(parameter, dtype=parameter.grad_dtype) if is_new else None
            parameter.grad = zeros if is_new else gradient
        for buffer, before in statistics:
            buffer.copy_(before)

    def all_reduce_gradients(self) -> float:
        self._all_reduce.finish()
        self._copied.add_up()
        return 1.0

    def expert_grad_squares(self) -> Tensor | None:
        if not self._banks:
            return None
        squares = torch.zeros(self.num_expert_grads, dtype=torch.float64, device=self.world.device)
        for stack, position_L, owned_L in self._positions:
            if stack.grad is not None and id(stack) in self._trained_ids:
                norms_L = torch.linalg.vector_norm(stack.grad.flatten(1), dim=1).double()
                squares.index_copy_(0, position_L, norms_L.square() * owned_L)
        return squares

    def _positions_of(
        self, bank: ExpertBank, group: SizeClass, stack: nn.Parameter, first: int
    ) -> tuple[nn.Parameter, Tensor, Tensor]:
        """Return a stack with the positions of its experts' squared norms, and which of them count here.

        Of the copies of an expert on several hosts, one counts."""
        device = self.world.device
        position_L = torch.tensor([first + row for row in group.rows], device=device)
        owned = [float(row in bank.owned) for row in group.rows]
        return stack, position_L, torch.tensor(owned, dtype=torch.float64, device=device)

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        trained = [p.grad for p in self._dense if p.grad is not None and id(p) in self._trained_ids]
        dense = norm_of_gradients(trained).to(self.world.device)
        if expert_squares is None:
            return dense
        return torch.cat([dense.square().reshape(1), expert_squares]).sum().sqrt()


class ShardedDenseStrategy(ExpertParallelStrategy):
    """The dense part in shards (FSDP2), which are gathered block by block; experts and gates stay whole.

    Gradients are reduced and scattered in every micro-batch: whole ones are never kept. Those of gates, which
    are whole, are all-reduced after the last one."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        world: World,
        chunks: int = 1,
        keep_parameters: bool = False,
        buffers: BufferChoice = no_buffers,
    ) -> None:
        """The model's experts are placed already. ``keep_parameters`` as in ``shard_model``."""
        # Each host keeps a shard of its own copy. The base class makes the copies equal first.
        super().__init__(model, task, world, chunks, None, buffers)
        # FSDP2's modules take a second to import.
        from orchestrator.train.strategies.host_mesh import ScatterOverHosts

        group = self._gradient_group
        for module in shard_over_hosts(model, group, world.device, keep_parameters, whole_on_hosts(model)):
            module.set_custom_reduce_scatter(ScatterOverHosts(group))
        self._find_parameters()

    def _reduced_parameters(self) -> list[nn.Parameter]:
        # FSDP2 reduces the gradients of its shards, those of dummy samples too: they are zero.
        return [parameter for parameter in self._dense if not is_shard(parameter)]

    def begin_step(self, all_have_samples: bool) -> None:
        super().begin_step(all_have_samples)
        # The collectives of FSDP2 run in the backward pass.
        self._may_overlap = False

    def gradient_norm(self, gradients: list[Tensor], expert_squares: Tensor | None) -> Tensor:  # noqa: ARG002
        trained = [p.grad for p in self._dense if p.grad is not None and id(p) in self._trained_ids]
        shards = [local_part(gradient) for gradient in trained if is_shard(gradient)]
        whole = [gradient for gradient in trained if not is_shard(gradient)]
        squares = [self.world.all_reduce(self._square(shards)), self._square(whole)]
        if expert_squares is not None:
            squares.append(expert_squares)
        return torch.cat(squares).sum().sqrt()

    def _square(self, gradients: list[Tensor]) -> Tensor:
        return norm_of_gradients(gradients).to(self.world.device).square().reshape(1)


class GradientAllReduce:
    """Sums gradients over the hosts in buckets, each as soon as its gradients are complete.

    The list of parameters fixes the buckets, the last parameters first, and buckets are sent in that order.
    So the sums do not depend on which host was ready when. The group is their own, so that they never block
    the token exchange. Each gradient carries a flag that it exists: a parameter that no host used stays
    without one, as in one process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, cap_mb: int) -> None:
        self.armed = False
        """Whether complete gradients are sent at once: true in the last backward pass of a step."""
        self._group = group
        self._buckets = list(gradient_buckets(list(reversed(parameters)), cap_mb))
        self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        # The flags of a bucket whose gradients all exist, made once: new ones cost a copy to the device.
        self._all_exist = [
            torch.ones(len(bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            for bucket in self._buckets
        ]
        self._num_missing: list[int] = []
        self._sent: list[tuple[Tensor, AsyncWork]] = []
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters]

    def close(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        if self.armed:
            self._num_missing[self._bucket_of[id(parameter)]] -= 1
            self._send_buckets(incomplete=False)

    def begin_step(self) -> None:
        self.armed = False
        self._num_missing = [len(bucket) for bucket in self._buckets]
        self._sent = []

    def _send_buckets(self, incomplete: bool) -> None:
        """Start the all-reduce of the next buckets in order; stop at an incomplete one unless allowed."""
        while len(self._sent) < len(self._buckets):
            number = len(self._sent)
            if self._num_missing[number] > 0 and not incomplete:
                return
            bucket = self._buckets[number]
            exists = self._all_exist[number]
            if any(p.grad is None for p in bucket):
                exists = exists.new_tensor([float(p.grad is not None) for p in bucket])
            gradients = [_flat_gradient(p) for p in bucket]
            flat = torch.cat([*gradients, exists])
            self._sent.append((flat, self._group.all_reduce(flat)))

    def finish(self) -> None:
        """Send the remaining buckets after the last backward pass, and put the sums into the gradients."""
        self._send_buckets(incomplete=True)
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            *sums, exists = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for position, (parameter, total) in enumerate(zip(bucket, sums, strict=True)):
                if parameter.grad is not None or float(exists[position]):
                    parameter.grad = total.view_as(parameter)
        self._sent = []


def _flat_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return parameter.new_zeros(parameter.numel(), dtype=parameter.grad_dtype)
    return parameter.grad.reshape(-1)
