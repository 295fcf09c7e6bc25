"""Low-rank adapters (LoRA) on a ``transformers`` model whose experts are ours.

Linear layers get the adapters of PEFT. Experts get further stacks in their banks, so that they are placed,
moved, saved and recovered as other parameters of experts are. All other weights are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from experts.balance import moe_layers
from experts.kernels.adapters import Adapters
from experts.model import fill_adapter, initialise_experts, mix
from experts.moe.bank import MATRICES, ExpertBank, named_banks
from experts.moe.token_dropout import TokenDropout
from experts.transformers.lora.packing import unpack_frozen
from experts.transformers.lora.targets import find_targets, import_peft, name_in_block

NAME = "default"
"""The name that PEFT gives to the adapters of a model."""
_FIRST = f".lora_A.{NAME}.weight"
_SECOND = f".lora_B.{NAME}.weight"

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LoraOptions:
    """The rank of all adapters; ``alpha`` / ``rank`` multiplies their products.

    ``targets`` are names and words as in ``experts.transformers.lora.targets``; none for the usual ones.
    ``dropout`` is the share of the inputs of adapters on linear layers that is dropped in training; adapters
    on experts have no dropout, as PEFT's have none."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"LoRA has rank {self.rank} and alpha {self.alpha}; both must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoRA has dropout {self.dropout}; it must be at least 0 and below 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def add_lora(model: Model, options: LoraOptions) -> Model:
    """Freeze a model and give it adapters, in place; return the model.

    The experts of a mixture-of-experts model must be ours already (``use``), and all on this host.
    The adapters change nothing until they are trained."""
    targets = find_targets(model, options.targets)
    banks = _banks(model)
    if targets.matrices and not banks:
        raise ValueError(
            "the model's experts are not ours yet: call experts.transformers.use before add_lora"
        )
    model.requires_grad_(False)
    if targets.linears:
        _adapt_linears(model, targets.linears, options)
        _allocate_adapters(model)
    if targets.matrices:
        for bank in banks:
            bank.adapt(Adapters(options.rank, options.scale, targets.matrices))
    initialise_lora(model, seed=0)
    return model


def _adapt_linears(model: nn.Module, names: Sequence[str], options: LoraOptions) -> None:
    """Replace linear layers by those of PEFT with adapters.

    PEFT gets them in a module without a configuration. With the configuration of some families, it would
    take ``down_proj`` of a dense block for the routed experts of older ``transformers``."""
    holder = nn.Module()
    for index, name in enumerate(names):
        holder.add_module(f"linear{index}", model.get_submodule(name))
    config = peft_config(options, [name for name, _ in holder.named_children()])
    # PEFT moves adapters in a way that fake tensors do not allow: they get memory afterwards.
    with unset_fake_temporarily():
        import_peft().inject_adapter_in_model(config, holder, NAME, low_cpu_mem_usage=True)
    for name, layer in zip(names, holder.children(), strict=True):
        if options.dropout:
            adapted: Any = layer
            adapted.lora_dropout[NAME] = TokenDropout(options.dropout)
        model.set_submodule(name, layer)


def _allocate_adapters(model: nn.Module) -> None:
    """Give the adapters of linear layers memory, in fp32 beside weights of a shorter type.

    Updates of an optimizer are often smaller than the last digit of a shorter type."""
    for _, _, layer in _adapted_layers(model):
        frozen = layer.base_layer.weight
        dtype = torch.promote_types(frozen.dtype, torch.float32)
        for linear in (layer.lora_A[NAME], layer.lora_B[NAME]):
            zeros = torch.zeros(linear.weight.shape, dtype=dtype, device=frozen.device)
            linear.weight = nn.Parameter(zeros)


def peft_config(options: LoraOptions, modules: Sequence[str], parameters: Sequence[str] | None = None) -> Any:
    """Return the config of PEFT for linear layers, and for parameters of experts, by name."""
    return import_peft().LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(modules),
        target_parameters=None if parameters is None else list(parameters),
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def initialise_lora(model: nn.Module, seed: int) -> None:
    """Fill all adapters: the same numbers for each expert and layer, wherever they live."""
    for prefix, bank in named_banks(model):
        if bank.form.adapters is not None:
            initialise_experts(bank, prefix, bank.form.adapters.roles, seed)
    for name, parameter in model.named_parameters():
        if name.endswith(_FIRST):
            fill_adapter(parameter, parameter.shape[1], mix(seed, name))
        elif name.endswith(_SECOND):
            fill_adapter(parameter, None, mix(seed, name))


@torch.no_grad()
def merge_lora(model: Model) -> Model:
    """Add the adapters to the weights beside them, in place, and remove them; return the model.

    All parameters can be trained then. Packed weights are unpacked to fp32 first."""
    unpack_frozen(model)
    for bank in _banks(model):
        bank.merge_adapters()
    for parent, child, layer in _adapted_layers(model):
        weight = layer.base_layer.weight
        weight.copy_(weight.to(layer.lora_A[NAME].weight.dtype) + layer.get_delta_weight(NAME))
        setattr(parent, child, layer.base_layer)
    model.requires_grad_(True)
    return model


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Show a model as it was before ``add_lora``, by names and modules, while weights are read into it."""
    forms = [(bank, bank.form) for bank in _banks(model)]
    adapted = _adapted_layers(model)
    for bank, form in forms:
        bank.form = replace(form, adapters=None)
    for parent, child, layer in adapted:
        setattr(parent, child, layer.base_layer)
    try:
        yield
    finally:
        for bank, form in forms:
            bank.form = form
        for parent, child, layer in adapted:
            setattr(parent, child, layer)


@torch.no_grad()
def shorten_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the frozen matrices beside adapters in the type that they are computed in.

    Results stay as they are: autocast would convert these matrices in each pass. Other frozen weights,
    as embeddings and norms, keep their type: their results depend on it."""
    frozen = [
        bank.get_parameter(f"{matrix}_{group.hidden}")
        for bank in _banks(model)
        if bank.form.adapters
        for group in bank.classes
        for matrix in MATRICES
    ]
    tied = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    frozen += [layer.base_layer.weight for _, _, layer in _adapted_layers(model)]
    for parameter in frozen:
        if id(parameter) not in tied and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def has_lora(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    in_banks = any(bank.form.adapters is not None for bank in _banks(model))
    return in_banks or any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a name is that of an adapter of PEFT in a linear layer."""
    return name.endswith((_FIRST, _SECOND))


def count_adapted(model: nn.Module) -> tuple[tuple[str, int, int], ...]:
    """Return each kind of linear layer and of experts' matrix by its name in a block, with the number of
    those that have adapters and that of all. Empty for a model without adapters."""
    if not has_lora(model):
        return ()
    adapted = {id(layer.base_layer) for _, _, layer in _adapted_layers(model)}
    counts: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            count = counts.setdefault(name_in_block(name.removesuffix(".base_layer")), [0, 0])
            count[0] += id(module) in adapted
            count[1] += 1
    for prefix, bank in named_banks(model):
        matrices = bank.form.adapters.matrices if bank.form.adapters is not None else ()
        experts = name_in_block(prefix.removesuffix(".hosted.bank"))
        for matrix in MATRICES:
            count = counts.setdefault(f"{experts} ({matrix})", [0, 0])
            count[0] += matrix in matrices
            count[1] += 1
    return tuple((name, with_adapters, total) for name, (with_adapters, total) in counts.items())


def _adapted_layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the linear layers with adapters, each with its parent and its name there."""
    layers: list[tuple[nn.Module, str, Any]] = []
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            parent, _, child = name.rpartition(".")
            layers.append((model.get_submodule(parent), child, module))
    return layers


def _banks(model: nn.Module) -> list[ExpertBank]:
    return list(dict.fromkeys(layer.bank for _, layer in moe_layers(model)))
