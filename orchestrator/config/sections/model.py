"""Settings of the built-in tasks' models: names and sizes, and their mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.config.sections.checks import at_least, positive

ExpertKind = Literal["swiglu", "ffn"]
GateScores = Literal["softmax", "sigmoid"]
FrozenWeights = Literal["auto", "nf4", "int8"]


@dataclass(frozen=True)
class ModelSettings:
    """The model of the task lm, and the sizes of the other built-in tasks' models. Without a value, the
    task's own default holds."""

    model: str | None = None
    """Model of transformers for the task lm: a folder with config.json and safetensors files, or the
    id of a model on the Hugging Face hub."""
    from_scratch: bool = False
    """Random weights for the configuration of --model, in place of its own."""
    lora: int | None = None
    """Train adapters of this rank (LoRA, try 16) in place of the weights of --model, which stay as they
    are: on its experts, and on all linear layers but routers and the output."""
    lora_alpha: float | None = None
    """Weight of the adapters: their products are multiplied by this number over the rank. Default: twice
    the rank."""
    lora_targets: tuple[str, ...] = ()
    """Where adapters are: names of linear layers (q_proj), of the experts' parameters
    (experts.down_proj), or experts, attention, all-linear. Default: experts and all-linear."""
    lora_dropout: float = 0.0
    """Share of the inputs of adapters on linear layers that is dropped in training; adapters on experts have
    no dropout. The same on any number of workers."""
    frozen_weights: FrozenWeights = "auto"
    """Form of the weights that adapters leave frozen, those of experts and linear layers: auto (the type of
    --precision), nf4 (4 bits, QLoRA) or int8. They are quantised while they are read."""
    width: int | None = None
    """Width of the model (features per token)."""
    layers: int | None = None
    """Number of blocks."""
    sequence_length: int | None = None
    """Tokens per sample. Default for lm: 2048, or what the model can at most."""
    vocabulary: int | None = None
    """Number of distinct tokens of the synthetic task."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "vocabulary"):
            at_least(name, getattr(self, name), 1)
        at_least("sequence_length", self.sequence_length, 0)
        if self.from_scratch and self.model is None:
            raise ValueError("from_scratch needs a configuration to build: give --model FOLDER as well")
        at_least("lora", self.lora, 1)
        positive("lora_alpha", self.lora_alpha)
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be at least 0 and below 1")
        given = [name for name in ("lora_alpha", "lora_targets", "lora_dropout") if getattr(self, name)]
        if self.lora is None and given:
            raise ValueError(
                f"{given[0]} is given without lora, the rank of adapters; give --lora 16 as well"
            )
        if self.lora is None and self.frozen_weights != "auto":
            raise ValueError(
                f"frozen_weights is {self.frozen_weights}, but without lora no weights are frozen; give "
                "--lora 16 as well, or leave it out"
            )


@dataclass(frozen=True)
class MoeSettings:
    """The mixture-of-experts layers of these models: the experts, and the gate that routes tokens to them."""

    experts: int | None = None
    """Experts per MoE layer; 0 gives a dense model."""
    expert_hidden_size: tuple[int, ...] = ()
    """Hidden size of the experts: one number for all, or one per expert."""
    expert_kind: ExpertKind = "swiglu"
    """Architecture of an expert: swiglu, gated by a third matrix, or ffn, two matrices with GELU
    between them."""
    shared_expert_size: int | None = None
    """Hidden size of an expert that sees every token, in addition to the routed ones. Default:
    no such expert."""
    top_k: int | None = None
    """Experts per token."""
    gate_scores: GateScores = "softmax"
    """How the gate scores experts: softmax over all of them, or sigmoid of each."""
    normalise_weights: bool = True
    """Scale the weights of a token's experts to a sum of one; not with --top-k 1, where the gate
    would get no gradient."""
    gate_jitter: float = 0.0
    """In training, the gate's input is multiplied by uniform noise of 1 ± this value; below 1."""
    balance_loss: float | None = None
    """Weight of the loss that balances the use of the experts. Default: 0.01; for lm that of the
    model's configuration."""
    balance_bias: float = 0.0
    """Balancing without a loss: change of an expert's routing bias after each optimizer step; try 0.001."""
    z_loss: float = 0.0
    """Weight of the loss that keeps gate scores small."""
    capacity_factor: float | None = None
    """Most rows of a micro-batch for one expert, as a multiple of the even share. The rest is
    dropped: later choices first, then later tokens. Several workers must be expert-parallel.
    Default: nothing is dropped."""

    def __post_init__(self) -> None:
        at_least("experts", self.experts, 0)
        for size in self.expert_hidden_size:
            at_least("expert_hidden_size", size, 1)
        for name in ("top_k", "shared_expert_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("balance_loss", "balance_bias", "z_loss"):
            at_least(name, getattr(self, name), 0)
        positive("capacity_factor", self.capacity_factor)
        if not 0 <= self.gate_jitter < 1:
            raise ValueError(f"gate_jitter is {self.gate_jitter}; it must be at least 0 and below 1")
        if self.experts and len(self.expert_hidden_size) not in (0, 1, self.experts):
            raise ValueError(
                f"expert_hidden_size has {len(self.expert_hidden_size)} sizes for {self.experts} experts; "
                "give one size, or one per expert"
            )
        if self.experts and self.top_k and self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k} but there are only {self.experts} experts; "
                "lower --top-k or raise --experts"
            )
        if self.experts == 0 and self.shared_expert_size:
            raise ValueError(
                f"shared_expert_size is {self.shared_expert_size}, an expert in addition to routed ones, "
                "but experts is 0, a dense model; leave one of them out"
            )
