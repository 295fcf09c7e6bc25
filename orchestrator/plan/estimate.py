"""What a model needs, before it runs: memory and arithmetic from a handful of facts. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

_FP32 = 4
_ADAM_SLOTS = 2
_BACKWARD_ROOM = 1.5
_EXCHANGE_ROOM = (
    2.0  # a layer's rows on their way out and back, each about as large as the largest activation
)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a task's model and data, measured by tracing it without computing anything."""

    parameters: int
    trainable: int
    expert_parameters: int
    gate_parameters: int
    experts: int
    moe_layers: int
    blocks: int
    flops_per_sample: float
    """Of one forward pass."""
    activation_bytes: float
    """Kept for the backward pass, per sample."""
    activation_base: float
    """Kept for the backward pass whatever the batch (low-precision copies of weights, for one)."""
    block_bytes: float
    """Of the activations per sample, those inside repeated blocks."""
    block_input_bytes: float
    """What remains of these per sample when blocks are recomputed: their inputs."""
    largest_bytes: float
    """The largest single activation per sample."""
    samples: int
    validation_samples: int
    unit: str
    units_per_sample: int
    gathered_bytes: int | None
    """Size of the training data when it is handed out batch by batch from memory; None when read sample by sample."""
    own_optimizer: bool
    method: str
    """How the facts were found, for people."""
    expert_weights: tuple[tuple[int, ...], ...] = ()
    """Parameters of each expert, by MoE layer."""


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of the memory of a training step, split by what it is for."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gate: float
    limit: float | None

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.gate

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total}


ShardingForm = Literal["none", "zero2", "zero3", "experts"]


@dataclass(frozen=True)
class ModelSharding:
    """How a model's state lies on the workers' devices: whole on each (none), gradients and moments divided (zero2), parameters
    too (zero3), or the experts shared out and the rest whole (experts). ``offload`` keeps shards in host memory; ``primary``
    leaves the whole batch to the first worker."""

    workers: int = 1
    form: ShardingForm = "none"
    offload: bool = False
    primary: bool = False

    @property
    def data_ranks(self) -> int:
        """Workers that hold a share of the batch."""
        return 1 if self.primary else self.workers


def estimate_memory(
    facts: ModelFacts,
    micro_batch: int,
    recompute: bool,
    limit: float | None,
    spread: ModelSharding | None = None,
) -> MemoryEstimate:
    """What a step needs on each worker's device: fp32 weights and gradients, two Adam moments, and the activations of a
    micro-batch, with room for the gradient of the largest one and a copy of it in another precision. Recomputed blocks keep
    their inputs, and all of one block at a time. ``spread`` says what of this each worker has; without it, everything."""
    spread = spread or ModelSharding()
    per_sample, base = facts.activation_bytes + _BACKWARD_ROOM * facts.largest_bytes, facts.activation_base
    if recompute and facts.blocks:
        per_sample += facts.block_input_bytes + facts.block_bytes * (1 / facts.blocks - 1)
        base /= facts.blocks
    if spread.form == "experts" and spread.workers > 1:
        per_sample += _EXCHANGE_ROOM * facts.largest_bytes
    gate_trained = min(facts.trainable, facts.gate_parameters)
    held = _StateShares.of(spread, facts.blocks)
    present, trained = _here(
        facts, spread, facts.parameters - facts.gate_parameters, facts.trainable - gate_trained
    )
    gate = facts.gate_parameters * held.parameters + gate_trained * (
        held.gradients + _ADAM_SLOTS * held.moments
    )
    return MemoryEstimate(
        parameters=present * _FP32 * held.parameters,
        gradients=trained * _FP32 * held.gradients,
        optimizer=trained * _FP32 * _ADAM_SLOTS * held.moments,
        activations=base + per_sample * micro_batch,
        gate=gate * _FP32,
        limit=limit,
    )


def _here(facts: ModelFacts, spread: ModelSharding, parameters: int, trained: int) -> tuple[float, float]:
    """Parameters, and those of them that are trained, of which a worker's device has anything: all but the experts that live
    elsewhere. The host with the most experts sets the measure; frozen ones are taken to be among the experts."""
    if spread.form != "experts" or not facts.experts:
        return parameters, trained
    experts = min(facts.expert_parameters, parameters)
    dense = parameters - experts
    share = -(-facts.experts // spread.workers) / facts.experts
    return dense + experts * share, min(trained, dense) + max(0, trained - dense) * share


@dataclass(frozen=True)
class _StateShares:
    """How many times over a worker's device holds the parameters, their gradients and each moment."""

    parameters: float
    gradients: float
    moments: float

    @classmethod
    def of(cls, spread: ModelSharding, blocks: int) -> _StateShares:
        """Sharded, what a worker computes with is gathered beside its own shard: everything until the backward pass is over
        (zero2), or a block at a time (zero3); and a block's gradients are whole until they are handed to their keepers."""
        if spread.form in ("none", "experts"):
            return cls(1.0, 1.0, 1.0)
        shard, block = 0.0 if spread.offload else 1 / spread.workers, 1 / max(1, blocks)
        return cls(shard + (1.0 if spread.form == "zero2" else block), shard + block, shard)


def flops_per_step(facts: ModelFacts, global_batch: int, recompute: bool) -> float:
    """A backward pass costs two forward passes; recomputation one more."""
    return facts.flops_per_sample * global_batch * (4 if recompute else 3)


def largest_fitting(
    facts: ModelFacts, most: int, recompute: bool, limit: float | None, spread: ModelSharding | None = None
) -> int:
    """The largest micro-batch up to ``most`` whose estimate fits; 0 when not even one sample does."""
    fitting, refused = 0, most + 1
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        if estimate_memory(facts, middle, recompute, limit, spread).fits:
            fitting = middle
        else:
            refused = middle
    return fitting
