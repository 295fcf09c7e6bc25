"""Memory and arithmetic of a training step, estimated from a handful of facts before the model
runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from experts.copy_costs import held_bytes
from orchestrator.plan.pass_memory import Moment, PassMemory
from orchestrator.types import MEMORY_PARTS, MIB

ShardingForm = Literal["none", "zero2", "zero3", "experts"]

_FP32_BYTES = 4
_COPY_BYTES = 2  # of a weight in bf16
_BUCKET_BYTES = 25 * MIB
"""Of the gradients that workers reduce together."""
# A token has at most one row for each of its experts, however many hosts there are.
_EXCHANGE_FACTOR = 2.0


@dataclass(frozen=True)
class TrainedTensors:
    """The shapes of trained tensors, of the dense part or of stacks of experts, and how often each occurs."""

    shapes: tuple[tuple[tuple[int, ...], int], ...] = ()

    def most(self, numbers: Callable[[tuple[int, ...]], float]) -> float:
        """Return the most numbers of a tensor: an update holds copies of one at a time."""
        return max((numbers(shape) for shape, _ in self.shapes), default=0.0)

    def sum(self, numbers: Callable[[tuple[int, ...]], float]) -> float:
        return sum(times * numbers(shape) for shape, times in self.shapes)


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
    passes: PassMemory = field(default_factory=PassMemory)
    """What is alive in forward and backward passes."""
    dense_tensors: TrainedTensors = field(default_factory=TrainedTensors)
    expert_tensors: TrainedTensors = field(default_factory=TrainedTensors)
    adamw_parameters: int = 0
    """Trained parameters that Muon leaves to AdamW: embeddings, and all that is no matrix."""
    update_bytes: float = 0.0
    """Bytes beside state and gradients while the optimizer updates the weights, of the dense part."""
    expert_update_bytes: float = 0.0
    """The same while it updates a stack of experts."""
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
    """Bytes of a parameter, on average. Frozen weights may have two or a half, others have four."""
    packed_expert_bytes: float | None = None
    """Bytes of a parameter of experts, on average, where they are in 4 or 8 bits; None if they are not."""
    unpacked_bytes: float = 0.0
    """Bytes of the largest matrix in 4 or 8 bits while it is computed with."""
    widened_bytes: float = 0.0
    """Bytes that a parameter takes more where shards are gathered: those in bf16 are gathered as fp32."""
    gradient_bytes: float = 4.0
    """Bytes of the gradient of a trained parameter: exact sums are integers of eight."""
    outer_parameters: int = 0
    """Parameters outside the repeated blocks, those of embeddings and of the output."""
    moments: float = 2.0
    """Tensors of the optimizer's state for each trained parameter: AdamW has two."""
    averages: float = 0.0
    """Averages of the weights (EMA) for each trained parameter."""
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
    changed_buffer: str = ""
    """The first buffer of the model's state that a forward pass changes, by name; empty without any."""
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
        state = self.gradient_bytes + _FP32_BYTES * (self.moments + self.averages)
        return self.expert_weight_bytes + state * trained_share

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of a parameter of experts, on average."""
        return self.weight_bytes if self.packed_expert_bytes is None else self.packed_expert_bytes

    @property
    def dense_weight_bytes(self) -> float:
        """Bytes of a parameter outside of experts, on average."""
        dense = self.parameters - self.expert_parameters
        if self.packed_expert_bytes is None or not dense:
            return self.weight_bytes
        return (
            self.weight_bytes * self.parameters - self.packed_expert_bytes * self.expert_parameters
        ) / dense

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
    ``copies`` says that experts have copies, or may get some, ``gradient_copies`` that whole models sum
    copies of all gradients at once.
    """

    workers: int = 1
    form: ShardingForm = "none"
    offload: bool = False
    primary: bool = False
    expert_replicas: int = 1
    copies: bool = False
    dense: ShardingForm = "none"
    gradient_copies: bool = False

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
    gate_trainable = min(facts.trainable, facts.gate_parameters)
    dense = _StateShares.of(sharding, facts)
    parameters, trainable = _local_parameters(
        facts, sharding, facts.parameters - facts.gate_parameters, facts.trainable - gate_trainable
    )
    gates = _StateShares.of_gates(sharding, facts)
    gate_moments = _FP32_BYTES * (facts.moments + facts.averages) * gates.moments
    gate_state = gate_trainable * (facts.gradient_bytes * gates.gradients + gate_moments)
    is_short = single_pass and facts.gradient_bytes == _FP32_BYTES
    short_gradients = saved_gradient_bytes(facts.copied_experts) if is_short else 0.0
    gradients = trainable.of(dense.gradients) * facts.gradient_bytes - short_gradients
    gate_gradients = gate_trainable * facts.gradient_bytes * gates.gradients
    expert_share = _expert_share(facts, sharding)
    trained_experts = trainable.experts or dense.gradients * min(facts.trained_experts, trainable.dense)
    expert_gradients = facts.gradient_bytes * trained_experts - short_gradients
    peak = StepPeak(
        facts.passes,
        micro_batch,
        sharding,
        dense_gradients=gradients + gate_gradients - expert_gradients,
        expert_gradients=expert_gradients,
        expert_share=expert_share,
        starts_empty=is_short,
    )
    form = facts.passes.form(recompute and facts.blocks > 0, facts.recomputes_experts)
    moments = [_without_copies(facts, moment, form is facts.passes.saved) for moment in form]
    activations = max(peak.of_passes(moments), peak.of_sums(), peak.of_update(facts)) + facts.unpacked_bytes
    is_divided = bool(parameters.experts)
    dense_bytes = facts.dense_weight_bytes if is_divided else facts.weight_bytes
    return MemoryEstimate(
        parameters=parameters.dense * (dense.parameters * dense_bytes + dense.gathered * facts.widened_bytes)
        + parameters.experts * facts.expert_weight_bytes,
        weight_copies=expert_share * weight_copy_bytes(facts.copied_experts),
        gradients=gradients,
        optimizer=trainable.of(dense.moments) * _FP32_BYTES * facts.moments,
        average=trainable.of(dense.moments) * _FP32_BYTES * facts.averages,
        activations=activations,
        gate=facts.gate_parameters * facts.weight_bytes * gates.parameters + gate_state,
        limit=limit_bytes,
    )


@dataclass(frozen=True)
class StepPeak:
    """Bytes at the peaks of a step, beside the state and the gradients of all parameters."""

    passes: PassMemory
    samples: int
    sharding: ModelSharding
    dense_gradients: float
    expert_gradients: float
    expert_share: float
    starts_empty: bool
    """Whether a pass begins without gradients: it is the only one of a step."""

    def of_passes(self, moments: Iterable[Moment]) -> float:
        """Return the peak of forward and backward passes."""
        return max(self._at(moment) for moment in moments)

    def _at(self, moment: Moment) -> float:
        alive = self.passes.alive(moment, self.samples, self.expert_share)
        if self.sharding.form == "experts" and self.sharding.workers > 1:
            alive += _EXCHANGE_FACTOR * moment.exchanged * self.samples
        is_replicated = self.sharding.form == "none" and self.sharding.workers > 1
        if not self.starts_empty or is_replicated or "zero" in self.sharding.form:
            return alive
        end = self.passes.end
        dense = _share(moment.gradients, end.gradients) * self.dense_gradients
        experts = _share(moment.expert_gradients, end.expert_gradients) * self.expert_gradients
        return alive + dense + experts - self.dense_gradients - self.expert_gradients

    def of_sums(self) -> float:
        """Return the bytes of copies in which gradients are summed over the workers."""
        sharding = self.sharding
        if sharding.workers == 1:
            return 0.0
        at_end = self.passes.alive(self.passes.end, self.samples)
        if sharding.form == "none":
            gradients = self.dense_gradients + self.expert_gradients
            return at_end + (gradients if sharding.gradient_copies else min(_BUCKET_BYTES, gradients))
        if sharding.form != "experts":
            return at_end
        copies = held_bytes(self.expert_gradients) if sharding.copies else 0.0
        return at_end + max(copies, self.dense_gradients if sharding.dense == "none" else 0.0)

    def of_update(self, facts: ModelFacts) -> float:
        """Return the bytes that the optimizer takes for the largest tensor."""
        largest = max(facts.update_bytes, self.expert_share * facts.expert_update_bytes)
        return self.passes.alive(self.passes.end, self.samples) + largest


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
    share = _expert_share(facts, sharding)
    trained_experts = min(facts.trained_experts, trainable)
    return (
        _LocalParameters(dense_parameters, expert_parameters * share),
        _LocalParameters(trainable - trained_experts, trained_experts * share),
    )


def _expert_share(facts: ModelFacts, sharding: ModelSharding) -> float:
    """Return the part of all experts on the host with the most."""
    if sharding.form != "experts" or not facts.experts:
        return 1.0
    hosts_of_group = max(1, sharding.workers // sharding.expert_replicas)
    return -(-facts.experts // hosts_of_group) / facts.experts


def _without_copies(facts: ModelFacts, moment: Moment, saved: bool) -> Moment:
    """Return a moment without casts of those weights that have a kept copy: of all layers, or of one."""
    casts = weight_copy_bytes(facts.copied_experts) / (1 if saved else max(1, facts.moe_layers))
    return moment._replace(expert_base=max(0.0, moment.expert_base - casts))


@dataclass(frozen=True)
class _StateShares:
    """Fractions of the parameters, the gradients and each moment that a worker's device holds."""

    parameters: float
    gradients: float
    moments: float
    gathered: float = 0.0
    """The part of ``parameters`` that is gathered from the shards of all workers."""

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
        return cls(shard + gathered, shard + whole, shard, gathered)

    @classmethod
    def of_gates(cls, sharding: ModelSharding, facts: ModelFacts) -> _StateShares:
        """Return the shares of the gates: expert hosts keep them whole."""
        return cls(1.0, 1.0, 1.0) if sharding.form == "experts" else cls.of(sharding, facts)


def flops_per_step(facts: ModelFacts, global_batch: int, recompute: bool) -> float:
    """Return the FLOP of a step: a backward pass costs two forward passes, recomputation costs one
    more."""
    return facts.flops_per_sample * global_batch * (4 if recompute else 3)


def largest_fitting(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size up to ``most`` that fits, of a micro-batch or a sequence; 0 if 1 does not."""
    # First: one micro-batch with all samples of a step may need less than one with fewer.
    if most > 0 and fits(most):
        return most
    fitting = 0
    too_large = max(1, most)
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
    return fitting
