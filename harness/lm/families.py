"""Tiny random models of the families of ``transformers`` that have experts.

Their real classes, with 7 experts, 2 layers and widths of some tens; the weights come from a seed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from experts.kernels.packed import PackedForm
from experts.transformers.balance import use_balance_bias
from experts.transformers.registration import expert_loads, use
from orchestrator.tasks.task import Loss, Task, TensorData

VOCABULARY = 31
TOKENS = 6
EXPERTS = 7
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT_ATTENTION: Mapping[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
SIGMOID_ROUTER: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Family:
    """A family by its class in ``transformers``, and the sizes of its tiny model."""

    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "Mixtral": Family("Mixtral", {"num_local_experts": EXPERTS}),
    "Qwen2-MoE": Family(
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 10},
    ),
    "Qwen3-MoE": Family(
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 6, "head_dim": 8, "norm_topk_prob": True},
    ),
    "Qwen3-Next": Family(
        "Qwen3Next",
        {
            "num_experts": EXPERTS,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 10,
            "head_dim": 8,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "OLMoE": Family("Olmoe", {"num_experts": EXPERTS}),
    "DeepSeek-V2": Family(
        "DeepseekV2",
        {
            **LATENT_ATTENTION,
            **SIGMOID_ROUTER,
            "n_routed_experts": EXPERTS,
            "n_group": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
        },
    ),
    "DeepSeek-V3": Family("DeepseekV3", {**LATENT_ATTENTION, **SIGMOID_ROUTER}),
    "GLM-4 MoE": Family("Glm4Moe", {**SIGMOID_ROUTER, "head_dim": 8}),
    "GPT-OSS": Family(
        "GptOss",
        {
            "num_local_experts": EXPERTS,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 0.05,
        },
    ),
    "Granite-MoE": Family("GraniteMoe", {"num_local_experts": EXPERTS}),
    "MiniMax-M2": Family("MiniMaxM2", {"num_local_experts": EXPERTS, "head_dim": 8}),
}


BIASED_FAMILIES = ("DeepSeek-V3", "GLM-4 MoE", "MiniMax-M2")
"""Families whose routers have a bias for the choice of experts."""


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the eager model of a family, with decided routers and biases that are not zero."""
    import transformers

    family = FAMILIES[name]
    sizes = {**COMMON, **family.sizes, "experts_implementation": "eager", "attn_implementation": "eager"}
    config = getattr(transformers, f"{family.model}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"{family.model}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    for parameter_name, parameter in sorted(model.named_parameters()):
        scale = 0.5 if parameter.ndim > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[-1] ** -0.5
        is_norm = "norm" in parameter_name and parameter.ndim == 1
        parameter.data.copy_(1 + noise if is_norm else noise)
        if _is_router(parameter_name):
            parameter.data.mul_(8)  # decided: no tie that rounding could break
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model.to(dtype)


def _is_router(name: str) -> bool:
    return any(part in name for part in ("mlp.gate.weight", "moe.gate.weight", "router"))


def tokens(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (samples, TOKENS), generator=generator)


_unpack = PackedForm.unpack


def _unpack_as_ever(self: PackedForm, packed: Tensor, dtype: torch.dtype) -> Tensor:
    with torch._C.DisableTorchFunction():
        return _unpack(self, packed, dtype)


class Fp32MeansFp64(TorchFunctionMode):
    """Lets a model in fp64 compute all of it in fp64.

    Norms, routers and the auxiliary loss of these models ask for fp32, whatever the model's type. Sums
    of a few tokens then differ by 1e-7 for each division of a batch, which would hide errors. Packed weights
    are unpacked as ever: their fp32 numbers are of the format."""

    def __enter__(self) -> Any:
        self._unpack = PackedForm.unpack
        PackedForm.unpack = _unpack_as_ever
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        PackedForm.unpack = self._unpack
        super().__exit__(exc_type, exc_val, exc_tb)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is Tensor.float:
            func = Tensor.double
        arguments = tuple(torch.float64 if value is torch.float32 else value for value in args)
        options = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        return func(*arguments, **options)


def next_token_loss(model: nn.Module, ids_BT: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropy over the predicted tokens, and their number."""
    with Fp32MeansFp64():
        logits = model(input_ids=ids_BT[:, :-1]).logits
    targets = ids_BT[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@dataclass(frozen=True)
class FamilyTask(Task):
    """Next-token training of a family's tiny model, by our experts."""

    name: str
    samples: int = 14
    bias_rate: float = 0.0

    def build_model(self) -> nn.Module:
        model = use(build(self.name))
        if self.bias_rate:
            use_balance_bias(model, self.bias_rate)
        return model

    def train_data(self) -> TensorData:
        return TensorData(tokens(self.samples))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        total, count = next_token_loss(model, batch[0])
        return Loss(total, count, {}, expert_loads(model))


def in_their_names(
    tensors: Mapping[str, Tensor], names: Sequence[str], model: nn.Module
) -> dict[str, Tensor]:
    """Return the tensors of experts, by our names and per expert, as stacks by theirs.

    ``model`` is the eager one, whose experts modules tell their layout."""
    from experts.transformers.layout import in_our_layout, is_experts_module, parameter_names

    result = {name: tensor for name, tensor in tensors.items() if ".hosted.bank." not in name}
    for prefix, module in model.named_modules():
        if not is_experts_module(module):
            continue
        experts: Any = module
        for role, theirs in parameter_names(experts).items():
            if f"{prefix}.{theirs}" not in names:
                continue
            stack = torch.stack(
                [tensors[f"{prefix}.hosted.bank.{e}.{role}"] for e in range(experts.num_experts)]
            )
            result[f"{prefix}.{theirs}"] = in_our_layout(experts, stack)
    return {name: result[name] for name in names}


def copied(model: Any) -> Any:
    """Return a copy with a config of its own."""
    return copy.deepcopy(model)
