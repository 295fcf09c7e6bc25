"""Adapters in the files of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT keeps the adapters of all experts of a layer in two matrices: A is [E·r, K] with the experts one after
the other, B is [N, r·E] with the experts of each rank side by side. The two stacks of a layer are nested:
that of the first parameter is ``experts.base_layer``, that of the last ``experts``. See
``experts.types`` for the letters of shapes; a matrix is K × N in our layout, r is the rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experts.expert_state import split_experts, stacked_names
from experts.kernels.adapters import adapted_matrix, is_first_factor
from experts.transformers.lora.adapters import NAME, LoraOptions, has_lora, is_adapter, peft_config
from experts.transformers.lora.targets import expert_parameters, find_targets, peft_names

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT_NAME = re.compile(r"(?P<experts>.+)\.hosted\.bank\.(?P<id>\d+)\.(?P<role>(up|down)_lora_[ab])")


def save_lora(model: nn.Module, folder: Path, options: LoraOptions, base: str | None = None) -> None:
    """Write the adapters of a model that has all experts, as ``PeftModel.from_pretrained`` reads them.

    ``base`` is the name or the folder of the model without adapters."""
    if not has_lora(model):
        raise ValueError(
            f"{type(model).__name__} has no adapters to write; call add_lora before it is trained"
        )
    named = split_experts(dict(model.named_parameters()), stacked_names(model))
    write_adapters(folder, named, lambda name: named[name].detach(), adapter_config(model, options, base))


def adapter_config(model: nn.Module, options: LoraOptions, base: str | None = None) -> Any:
    """Return the config of PEFT for a model with adapters. The model may be without memory."""
    targets = find_targets(model, options.targets)
    modules, weights = peft_names(model, targets.linears)
    parameters = weights + expert_parameters(model, targets.matrices)
    # No dropout: PEFT refuses it beside adapters on parameters, and the saved adapters are used without it.
    config = peft_config(options, modules, parameters or None)
    config.base_model_name_or_path = base
    config.inference_mode = True
    return config


def is_saved_adapter(name: str) -> bool:
    """Whether a name in a checkpoint is that of an adapter."""
    return is_adapter(name) or _EXPERT_NAME.fullmatch(name) is not None


def write_adapters(folder: Path, names: Iterable[str], read: Callable[[str], Tensor], config: Any) -> int:
    """Write the adapters among ``names``, which ``read`` returns one by one, and the config.

    Return the bytes of the adapters. The names are those of a checkpoint: experts by id, linear layers as
    PEFT names them in a model."""
    from safetensors.torch import save_file

    tensors = {key: tensor.cpu().contiguous() for key, tensor in peft_tensors(names, read)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def peft_tensors(names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters by their names in PEFT's file."""
    of_experts: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        expert = _EXPERT_NAME.fullmatch(name)
        if expert is not None:
            key = (expert["experts"], expert["role"])
            of_experts.setdefault(key, {})[int(expert["id"])] = name
        elif is_adapter(name):
            yield _PREFIX + name.replace(f".{NAME}.", "."), read(name)
    for (experts, role), name_of_id in of_experts.items():
        stacked = torch.stack([read(name_of_id[expert_id]) for expert_id in sorted(name_of_id)])
        has_outer = (experts, role.replace("up", "down")) in of_experts
        is_inner = adapted_matrix(role) == "up" and has_outer
        factor = "lora_A" if is_first_factor(role) else "lora_B"
        yield (
            f"{_PREFIX}{experts}{'.base_layer' if is_inner else ''}.{factor}.weight",
            _in_peft_layout(role, stacked),
        )


def _in_peft_layout(role: str, stacked: Tensor) -> Tensor:
    """Return the stacked parameters of a layer's experts as one matrix of PEFT."""
    if is_first_factor(role):
        return stacked.transpose(1, 2).flatten(0, 1)
    return stacked.permute(2, 1, 0).flatten(1, 2)
