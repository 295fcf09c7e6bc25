"""The same bits on any number of workers, each with a shard of the state (ZeRO-2, ZeRO-3).

FSDP2 gathers weights, and scatters the gradients of each micro-batch block by block. They travel as integers,
and each worker adds up those of its shard. Weights of experts hand over their gradients for each use, past
FSDP2: where experts are in shards too, their integers are scattered with the block that they are in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from experts.hosts.group import Group
from experts.moe.bank import ExpertBank, SizeClass
from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.optim.gradient_norm import exact_square
from orchestrator.train.optim.shards import as_shard, is_shard, local_part, own_rows, rows_of_shard
from orchestrator.train.strategies.fsdp import shard_over_hosts, whole_on_hosts
from orchestrator.train.strategies.reproducible import ReproducibleStrategy

if TYPE_CHECKING:
    from orchestrator.train.strategies.host_mesh import ScatterExactly


class ShardedReproducibleStrategy(ReproducibleStrategy):
    """Shards of all parameters, or of the dense part alone where each host has some of the experts."""

    def __init__(
        self, model: nn.Module, task: Task, world: World, divided: bool, chunks: int, keep_parameters: bool
    ) -> None:
        """``divided`` and ``chunks`` as in the base class, ``keep_parameters`` as in ``fsdp.shard_model``."""
        self._scatter_of: dict[int, ScatterExactly] = {}
        """What scatters the gradient of a parameter, by the id of its shard."""
        self._whole_sums: dict[nn.Parameter, Tensor] = {}
        """The sums of whole stacks, by their shard, until they are scattered."""
        self._used: set[int] = set()
        """The ids of shards of which this worker has computed a gradient: zeros of dummy samples are none."""
        # Each worker keeps a shard of its own copy. The base class makes the copies equal first.
        super().__init__(model, task, world, divided, chunks)
        self.lockstep = True  # a pass gathers weights
        self._shard(keep_parameters)
        self._find_parameters()

    @property
    def _shards_group(self) -> Group:
        assert self._group is not None, "one process has no shards"
        return self._group

    def _shard(self, keep_parameters: bool) -> None:
        # FSDP2's modules take a second to import.
        from orchestrator.train.strategies.host_mesh import ScatterExactly

        group = self._shards_group
        whole = whole_on_hosts(self.model) if self._divided else set()
        for module in shard_over_hosts(self.model, group, self.world.device, keep_parameters, whole):
            # The blocks come before the whole model, which scatters what is in none of them.
            own = [p for p in module.parameters() if is_shard(p) and id(p) not in self._scatter_of]
            scatter = ScatterExactly(group, partial(self._on_scatter, {id(p) for p in own}))
            module.set_custom_reduce_scatter(scatter)
            self._scatter_of |= {id(p): scatter for p in own}

    def _find_parameters(self) -> None:
        super()._find_parameters()
        self._sharded_stacks = [stack for stack in self._trained_stacks() if is_shard(stack)]
        if self._divided or not self._scatter_of:
            return
        for bank in self._banks:
            shards = {(role, group): stack for group, role, stack in bank.stacks()}
            bank.gradient_sink = partial(self._take_use, bank, shards)

    def _take_use(
        self,
        bank: ExpertBank,
        shards: dict[tuple[str, SizeClass], nn.Parameter],
        parameter: nn.Parameter,
        gradient: Tensor,
    ) -> None:
        """Take the gradient of one use of a whole stack, which FSDP2 has put in the place of its shard."""
        if self._in_dummy_pass:
            return
        shard = next(shards[role, group] for group, role, stack in bank.stacks() if stack is parameter)
        multiples = self.sums.to_multiples(gradient)
        if shard in self._whole_sums:
            self._whole_sums[shard] += multiples
        else:
            self._whole_sums[shard] = multiples

    def _on_scatter(self, parameter_ids: set[int], gradients: Tensor) -> Tensor:
        """Return the gradients of a block as integers, before they are scattered; scatter its experts."""
        for stack in self._sharded_stacks:
            if id(stack) in parameter_ids:
                self._scatter(stack)
        if self._in_dummy_pass:
            return torch.zeros_like(gradients, dtype=torch.int64)
        return self.sums.to_multiples(gradients)

    def _scatter(self, stack: nn.Parameter) -> None:
        """Add this worker's shard of the sums of all workers to its own sum."""
        rows = rows_of_shard(stack)
        shape = (rows * self.world.size, *stack.shape[1:])
        padded = torch.zeros(shape, dtype=torch.int64, device=self.world.device)
        whole = self._whole_sums.pop(stack, None)
        if whole is not None:
            padded[: len(whole)] = whole
            if whole.is_cuda:
                # FSDP2 scatters on a stream of its own. Freed here, the memory would be written again before
                # that stream has read it.
                whole.record_stream(torch.cuda.current_stream(whole.device))
        received = padded.new_empty((rows, *stack.shape[1:]))
        self._shards_group.reduce_scatter(received, padded).wait()
        self.sums.add_multiples(stack, received[: len(local_part(stack))])

    def _take_dense(self, parameter: Tensor) -> None:
        """Move the integers of a shard into the sums. A dummy pass has sent zeros."""
        scatter = self._scatter_of.get(id(parameter))
        if scatter is None:
            super()._take_dense(parameter)
            return
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self.sums.add_multiples(parameter, scatter.received(local_part(parameter.grad)))
        if not self._in_dummy_pass:
            self._used.add(id(parameter))
        parameter.grad = None

    def begin_step(self, all_have_samples: bool) -> None:
        super().begin_step(all_have_samples)
        self._whole_sums = {}
        self._used = set()

    def _all_reduce(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return whether each parameter has a gradient on some worker: shards are summed already, others now.

        Stacks whose block has no other gradients are scattered here."""
        whole = [p for p in parameters if not is_shard(p)]
        has_whole = dict(zip(whole, super()._all_reduce(whole) if whole else [], strict=True))
        has = [has_whole[p] if p in has_whole else id(p) in self._used for p in parameters]
        waits = [stack in self._whole_sums for stack in self._sharded_stacks]
        flags = torch.tensor([*has, *waits], dtype=torch.int64, device=self.world.device)
        self._shards_group.all_reduce(flags).wait()
        counts = flags.tolist()
        for stack, count in zip(self._sharded_stacks, counts[len(has) :], strict=True):
            if count:
                self._scatter(stack)
        for scatter in self._scatter_of.values():
            scatter.forget()  # the optimizer needs the memory
        return [bool(count) for count in counts[: len(has)]]

    def _fill(self, parameter: nn.Parameter) -> None:
        if not is_shard(parameter):
            super()._fill(parameter)
        elif not self.sums.has(parameter):
            self.sums.add_multiples(parameter, torch.zeros_like(local_part(parameter), dtype=torch.int64))

    def _as_gradient(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        return as_shard(value, parameter) if is_shard(parameter) else value

    def _counted(self, bank: ExpertBank, group: SizeClass, stack: nn.Parameter) -> list[tuple[int, int]]:
        own = own_rows(stack)
        if own is None:
            return super()._counted(bank, group, stack)
        return list(enumerate(group.rows[own.first : own.end]))

    def _dense_square(self, gradients: list[Tensor]) -> Tensor:
        """Of the workers, which all have the gradient of a gate, the main one counts it."""
        counted = [g if is_shard(g) or self.world.is_main else g.new_empty(0) for g in gradients]
        return exact_square([local_part(g) for g in counted], self.world.device, self._shards_group)
