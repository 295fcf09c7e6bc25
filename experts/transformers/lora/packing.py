"""Frozen weights of a ``transformers`` model in 4 or 8 bits: its experts, and its linear layers but routers
and the output. Embeddings, norms and biases keep their type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from experts.balance import moe_layers
from experts.kernels.packed import PackedForm
from experts.kernels.packed_product import UNPACKED_BYTES, PackedLinear
from experts.moe.bank import ExpertBank
from experts.transformers.lora.targets import usual_linears
from experts.types import Packing

Model = TypeVar("Model", bound=nn.Module)

_PLAIN_BYTES = 8
"""Bytes of a number while plain torch unpacks its matrix: itself, and its value in fp32."""
_FP32_BYTES, _BF16_BYTES = 4, 2
_READ_BY_MODELS = ("dt_proj", "x_proj", "weights_proj")
"""Linear layers whose weight some families multiply or look at themselves."""


@torch.no_grad()
def pack_frozen(model: Model, packing: Packing) -> Model:
    """Pack a model's matrices in place, before it gets adapters; return the model.

    The experts of a mixture-of-experts model must be ours already (``use``). A model without memory stays
    without: numbers that are read into it are packed one matrix after another."""
    for name in usual_linears(model):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if name.endswith(_READ_BY_MODELS) or type(linear).forward is not nn.Linear.forward:
            continue
        form = PackedForm(packing, linear.out_features, linear.in_features)
        model.set_submodule(name, PackedLinear(linear, form))
    for _, layer in moe_layers(model):
        layer.bank.pack(packing)
    return model


@torch.no_grad()
def unpack_frozen(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give a model whole matrices again, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, ExpertBank) and module.form.packing is not None:
            module.unpack(dtype)
        elif isinstance(module, PackedLinear):
            model.set_submodule(name, module.unpacked(dtype))


def counts_of_numbers(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many numbers each parameter holds: of a packed one those that its bytes stand for."""
    counts = {parameter: parameter.numel() for parameter in model.parameters()}
    for form, parameter, entries in packed_parameters(model):
        counts[parameter] = form.outer * form.inner * len(entries)
    return counts


def packed_forms(model: nn.Module) -> dict[str, PackedForm]:
    """Return the forms of packed matrices by their names in a checkpoint: those of experts by id."""
    return {name: form for form, _, entries in packed_parameters(model) for name in entries}


def unpacking_bytes(model: nn.Module, on_gpu: bool) -> int:
    """Return the most memory of matrices that are unpacked at a time."""
    found = list(packed_parameters(model))
    largest = max((form.outer * form.inner for form, _, _ in found), default=0)
    if not found or not on_gpu:
        return _PLAIN_BYTES * largest
    stack = max(form.outer * form.inner * len(entries) for form, _, entries in found)
    return max(_FP32_BYTES * largest, min(_BF16_BYTES * stack, UNPACKED_BYTES))


def packed_parameters(model: nn.Module) -> Iterator[tuple[PackedForm, nn.Parameter, list[str]]]:
    """Yield each packed parameter with the form and the names in a checkpoint of its matrices."""
    for prefix, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield module.form, module.get_parameter("weight"), [f"{prefix}.weight"]
        elif isinstance(module, ExpertBank):
            for group, role, stack in module.stacks():
                form = module.form.packed(role, module.width, group.hidden)
                if form is not None:
                    yield form, stack, [f"{prefix}.{module.ids[row]}.{role}" for row in group.rows]
