"""Traces of deep models: a few of the repeated blocks are traced, and count for all of them.

Blocks whose tensors have the same names and shapes cost the same. A pass with one block of each kind, and one
more pass with a second block of a kind, tell the cost of each further block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from orchestrator.measure.tracing.pass_memory import RepeatedKind
from orchestrator.train.device.recompute import block_lists

_MIN_BLOCKS = 8
"""Fewer blocks are all traced."""

T = TypeVar("T")


@dataclass(frozen=True)
class FewBlocks:
    """A selection of a model's blocks, by number, and how many blocks count as its second of a kind."""

    selected: tuple[int, ...]
    further: int


class RepeatedBlocks:
    """The blocks of a model by kind, and the list that holds them."""

    def __init__(self, container: nn.Module) -> None:
        self._container = container
        self._blocks = list(container.children())
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number, block in enumerate(self._blocks):
            kinds.setdefault(_signature(block), []).append(number)
        self._kinds = list(kinds.values())

    @property
    def one_of_each(self) -> tuple[int, ...]:
        return tuple(numbers[0] for numbers in self._kinds)

    @property
    def pairs(self) -> list[FewBlocks]:
        """For each kind that repeats: one block of every kind, and a second of this kind after its first."""
        pairs: list[FewBlocks] = []
        for kind, numbers in enumerate(self._kinds):
            if len(numbers) > 1:
                selected = (*self.one_of_each[: kind + 1], numbers[1], *self.one_of_each[kind + 1 :])
                pairs.append(FewBlocks(selected, len(numbers) - 1))
        return pairs

    @property
    def first_and_last(self) -> tuple[int, ...]:
        """The first and the last block of each kind."""
        return tuple(sorted({number for numbers in self._kinds for number in (numbers[0], numbers[-1])}))

    def kinds(self, gradient_bytes: Callable[[nn.Module], tuple[float, float]]) -> list[RepeatedKind]:
        """Return the kinds with more than two blocks, with their places among ``first_and_last``."""
        places = {number: place for place, number in enumerate(self.first_and_last)}
        return [
            RepeatedKind(
                places[numbers[0]],
                places[numbers[-1]],
                len(numbers) - 2,
                *gradient_bytes(self._blocks[numbers[0]]),
            )
            for numbers in self._kinds
            if len(numbers) > 2
        ]

    @property
    def pays(self) -> bool:
        """Whether fewer blocks are traced than there are."""
        traced = len(self._kinds) + sum(len(pair.selected) for pair in self.pairs)
        return max(_MIN_BLOCKS, traced + 1) <= len(self._blocks)

    @contextmanager
    def keeping(self, selected: Sequence[int]) -> Iterator[None]:
        """Leave only the selected blocks in the model; raise ValueError unless each runs exactly once."""
        blocks = [self._blocks[number] for number in selected]
        calls = [0] * len(blocks)

        def count(index: int) -> Callable[..., None]:
            def hook(*_: object) -> None:
                calls[index] += 1

            return hook

        hooks = [block.register_forward_pre_hook(count(index)) for index, block in enumerate(blocks)]
        self._fill(blocks)
        try:
            yield
        finally:
            self._fill(self._blocks)
            for hook in hooks:
                hook.remove()
        if set(calls) != {1}:
            raise ValueError(f"the blocks {list(selected)} ran {calls} times; each must run once")

    def _fill(self, blocks: Sequence[nn.Module]) -> None:
        self._container._modules.clear()
        self._container._modules.update({str(index): block for index, block in enumerate(blocks)})


def _signature(block: nn.Module) -> tuple[object, ...]:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return tuple((name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in tensors)


def trace_few_blocks(
    model: nn.Module, trace: Callable[[], T], combine: Callable[[T, list[tuple[T, int]]], T]
) -> T:
    """Return ``trace()`` of the whole model, computed from passes over a few of its blocks where that pays.

    ``combine`` gets the trace with one block of each kind and, for each kind that repeats, the trace with a
    second block of it and the number of its blocks beyond the first. A model that does not run with fewer
    blocks is traced as a whole."""
    repeated = find_repeated(model)
    if repeated is None:
        return trace()
    try:
        with repeated.keeping(repeated.one_of_each):
            base = trace()
        pairs: list[tuple[T, int]] = []
        for pair in repeated.pairs:
            with repeated.keeping(pair.selected):
                pairs.append((trace(), pair.further))
    except Exception:  # the model counts on all of its blocks
        return trace()
    return combine(base, pairs)


def find_repeated(model: nn.Module) -> RepeatedBlocks | None:
    """Return the repeated blocks of a model with one list of them, if it is long enough."""
    lists = block_lists(model)
    if len(lists) != 1:  # lists may belong together, block by block
        return None
    holds_blocks = (module for module in model.modules() if list(module.children()) == lists[0])
    repeated = RepeatedBlocks(next(holds_blocks))
    return repeated if repeated.pays else None
