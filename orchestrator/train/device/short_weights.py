"""Models whose weights are stored in bf16.

Products take them as they are where autocast computes in a short type. Everything else computes with them in
fp32, as with weights in fp32: normalisations, gates, the sums of a residual stream. So the gradients of these
weights are those of a model in fp32 that has the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from orchestrator.errors import UserError
from orchestrator.train.optim.shards import is_shard
from orchestrator.types import BF16_PRECISIONS, PrecisionName

_KEPT = "short_weight"
"""The name of a weight while its module computes with a copy in fp32."""


def shorten_weights(model: nn.Module) -> None:
    """Store the parameters of a model in bf16."""
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(
                f"--weight-precision bf16 stores weights that the task builds in fp32, and {name} is in "
                f"{parameter.dtype}; build the model in fp32, or leave the flag out"
            )
        parameter.data = parameter.data.to(torch.bfloat16)
    marked: Any = model
    marked.has_short_weights = True
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # Autocast has no rule for them: their rows begin the residual stream, which stays in fp32.
            module.register_forward_hook(_rows_in_fp32)
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            # Under autocast they take short weights; a model may compute some of them outside of it.
            module.register_forward_pre_hook(_widen_outside_autocast)
            module.register_forward_hook(_put_back, always_call=True)


def lengthen_weights(model: nn.Module) -> None:
    """Store the parameters of a model in fp32 again, one after the other; their gradients are dropped.

    A model that was built in bf16 stays as it is."""
    if not is_shortened(model):
        return
    marked: Any = model
    marked.has_short_weights = False
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in list(hooks.items()):
                if hook in _HOOKS:
                    del hooks[number]
                    module._forward_hooks_always_called.pop(number, None)
    for parameter in model.parameters():
        parameter.grad = None
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
            parameter.grad_dtype = torch.float32


@contextmanager
def computing_weights(model: nn.Module, kind: PrecisionName) -> Iterator[None]:
    """Let a model compute with those weights in fp32 that autocast of this kind would not take in bf16.

    In fp32 and fp16 these are all of them: in fp16, gradients of weights in bf16 would lose digits. They last
    for a backward pass too if it runs within the block. A block within another one changes nothing. FSDP2
    gathers shards in fp32 itself, and a bank that hands over its gradients makes its own copies. A model that
    was built in bf16 computes as it is."""
    if not is_shortened(model):
        yield
        return
    products = _weights_of_products(model)
    always = {id(p) for _, layer in moe_layers(model) for p in layer.router_parameters}
    wide: dict[Tensor, Any] = {}
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            if isinstance(module, ExpertBank) and module.gradient_sink is not None:
                continue  # the gradient of its copy for a pass is handed over as it is, with the parameter
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, nn.Parameter) or parameter.dtype != torch.bfloat16:
                    continue
                is_needed = (
                    kind not in BF16_PRECISIONS or id(parameter) in always or id(parameter) not in products
                )
                if is_needed and not is_shard(parameter):
                    # A tied parameter is widened once.
                    if parameter not in wide:
                        wide[parameter] = _widened(parameter)
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            module._parameters[name] = wide[parameter]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def is_shortened(model: nn.Module) -> bool:
    """Return whether the weights of a model are stored in bf16: not those that its task builds so."""
    return getattr(model, "has_short_weights", False)


def _weights_of_products(model: nn.Module) -> set[int]:
    """Return the ids of the weights that autocast computes with in bf16, and nothing else does."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or _is_plain_table(module):
            weight: Any = module.weight
            found.add(id(weight))
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            found.add(id(module.in_proj_weight))
        elif isinstance(module, ExpertBank):
            found |= {id(p) for p in module.parameters()}
    # A table that computes by itself, and is the output layer too.
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return found - {id(table.weight) for table in tables if not _is_plain_table(table)}


class _Widen(torch.autograd.Function):
    """A parameter in fp32, whose gradient reaches the parameter without being rounded to its type."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        del ctx
        return parameter.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        del ctx
        return gradient


def _widened(parameter: Tensor) -> Any:
    apply: Any = _Widen.apply
    wide = apply(parameter)
    wide._is_param = True  # so that modules, which look for parameters by name, take it for one
    return wide


def _widen_outside_autocast(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Let a product of fp32 values outside of autocast have its weights in fp32, until it is computed."""
    x = inputs[0] if inputs else None
    weight = module._parameters.get("weight")
    if not isinstance(x, Tensor) or weight is None or weight.dtype != torch.bfloat16:
        return
    if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
        module._parameters[_KEPT] = weight
        module._parameters["weight"] = _widened(weight)


def _put_back(module: nn.Module, inputs: Any, output: Any) -> None:
    del inputs, output
    if _KEPT in module._parameters:
        module._parameters["weight"] = module._parameters.pop(_KEPT)


def _is_plain_table(module: nn.Module) -> bool:
    """Whether a module looks up embeddings and does nothing else, with dense gradients."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not module.sparse
    )


def _rows_in_fp32(module: nn.Embedding, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    if not inputs or output.dtype != torch.bfloat16 or not _is_plain_table(module):
        return output.float()
    apply: Any = _Rows.apply
    return apply(module.weight, inputs[0], output.detach(), module.padding_idx, module.scale_grad_by_freq)


class _Rows(torch.autograd.Function):
    """Rows of a table of embeddings in fp32, whose gradients are added up in fp32."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, rows: Tensor, padding: int | None, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = (len(table), -1 if padding is None else padding, by_frequency)
        return rows.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grads[0], ids, *ctx.options), None, None, None, None


_HOOKS = (_rows_in_fp32, _widen_outside_autocast, _put_back)
