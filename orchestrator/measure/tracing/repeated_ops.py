"""The operations and the memory of all repeated blocks, from passes over a few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.measure.tracing.op_recorder import MemoryPeaks
from orchestrator.plan.cost.ops import MicroBatchOps

_OPS = ("products", "attentions", "moves", "messages")
_COUNTS = ("operations", "launches", "sorts", "views")


@dataclass(frozen=True)
class TracedOps:
    """The operations of one pass, and its memory."""

    ops: MicroBatchOps
    memory: MemoryPeaks


def all_blocks(base: TracedOps, pairs: list[tuple[TracedOps, int]], gradient_bytes: float) -> TracedOps:
    """Return the pass over all blocks; see ``trace_few_blocks``. ``gradient_bytes`` are those of all blocks.

    A backward pass begins with the activations of all blocks, and ends with all their gradients. In
    between, what is alive grows or falls evenly, so the larger of the two is the peak."""
    ops = _add_up(base.ops, [(pair.ops, further) for pair, further in pairs])
    begin = base.memory.whole
    without_gradients = base.memory.without_gradients
    for pair, further in pairs:
        begin += further * (pair.memory.whole - base.memory.whole)
        without_gradients += further * (pair.memory.without_gradients - base.memory.without_gradients)
    end = gradient_bytes + max([base.memory.last, *(pair.memory.last for pair, _ in pairs)])
    memory = MemoryPeaks(begin, without_gradients, end - gradient_bytes)
    return TracedOps(replace(ops, peak_bytes=max(begin, end)), memory)


def _add_up(base: MicroBatchOps, pairs: Sequence[tuple[MicroBatchOps, int]]) -> MicroBatchOps:
    """Return ``base`` plus, for each pair, what the pair has more, as often as its number says."""
    changes: dict[str, Any] = {}
    for name in _OPS:
        counts = _times(getattr(base, name))
        total = Counter(counts)
        for ops, further in pairs:
            more = _times(getattr(ops, name))
            more.subtract(counts)
            for op, times in more.items():
                total[op] += further * times
        changes[name] = tuple(replace(op, times=times) for op, times in total.items() if times > 0)
    for name in _COUNTS:
        one = getattr(base, name)
        changes[name] = one + sum(further * (getattr(ops, name) - one) for ops, further in pairs)
    if base.before_wait is not None:
        waits = [(ops.before_wait or base.before_wait, further) for ops, further in pairs]
        changes["before_wait"] = _add_up(base.before_wait, waits)
    return replace(base, **changes)


def _times(ops: Sequence[Any]) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for op in ops:
        counts[replace(op, times=1)] += op.times
    return counts
