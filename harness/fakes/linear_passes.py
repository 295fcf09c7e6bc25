"""Passes of an invented model, whose memory grows evenly with the samples."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.plan.estimate import PassForm, PassMemory
from orchestrator.plan.ops import MicroBatchOps
from orchestrator.types import KIB, MIB


@dataclass(frozen=True)
class LinearPasses:
    """A pass holds ``base`` and so many bytes per sample: other ones where it recomputes blocks, or experts,
    and ``exchanged`` more on several hosts. Gradients take no memory beside it."""

    per_sample: float = float(MIB)
    recomputed: float = 304.0 * KIB
    experts_recomputed: float = 640.0 * KIB
    exchanged: float = 32.0 * KIB
    base: float = 64.0 * KIB

    def memory(self, samples: int, form: PassForm) -> PassMemory:
        per_sample = self.experts_recomputed if form.recompute_experts else self.per_sample
        if form.recompute:
            per_sample = self.recomputed
        if form.hosts > 1:
            per_sample += self.exchanged
        needed = self.base + samples * per_sample
        return PassMemory(needed, needed)

    def trace(self, samples: int, form: PassForm, grouped: bool = True, chunks: int = 1) -> MicroBatchOps:
        raise NotImplementedError("an invented model has no operations")
