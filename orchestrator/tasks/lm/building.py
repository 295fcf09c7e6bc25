"""Construction of a model of ``transformers``, with adapters; its experts may live on several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.balance import moe_layers
from experts.moe.bank import banks_have_memory
from experts.moe.token_dropout import token_dropouts
from experts.transformers.files.shards import fingerprint
from experts.transformers.layout import is_experts_module
from experts.transformers.lora.adapters import LoraOptions, add_lora
from experts.transformers.lora.packing import pack_frozen
from experts.transformers.registration import use
from experts.types import Packing
from orchestrator.config.sections.model import ModelSettings
from orchestrator.errors import UserError
from orchestrator.tasks.lm.model_folder import empty_causal_lm


def build_causal_lm(config: Any, packing: Packing | None = None) -> nn.Module:
    """Build the model of a configuration in fp32, with memory that holds no weights yet.

    Experts that ours can compute are ours afterwards. In ``without_memory`` they get none: most of them
    live on other hosts. With ``packing`` frozen matrices never have memory for more than 4 or 8 bits."""
    with _parameters_without_memory():
        model: nn.Module = empty_causal_lm(config, dtype=torch.float32)
    if any(is_experts_module(module) for module in model.modules()):
        use(model)
    if packing is not None:
        pack_frozen(model, packing)
    banks = [layer.bank for _, layer in moe_layers(model)]
    in_banks = {parameter for bank in banks for parameter in bank.parameters()}
    _allocate(model, in_banks)
    if banks_have_memory():
        for bank in banks:
            bank.materialise()
    return model


def has_recurrence(config: Any) -> bool:
    """Whether tokens also reach later ones past the attention: packed documents would mix."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    return bool(kinds - {"full_attention", "sliding_attention", "chunked_attention", "attention"})


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put the parameters of modules that are built on the meta device. Buffers keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _allocate(model: nn.Module, without: set[nn.Parameter]) -> None:
    """Give parameters memory on the default device. Tied ones stay one."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta and parameter not in without:
                if parameter not in allocated:
                    empty = torch.empty_like(parameter, device=torch.get_default_device())
                    allocated[parameter] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, name, allocated[parameter])


def lora_options(settings: ModelSettings) -> LoraOptions | None:
    """Return the adapters that the settings ask for; None without ``--lora``."""
    if settings.lora is None:
        return None
    alpha = 2.0 * settings.lora if settings.lora_alpha is None else settings.lora_alpha
    return LoraOptions(settings.lora, alpha, settings.lora_targets, settings.lora_dropout)


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Freeze a model and give it adapters, in place."""
    try:
        add_lora(model, options)
    except (ValueError, ImportError) as error:
        raise UserError(f"--lora {options.rank}: {error}") from None
    if options.dropout and not token_dropouts(model):
        raise UserError(
            f"--lora-dropout is {options.dropout}, but only experts have adapters here, and those have no "
            "dropout; leave it out, or add linear layers to --lora-targets"
        )


def leave_to_files(model: nn.Module, folder: Path | None) -> None:
    """Let checkpoints leave out the frozen weights, which are read from a folder at each start.

    A model that is only planned has no ``folder``: its files need not be on this machine."""
    adapted: Any = model
    adapted.frozen_base = "not read" if folder is None else fingerprint(folder)
