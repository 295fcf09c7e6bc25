"""A model on several workers: how what each of them computed becomes the gradient of the whole batch.

Alone, nothing is to be added up. Replicated, each worker has the whole model, and gradients are summed after the backward
pass until a micro-batch has proved to fit, and by DDP while it runs from then on. Sharded (FSDP2), each worker keeps a
part of the state; gradients are summed as they are handed back to their keepers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel

from experts.context import MoEContext
from experts.model import attach
from orchestrator.errors import TrainingFailed, UserError
from orchestrator.tasks.task import Loss, Task
from orchestrator.train.parts.memory import block_lists
from orchestrator.train.parts.optim import norm_of_gradients
from orchestrator.train.parts.world import World

STEPS_BEFORE_OVERLAP = (
    20  # steps that a micro-batch must last before reductions begin during the backward pass
)
_MIB = 2**20
_BUCKET_MB = 25  # torch's own


@dataclass(frozen=True)
class DDPOptions:
    """What a user may set of DDP. ``bucket_cap_mb`` None is torch's own."""

    bucket_cap_mb: int | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    buffers: tuple[Tensor, ...] = ()
    """Those that are the main worker's at the beginning of each step."""


class Strategy:
    """A model in one process: its gradients are the gradients. The other forms say where they differ."""

    lockstep = False  # whether a forward pass waits for the other workers: then all compute, or none can
    num_expert_grads = 0  # gradients that live on one worker each, counted over all of them

    def __init__(self, model: nn.Module, task: Task, context: MoEContext | None = None) -> None:
        self.model, self.task = model, task
        self.context = context or MoEContext()
        attach(model, self.context)
        self._synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())

    @property
    def votes(self) -> bool:
        """Whether workers are to agree that all of them came through, after backward and before anything is summed."""
        return False

    def begin(self, shared: bool) -> None:
        """Before the micro-batches of a step. ``shared``: every worker has samples in each of them."""
        if not shared and self._synchronized:
            raise UserError(
                "with --sync-batchnorm every worker needs samples in every micro-batch; the last one of the epoch is too small: "
                "choose a --global-batch-size that leaves a larger rest, or fewer --workers"
            )

    def loss(self, batch: Any, last: bool) -> Any:  # noqa: ARG002
        """The task's loss; ``last`` for the last part of a step, whose backward pass may sum gradients as it goes."""
        return self.task.loss(self.model, batch)

    def all_reduce_gradients(self) -> float:
        """Make every worker's gradient the sum over all. Returns what it is yet to be multiplied by."""
        return 1.0

    def renew(self) -> None:
        """Another micro-batch size: it has yet to prove itself."""

    def micro_batch_proven(self) -> None:
        """The micro-batch fits: nothing more is to be waited for."""

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        """This worker's part of each gradient, sharing its memory."""
        return gradients

    def learns(self, parameters: Sequence[Tensor]) -> None:
        """The parameters that the optimizer has, which the norm is of."""

    @contextmanager
    def dummy_pass(self) -> Iterator[None]:
        """Around a pass over samples that count for nothing."""
        yield

    def squares(self) -> Tensor | None:
        """Squared norms of the gradients that live on one worker each: this worker's, and zeros for the others'."""
        return None

    def norm(self, gradients: list[Tensor], squares: Tensor | None) -> Tensor:  # noqa: ARG002
        """The norm of the whole gradient, the same on all workers. ``squares`` are those of all of them."""
        return norm_of_gradients(gradients)

    def exchange_stats(self) -> tuple[float, float, float]:
        """Bytes, rows and seconds that the exchange between hosts cost this one since it was last asked."""
        return 0.0, 0.0, 0.0


class DDPStrategy(Strategy):
    """The whole model on each worker."""

    def __init__(
        self, model: nn.Module, task: Task, world: World, options: DDPOptions, warn: Callable[[str], None]
    ) -> None:
        super().__init__(model, task)
        self.world, self.options, self._warn = world, options, warn
        self.lockstep = self._synchronized
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._survived, self._shared, self._ragged, self._reduced = 0, True, False, False
        self._ddp: DistributedDataParallel | None = None
        world.broadcast([tensor.detach() for tensor in [*model.parameters(), *persistent_buffers(model)]])

    @property
    def votes(self) -> bool:
        return self._survived < STEPS_BEFORE_OVERLAP and not self.lockstep

    def renew(self) -> None:
        self._survived = 0

    def proved(self) -> None:
        self._survived = max(self._survived, STEPS_BEFORE_OVERLAP)

    def begin(self, shared: bool) -> None:
        super().begin(shared)
        self._shared, self._reduced = shared, False
        self.world.broadcast(self.options.buffers)

    def loss(self, batch: Any, last: bool) -> Any:
        if not last or not self._shared or self._survived < STEPS_BEFORE_OVERLAP or self._ragged:
            return super().loss(batch, last)
        if self._ddp is None:
            self._ddp = self._wrapped()
        self._reduced = True
        scalar, result = self._ddp(batch)
        return with_sum(result, scalar)

    def _wrapped(self) -> DistributedDataParallel:
        options = self.options
        return DistributedDataParallel(
            _Whole(self.task, self.model),
            **_no_buffers(),  # pyright: ignore[reportArgumentType] -- ours to do, once a step
            init_sync=False,  # done when the replica was made
            process_group=self.world.process_group,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )

    def all_reduce_gradients(self) -> float:
        self._survived += 1
        if self._reduced:
            self._check_reduced()
            return float(self.world.size)  # DDP has summed, and divided by the number of workers
        self._complete()
        for bucket in gradient_buckets(
            [p.grad for p in self._parameters if p.grad is not None], self.options.bucket_cap_mb or _BUCKET_MB
        ):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            self.world.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return 1.0

    def _check_reduced(self) -> None:
        """DDP notices a parameter that got no gradient only when the next step begins, and until then leaves its neighbours
        unsummed without a word. What it does then is done now, before anything is updated."""
        assert self._ddp is not None
        try:
            self._ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise TrainingFailed(
                "a parameter got no gradient in this step, though it had one in the first steps, and the workers' gradients could not "
                "be summed; nothing was updated. Use --find-unused-parameters, and begin again with --resume auto"
            ) from None

    def _complete(self) -> None:
        """A parameter that some workers have a gradient of and others have not: zero for those. One that nobody has stays
        without, as in one process."""
        has = [float(p.grad is not None) for p in self._parameters]
        most = self.world.all_reduce_max([*has, *(1.0 - value for value in has)])
        for parameter, somewhere in zip(self._parameters, most, strict=False):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        lacking = sum(most[len(has) :])
        if lacking and self._shared and not self._ragged and not self.options.find_unused_parameters:
            self._ragged = True
            self._warn(
                f"{lacking:.0f} of {len(has)} parameters got no gradient in a step: gradients are summed after the backward pass, "
                "not during it; --find-unused-parameters lets DDP look for such parameters in each step"
            )


def _no_buffers() -> dict[str, bool]:
    """Newer versions of torch have two names for it."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return (
        {"forward_sync_buffers": False} if "forward_sync_buffers" in known else {"broadcast_buffers": False}
    )


class _Whole(nn.Module):
    """What DDP wraps: the task's loss of a batch. So the task sees its own model, not a wrapper of it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self._task, self.model = task, model

    def forward(self, batch: Any) -> Any:
        result = self._task.loss(self.model, batch)
        return sum_of(result), result


def sum_of(result: Any) -> Any:
    """The scalar that a task's loss is differentiated by, in whichever form it comes."""
    return result.sum if isinstance(result, Loss) else result[0] if isinstance(result, tuple) else result


def with_sum(result: Any, scalar: Any) -> Any:
    """The same loss with its scalar as DDP hands it back: with a static graph the sum over the workers hangs on it."""
    if isinstance(result, Loss):
        return replace(result, sum=scalar)
    return (scalar, *result[1:]) if isinstance(result, tuple) else scalar


class FSDPStrategy(Strategy):
    """Gradients and optimizer state, or parameters too, in parts on the workers."""

    lockstep = True

    def __init__(self, model: nn.Module, task: Task, world: World) -> None:
        super().__init__(model, task)
        self.world = world

    def loss(self, batch: Any, last: bool) -> Any:
        root: Any = self.model
        root.set_requires_gradient_sync(last)
        return super().loss(batch, last)

    def local(self, gradients: list[Tensor]) -> list[Tensor]:
        return [local_part(gradient) for gradient in gradients]

    def norm(self, gradients: list[Tensor], squares: Tensor | None) -> Tensor:  # noqa: ARG002
        return self.world.all_reduce(norm_of_gradients(gradients).square()).sqrt()


def shard_model(model: nn.Module, world: World, whole_parameters: bool, offload: bool) -> None:
    """Cut a model into parts in place; its names stay. ``whole_parameters`` keeps them whole from forward to backward
    (zero2). Gradients are summed, not averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in [*(block for alike in block_lists(model) for block in alike), model]:
        made: Any = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=not whole_parameters and module is not model,
            offload_policy=policy,
        )
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)


def is_sharded(model: nn.Module) -> bool:
    """Asked by what it can do: the modules of FSDP2 take a second to import, which a run without them need not wait."""
    return hasattr(model, "reshard")


def reshard_all(model: nn.Module) -> None:
    """A forward pass without a backward one (an evaluation) may leave parameters whole: let them go."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # pyright: ignore[reportCallIssue]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor with all its parts. Where it is sharded, every worker must ask. (``full_tensor`` crashes over gloo with parts
    on a GPU.)"""
    if not hasattr(tensor, "to_local"):
        return tensor
    handle: Any = tensor
    local, size = handle.to_local(), handle.device_mesh.size()
    if not handle.placements[0].is_shard(0):
        return local
    rows = -(-tensor.shape[0] // size)  # all but the last parts have so many
    padded = local.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[: tensor.shape[0]]


def local_part(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into one that may be in parts."""
    local_part(target).copy_(local_part(shard_like(source, target)))


def shard_like(source: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor cut as a parameter is cut, on its device."""
    if not hasattr(parameter, "to_local") or source.shape != parameter.shape:
        return source
    from torch.distributed.tensor import DTensor, distribute_tensor

    kept: Any = parameter
    mesh, placements = kept.device_mesh, kept.placements
    cut = distribute_tensor(source.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
    local = cut.to(kept.to_local().device, copy=True)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def gradient_buckets(gradients: Sequence[Tensor], cap_mb: int) -> Iterator[list[Tensor]]:
    """Neighbouring gradients of one kind, up to a size: fixed by the list of parameters alone."""
    held: list[Tensor] = []
    for gradient in gradients:
        fits = sum(g.nbytes for g in held) + gradient.nbytes <= cap_mb * _MIB
        if held and (not fits or (gradient.dtype, gradient.device) != (held[0].dtype, held[0].device)):
            yield held
            held = []
        held.append(gradient)
    if held:
        yield held


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that belong to the model's state. Others may differ from worker to worker: where experts live, for one."""
    kept = set(model.state_dict())
    return [buffer for name, buffer in model.named_buffers() if name in kept]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Running statistics: what a forward pass changes."""
    return [
        b
        for module in model.modules()
        if isinstance(module, _NormBase)
        for b in module.buffers(recurse=False)
    ]


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Batch norm over the micro-batch of all workers."""
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("--sync-batchnorm: the model has no batch norm; leave it out")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, dist.group.WORLD)
