"""Records what is alive at each moment of a traced pass, by the blocks and experts that it belongs to.

The pass saves its activations. Those of recomputed blocks, or experts, follow from it: what their forward
passes have allocated is gone until their backward passes begin."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experts.types import RowMap
from orchestrator.measure.tracing.op_recorder import OpRecorder
from orchestrator.plan.pass_memory import Moment, PassMemory, highest

_State = Literal["before", "forward", "done", "backward", "finished"]
Form = Literal["saved", "blocks_recomputed", "experts_recomputed"]


@dataclass
class Region:
    """A repeated block, or the experts of a layer, in a pass."""

    module: nn.Module
    is_block: bool
    block: Region | None = None
    """The block that experts are in."""
    state: _State = "before"
    own: float = 0.0
    """Bytes alive that its forward pass has allocated, without its outputs."""
    output: float = 0.0
    """Bytes of its outputs that are alive."""
    flops: float = 0.0
    """Of its forward pass."""
    rows: float = 0.0
    """Bytes of the rows that experts compute."""

    @property
    def sizes(self) -> _Sizes:
        return _Sizes(self.state, self.own, self.output)


@dataclass(frozen=True)
class _Sizes:
    state: _State
    own: float
    output: float


@dataclass(frozen=True)
class Instant:
    """All sizes of one moment."""

    alive: float
    in_experts: float
    gradients: float
    expert_gradients: float
    has_logits: bool
    rows: float
    """Bytes of the rows that experts compute at this moment."""
    regions: tuple[_Sizes, ...]


@dataclass
class _Storage:
    size: float
    owners: list[Region] = field(default_factory=list)
    is_output: bool = False
    in_experts: bool = False


@dataclass(frozen=True)
class RepeatedKind:
    """Blocks of one kind of which the first and the last are traced."""

    first: int
    last: int
    """Their places among the traced blocks."""
    further: int
    """Blocks between them that are not traced."""
    gradients: float
    """Bytes of the gradients of one block's dense part."""
    expert_gradients: float


class MemoryRecorder(TorchDispatchMode):
    """Records the moments of a pass that runs inside it.

    The first ``num_blocks`` modules are blocks, the others experts. ``rounding`` is the allocator's unit;
    ``libraries`` are bytes that are always there."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        num_blocks: int,
        rounding: int,
        libraries: int,
        operations: OpRecorder,
    ) -> None:
        super().__init__()
        self._operations = operations
        self.regions = [Region(each, number < num_blocks) for number, each in enumerate(modules)]
        self.instants: list[Instant] = []
        self.computes_logits = False
        self._rounding = rounding
        self._storages: dict[int, _Storage] = {}
        self._ignored: set[int] = set()
        self._active: list[Region] = []
        self._in_experts = False
        self._alive = float(libraries)
        self._alive_in_experts = 0.0
        self._gradients = [0.0, 0.0]

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Do not count the memory of these tensors: it is counted as parameters."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were there before, such as the batch."""
        for tensor in tensors:
            self._track(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        return output

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored or key in self._storages:
            return
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        in_experts = self._in_experts or any(not region.is_block for region in self._active)
        self._storages[key] = _Storage(size, list(self._active), in_experts=in_experts)
        self._add(self._storages[key], size)
        weakref.finalize(storage, self._forget, key)
        if not self.computes_logits:
            self.record()

    def _forget(self, key: int) -> None:
        storage = self._storages.pop(key, None)  # a later one may have the same address
        if storage is not None:
            self._add(storage, -storage.size)

    def _add(self, storage: _Storage, size: float) -> None:
        self._alive += size
        self._alive_in_experts += size if storage.in_experts else 0.0
        for region in storage.owners:
            if storage.is_output:
                region.output += size
            else:
                region.own += size

    def record(self, freed: float = 0.0, has_logits: bool = False) -> None:
        """Record this moment, without ``freed`` bytes."""
        regions = tuple(region.sizes for region in self.regions)
        alive = self._alive - freed
        rows = max((each.rows for each in self.regions if each.state in ("forward", "backward")), default=0.0)
        dense, experts = self._gradients
        in_experts = self._alive_in_experts
        self.instants.append(Instant(alive, in_experts, dense, experts, has_logits, rows, regions))

    def record_gradient(self, parameter: Tensor, of_experts: bool) -> None:
        """Record that the gradient of a parameter is complete. It stays alive to the end."""
        assert parameter.grad is not None
        storage = self._storages.pop(parameter.grad.untyped_storage()._cdata, None)
        if storage is not None:
            # Counted as a gradient from now on.
            self._add(storage, -storage.size)
            self._ignored.add(parameter.grad.untyped_storage()._cdata)
        self._gradients[of_experts] += parameter.grad.nbytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the passes through all regions."""
        with ExitStack() as stack:
            for region in self.regions:
                for hook in (
                    region.module.register_forward_pre_hook(self._enter(region)),
                    region.module.register_forward_hook(self._leave(region)),
                ):
                    stack.callback(hook.remove)
            yield

    def _enter(self, region: Region) -> Callable[..., None]:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            region.state = "forward"
            region.flops = -self._operations.flops
            region.block = next((each for each in self._active if each.is_block), None)
            self._active.append(region)
            if not region.is_block:
                region.rows = _row_bytes(*arguments)
                self._on_gradient(arguments, lambda: self._end_experts(region))

        return enter

    def _leave(self, region: Region) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, outputs: Any) -> None:
            region.state = "done"
            region.flops += self._operations.flops
            self._active.remove(region)
            for tensor in _tensors(outputs):
                storage = self._storages.get(tensor.untyped_storage()._cdata)
                if storage is not None and region in storage.owners and not storage.is_output:
                    self._own_as_output(storage, region)
            self._on_gradient(outputs, lambda: self._begin_backward(region))

        return leave

    def _own_as_output(self, storage: _Storage, region: Region) -> None:
        """Experts within a block give up their output to the block."""
        self._add(storage, -storage.size)
        if region.is_block:
            storage.is_output = True
        storage.owners = [each for each in storage.owners if (each is region) == region.is_block]
        self._add(storage, storage.size)

    def _on_gradient(self, values: Any, call: Callable[[], None]) -> None:
        for tensor in _tensors(values):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: call())
                return

    def _begin_backward(self, region: Region) -> None:
        for other in self.regions:
            if other.is_block == region.is_block and other.state == "backward":
                other.state = "finished"
        region.state = "backward"
        self._in_experts = not region.is_block

    def _end_experts(self, region: Region) -> None:
        region.state = "finished"
        self._in_experts = False


def _row_bytes(x: Tensor, _: Any, __: Any, row_map: RowMap | None = None) -> float:
    """Return the bytes of the rows that a bank of experts computes."""
    rows = len(x) if row_map is None else len(row_map.token_R)
    return float(rows * x.shape[-1] * x.itemsize)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclass
class PassTrace:
    """The recorded moments of a pass over some samples."""

    recorder: MemoryRecorder
    samples: int
    kinds: Sequence[RepeatedKind]
    logits: float
    """Bytes that a loss in chunks would hold for the logits of all samples."""
    full_chunk: float

    def moments(self, form: Form) -> list[Moment]:
        """Return all moments with the memory of this many samples as their base."""
        found = [self._moment(instant, form) for instant in self.recorder.instants]
        if form == "blocks_recomputed":
            found += self._recomputations()
        return found

    def _moment(self, instant: Instant, form: Form) -> Moment:
        """Return a moment with the blocks that are not traced, and without what is recomputed later."""
        freed = freed_in_experts = 0.0
        for region, sizes in zip(self.recorder.regions, instant.regions, strict=True):
            if sizes.state != "done":
                continue
            if form == "blocks_recomputed" and region.is_block:
                freed += sizes.own
                freed_in_experts += self._own_of_experts(instant, region)
            if form == "experts_recomputed" and not region.is_block:
                freed += sizes.own
                freed_in_experts += sizes.own
        alive = instant.alive - freed
        in_experts = instant.in_experts - freed_in_experts
        gradients, expert_gradients = instant.gradients, instant.expert_gradients
        for kind in self.kinds:
            more, more_in_experts, has_gradients = self._further(kind, instant, form)
            alive += kind.further * more
            in_experts += kind.further * more_in_experts
            gradients += kind.further * kind.gradients * has_gradients
            expert_gradients += kind.further * kind.expert_gradients * has_gradients
        logits = self.logits if instant.has_logits else 0.0
        sizes = (alive - in_experts, 0.0, in_experts, gradients, expert_gradients)
        return Moment(*sizes, logits, instant.rows)

    def _own_of_experts(self, instant: Instant, block: Region) -> float:
        pairs = zip(self.recorder.regions, instant.regions, strict=True)
        return sum(sizes.own for region, sizes in pairs if region.block is block)

    def _further(self, kind: RepeatedKind, instant: Instant, form: Form) -> tuple[float, float, bool]:
        """Return what one block that is not traced holds, in all and in experts, or that it has gradients."""
        state = instant.regions[kind.last].state
        if state == "before":
            return 0.0, 0.0, False
        if state == "finished":
            return 0.0, 0.0, True
        begun = self._begins[kind.last]
        first = begun.regions[kind.first]
        in_experts = self._own_of_experts(begun, self.recorder.regions[kind.first])
        if form == "blocks_recomputed":
            return first.output, 0.0, False
        if form == "experts_recomputed":
            return first.own + first.output - in_experts, 0.0, False
        return first.own + first.output, in_experts, False

    @cached_property
    def _begins(self) -> list[Instant]:
        """The moment at which the backward pass of each region begins; the last one if it has none."""
        found: dict[int, Instant] = {}
        for instant in self.recorder.instants:
            for number, sizes in enumerate(instant.regions):
                if sizes.state == "backward":
                    found.setdefault(number, instant)
        last = self.recorder.instants[-1]
        return [found.get(number, last) for number in range(len(self.recorder.regions))]

    def _recomputations(self) -> Iterator[Moment]:
        """Return the moments of forward passes that are repeated where their backward passes begin."""
        blocks = [number for number, region in enumerate(self.recorder.regions) if region.is_block]
        for number in blocks:
            region = self.recorder.regions[number]
            begun = self._begins[number]
            around = self._moment(begun, "blocks_recomputed")
            own = begun.regions[number].own
            own_in_experts = self._own_of_experts(begun, region)
            for instant in self.recorder.instants:
                if instant.regions[number].state != "forward":
                    continue
                in_experts = self._own_of_experts(instant, region)
                alive = instant.regions[number].own - own
                yield Moment(
                    around.base + alive - in_experts + own_in_experts,
                    0.0,
                    around.expert_base + in_experts - own_in_experts,
                    around.gradients,
                    around.expert_gradients,
                    exchanged=instant.rows,
                )


def pass_memory(small: PassTrace, large: PassTrace) -> PassMemory:
    """Return the lines through two passes over different numbers of samples."""

    def form(name: Form) -> tuple[Moment, ...]:
        return highest(_lines(small, large, name))

    return PassMemory(
        form("saved"),
        form("blocks_recomputed"),
        form("experts_recomputed"),
        _line(_end(small), _end(large), small.samples, large.samples),
        small.full_chunk,
    )


def _end(trace: PassTrace) -> Moment:
    return trace._moment(trace.recorder.instants[-1], "saved")


def _lines(small: PassTrace, large: PassTrace, form: Form) -> list[Moment]:
    less, more = small.moments(form), large.moments(form)
    if len(less) != len(more):
        # Not the same operations: the line through the two peaks.
        less, more = ([max(each, key=_size)] for each in (less, more))
    return [_line(*pair, small=small.samples, large=large.samples) for pair in zip(less, more, strict=True)]


def _size(moment: Moment) -> float:
    return moment.base + moment.expert_base + moment.gradients


def _line(less: Moment, more: Moment, small: int, large: int) -> Moment:
    per_sample = max(0.0, more.base - less.base) / (large - small)
    in_experts = max(0.0, more.expert_base - less.expert_base) / (large - small)
    return Moment(
        base=max(0.0, less.base - small * per_sample),
        per_sample=per_sample + in_experts,
        expert_base=max(0.0, less.expert_base - small * in_experts),
        gradients=more.gradients,
        expert_gradients=more.expert_gradients,
        logits=more.logits / large,
        exchanged=more.exchanged / large,
    )
