"""Memory and arithmetic of a training step, estimated from a handful of facts before the model
runs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from experts.copy_costs import held_bytes
from orchestrator.types import MEMORY_PARTS

ShardingForm = Literal["none", "zero2", "zero3", "experts"]

_FP32_BYTES = 4
_COPY_BYTES = 2  # of a weight in bf16
# The backward pass needs the gradient of the largest activation, and half as much again for a copy
# of it in another precision.
_BACKWARD_FACTOR = 1.5
# The token exchange holds a layer's rows to send and to receive, each about as large as the
# largest activation. A token has at most one row for each of its experts, however many hosts there
# are.
_EXCHANGE_FACTOR = 2.0


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a task's model and data, found by tracing the model without computing
    anything."""

    parameters: int
    trainable: int
    expert_parameters: int
    gate_parameters: int
    experts: int
    moe_layers: int
    blocks: int
    flops_per_sample: float
    """FLOP of one forward pass."""
    activation_bytes: float
    """Bytes per sample that are saved for the backward pass."""
    activation_base: float
    """Bytes saved for the backward pass whatever the batch size, such as low-precision copies of
    weights."""
    block_bytes: float
    """The part of ``activation_bytes`` inside repeated blocks."""
    block_input_bytes: float
    """Bytes per sample that remain of ``block_bytes`` when blocks are recomputed: the blocks'
    inputs."""
    largest_bytes: float
    """Bytes per sample of the largest single activation."""
    samples: int | None
    """Training samples; None if only reading them all would tell."""
    validation_samples: int | None
    """None as for ``samples``; 0 without validation data."""
    unit: str
    units_per_sample: int
    gathered_bytes: int | None
    """Size of the training data if it is gathered from memory by the batch; None if it is read by
    the sample."""
    own_optimizer: bool
    method: str
    """How the facts were found, for people."""
    expert_weights: tuple[tuple[int, ...], ...] = ()
    """Parameters of each expert, by MoE layer."""
    frozen_experts: int = 0
    """The part of ``expert_parameters`` that is not trained."""
    settings: tuple[str, ...] = ()
    """Settings of the model, its experts, data and optimizer that the run can take: something reads them."""
    adapters: tuple[tuple[str, int, int], ...] = ()
    """Kinds of layers of a model with adapters: the name, the layers that have adapters, and all layers."""
    limits_capacity: bool = False
    """Whether a MoE layer drops rows beyond a capacity."""
    counts_batches: bool = False
    """Whether the count of the loss is the same for any number of samples."""
    structure: str = ""
    """Hash of the names and shapes of the model's tensors: a checkpoint fits one structure."""
    unsaved: int = 0
    """Parameters that neither checkpoints nor snapshots hold: frozen weights beside adapters, which are in
    the files of their model."""
    weight_bytes: float = 4.0
    """Bytes of a parameter, on average. Frozen weights may have two, others have four."""
    outer_parameters: int = 0
    """Parameters outside the repeated blocks, those of embeddings and of the output."""
    moments: float = 2.0
    """Tensors of the optimizer's state for each trained parameter: AdamW has two."""
    averages: float = 0.0
    """Averages of the weights (EMA) for each trained parameter."""
    expert_bytes: float = 0.0
    """The part of ``activation_bytes`` inside experts, without their inputs."""
    expert_input_bytes: float = 0.0
    """Bytes per sample of inputs of experts that are saved only if the experts are recomputed."""
    expert_base: float = 0.0
    """The part of ``activation_base`` inside experts: copies of their weights for one pass."""
    recomputes_experts: bool = False
    """Whether experts are recomputed in the backward pass, where blocks are not."""
    large_experts: int = 0
    """Trained parameters in stacks of experts that are large enough for a kept copy in bf16."""
    copied_experts: int = 0
    """The part of them that has a kept copy in this run."""
    data: str = ""
    """Hash of the first training samples, if the data is in memory: data read by the sample may
    differ from one read to the next."""
    loader_batch: int | None = None
    """The batch size of the user's DataLoader, if the data is one."""
    loader_processes: int | None = None
    """The processes of the user's DataLoader, if the data is one."""
    fp8_obstacle: str = ""
    """Why the experts cannot compute in fp8; empty if they can."""
    has_data_tasks: bool = False
    """Whether tasks of the cluster compute the data while it is read."""

    @property
    def trained_experts(self) -> int:
        """The part of ``expert_parameters`` that is trained."""
        return max(0, min(self.trainable, self.expert_parameters - self.frozen_experts))

    @property
    def expert_state_bytes(self) -> float:
        """Bytes for each parameter of an expert: the weight and, if it is trained, its gradient, the
        optimizer's state and averages."""
        trained_share = self.trained_experts / max(1, self.expert_parameters)
        return self.weight_bytes + _FP32_BYTES * (1 + self.moments + self.averages) * trained_share

    def at_most(self, samples: int) -> int:
        """Return a number of samples, cut to those that the data is known to have."""
        return samples if self.samples is None else min(samples, self.samples)


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes of a training step on one device, by purpose. ``limit`` is the number that
    may be used."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gate: float
    limit: float | None
    weight_copies: float = 0.0
    average: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part that a plan estimates."""
        return {name: getattr(self, name) for name in MEMORY_PARTS if hasattr(self, name)}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    def to_json(self) -> dict[str, Any]:
        return self.parts | {"limit": self.limit, "total": self.total}


@dataclass(frozen=True)
class ModelSharding:
    """How the workers' devices divide a model's state.

    ``none``: a whole copy on each. ``zero2``: gradients and moments are sharded. ``zero3``:
    parameters too. ``experts``: each device has its own experts and a copy of the rest, the dense
    part, or a shard of it (``dense``). ``offload`` keeps the shards in host memory. ``primary`` gives
    the whole batch to the first worker. ``expert_replicas`` groups of workers each hold every expert;
    ``copies`` says that experts have copies, or may get some.
    """

    workers: int = 1
    form: ShardingForm = "none"
    offload: bool = False
    primary: bool = False
    expert_replicas: int = 1
    copies: bool = False
    dense: ShardingForm = "none"

    @property
    def data_ranks(self) -> int:
        """Workers that hold a share of the batch."""
        return 1 if self.primary else self.workers


def estimate_memory(
    facts: ModelFacts,
    micro_batch: int,
    recompute: bool,
    limit_bytes: float | None,
    sharding: ModelSharding | None = None,
    single_pass: bool = False,
) -> MemoryEstimate:
    """Return the memory that a step needs on each worker's device.

    It holds weights, gradients, the optimizer's state, and the activations of a micro-batch. Recomputed
    blocks, or experts, keep their inputs, and the activations of one block, or layer, at a time. Without
    ``sharding`` the device holds everything. ``single_pass`` says that a step is one micro-batch: the
    gradients of copied weights then have the type of the copies, all others are fp32.
    """
    sharding = sharding or ModelSharding()
    per_sample = facts.activation_bytes + _BACKWARD_FACTOR * facts.largest_bytes
    weight_copies = weight_copy_bytes(facts.copied_experts)
    # A kept copy takes the place of the copy of a pass.
    expert_base = max(0.0, facts.expert_base - weight_copies)
    base = facts.activation_base - facts.expert_base
    if recompute and facts.blocks:
        per_sample += facts.block_input_bytes + facts.block_bytes * (1 / facts.blocks - 1)
        base = (base + expert_base) / facts.blocks
    elif facts.recomputes_experts and not recompute and facts.moe_layers:
        per_sample += facts.expert_input_bytes + facts.expert_bytes * (1 / facts.moe_layers - 1)
        base += expert_base / facts.moe_layers
    else:
        base += expert_base
    if sharding.form == "experts" and sharding.workers > 1:
        per_sample += _EXCHANGE_FACTOR * facts.largest_bytes
        # Low-precision copies of weights, for the most part: those of remote experts are elsewhere.
        base *= _local_parameters(facts, sharding, facts.parameters, 0)[0].of(1.0) / max(1, facts.parameters)
    gate_trainable = min(facts.trainable, facts.gate_parameters)
    dense = _StateShares.of(sharding, facts)
    parameters, trainable = _local_parameters(
        facts, sharding, facts.parameters - facts.gate_parameters, facts.trainable - gate_trainable
    )
    gate_state = gate_trainable * (dense.gradients + (facts.moments + facts.averages) * dense.moments)
    short_gradients = saved_gradient_bytes(facts.copied_experts) if single_pass else 0.0
    activations = base + per_sample * micro_batch
    if sharding.copies:
        # Gradients of copies are summed after the backward pass, which has freed its activations.
        activations = max(activations, held_bytes(_FP32_BYTES * trainable.experts))
    return MemoryEstimate(
        parameters=parameters.of(dense.parameters) * facts.weight_bytes,
        weight_copies=weight_copies,
        gradients=trainable.of(dense.gradients) * _FP32_BYTES - short_gradients,
        optimizer=trainable.of(dense.moments) * _FP32_BYTES * facts.moments,
        average=trainable.of(dense.moments) * _FP32_BYTES * facts.averages,
        activations=activations,
        gate=facts.gate_parameters * facts.weight_bytes * dense.parameters + gate_state * _FP32_BYTES,
        limit=limit_bytes,
    )


def weight_copy_bytes(copied: int) -> float:
    """Return the bytes of the kept copies of so many parameters in bf16."""
    return float(_COPY_BYTES * copied)


def saved_gradient_bytes(copied: int) -> float:
    """Return the bytes that gradients of the copies' type save in a step of one pass; several passes are
    summed in fp32."""
    return float((_FP32_BYTES - _COPY_BYTES) * copied)


@dataclass(frozen=True)
class _LocalParameters:
    """The parameters that a device holds: those of which it may have a share, and whole experts."""

    dense: float
    experts: float

    def of(self, dense_share: float) -> float:
        return self.dense * dense_share + self.experts


def _local_parameters(
    facts: ModelFacts, sharding: ModelSharding, parameters: int, trainable: int
) -> tuple[_LocalParameters, _LocalParameters]:
    """Return the parameters, and the trainable ones, that a device holds a part of: all but remote
    experts.

    The host with the most experts sets the number.
    """
    if sharding.form != "experts" or not facts.experts:
        return _LocalParameters(parameters, 0.0), _LocalParameters(trainable, 0.0)
    expert_parameters = min(facts.expert_parameters, parameters)
    dense_parameters = parameters - expert_parameters
    hosts_of_group = max(1, sharding.workers // sharding.expert_replicas)
    share = -(-facts.experts // hosts_of_group) / facts.experts
    trained_experts = min(facts.trained_experts, trainable)
    return (
        _LocalParameters(dense_parameters, expert_parameters * share),
        _LocalParameters(trainable - trained_experts, trained_experts * share),
    )


@dataclass(frozen=True)
class _StateShares:
    """Fractions of the parameters, the gradients and each moment that a worker's device holds."""

    parameters: float
    gradients: float
    moments: float

    @classmethod
    def of(cls, sharding: ModelSharding, facts: ModelFacts) -> _StateShares:
        """Return the shares of the model, or of its dense part, under a sharding.

        A sharded worker gathers the parameters it computes with in addition to its own shard: all
        of them until the backward pass is over (zero2), or a block at a time and those outside the
        blocks (zero3). The gradients of both are whole until they are reduced and scattered.
        """
        on_hosts = sharding.form == "experts"
        form = sharding.dense if on_hosts else sharding.form
        if form in ("none", "experts"):
            return cls(1.0, 1.0, 1.0)
        shard = 0.0 if sharding.offload else 1 / sharding.workers
        divided = facts.parameters - (facts.expert_parameters if on_hosts else 0)
        outer = min(1.0, facts.outer_parameters / max(1, divided))
        whole = outer + (1 - outer) / max(1, facts.blocks)
        gathered = 1.0 if form == "zero2" else whole
        return cls(shard + gathered, shard + whole, shard)


def flops_per_step(facts: ModelFacts, global_batch: int, recompute: bool) -> float:
    """Return the FLOP of a step: a backward pass costs two forward passes, recomputation costs one
    more."""
    return facts.flops_per_sample * global_batch * (4 if recompute else 3)


def largest_fitting(estimate: Callable[[int], MemoryEstimate], max_micro_batch: int) -> int:
    """Return the largest micro-batch up to ``max_micro_batch`` whose estimate fits; 0 if one
    sample does not."""
    # First: one micro-batch with all samples of a step may need less than one with fewer.
    if max_micro_batch > 0 and estimate(max_micro_batch).fits:
        return max_micro_batch
    fits = 0
    too_large = max(1, max_micro_batch)
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if estimate(middle).fits:
            fits = middle
        else:
            too_large = middle
    return fits
