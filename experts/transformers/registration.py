"""Registration of our experts with the experts interface of ``transformers``.

A model keeps its modules, routers and shared experts. Only the storage and the computation of its
experts become ours, so that they can live on several hosts. See ``experts.types`` for the letters of
shapes."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

from experts.model import attach
from experts.moe.context import MoEContext
from experts.transformers.hosted import HostedExperts
from experts.transformers.layout import check_parameters, is_experts_module, return_weights, take_bank

IMPLEMENTATION = "expert_orchestrator"
"""The name of our experts in ``config._experts_implementation``."""
INSTALL = "pip install 'expert-orchestrator[hf]'"
_TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")

Model = TypeVar("Model", bound=nn.Module)


def use(model: Model, context: MoEContext | None = None) -> Model:
    """Let our experts compute a model of ``transformers``, in place; return the model.

    Its experts are then MoE layers of ours: ``experts.model.place`` distributes them over hosts, and
    ``orchestrator`` trains them there. ``context`` is shared by its layers. A model without experts, or
    with some that ours cannot compute, is refused before anything is changed."""
    _register()
    found = [(name, experts) for name, experts in _experts_modules(model) if not hasattr(experts, "hosted")]
    for name, experts in found:
        check_parameters(experts)
        _check_placement(name, experts)
    top_k = {name: _top_k(name, experts) for name, experts in found}
    previous = [experts.config._experts_implementation for _, experts in found]
    _select(model, IMPLEMENTATION)
    for (name, experts), before in zip(found, previous, strict=True):
        bank = take_bank(experts)
        with bank.slot_E.device:
            experts.hosted = HostedExperts(bank, top_k[name])
        experts.implementation_before = before
    attach(model, context or MoEContext())
    return model


def restore(model: Model) -> Model:
    """Undo ``use``, in place: the model computes and saves its experts by itself again.

    Raises ValueError where experts of the model live on other hosts."""
    found = _experts_modules(model)
    for name, experts in found:
        bank = hosted_by(experts).bank
        if len(bank.held) < len(bank.sizes):
            raise ValueError(
                f"{name}: this host holds {len(bank.held)} of {len(bank.sizes)} experts; restore needs all "
                "of them: load a checkpoint into a model in one process first"
            )
        if bank.form.adapters is not None or bank.form.packing is not None:
            found_text = "adapters" if bank.form.adapters is not None else f"weights in {bank.form.packing}"
            raise ValueError(f"{name} has {found_text}; call experts.transformers.merge_lora before restore")
    for _, experts in found:
        return_weights(experts, hosted_by(experts).bank)
        del experts.hosted
    _select(model, found[0][1].implementation_before)
    return model


def expert_loads(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the tokens per expert of each MoE layer in the last forward pass: ``Loss.loads`` of a task."""
    return tuple(layer.counts_E for layer in model.modules() if isinstance(layer, HostedExperts))


def hosted_by(experts: nn.Module) -> HostedExperts:
    """Return our layer of an experts module."""
    hosted = getattr(experts, "hosted", None)
    if not isinstance(hosted, HostedExperts):
        raise ValueError(
            f"{type(experts).__name__} has the implementation {IMPLEMENTATION!r} and its own weights: its "
            "model shares a config with one that experts.transformers.use changed. Give each model a copy "
            "of the config, or call use on this one too"
        )
    return hosted


def _experts_forward(experts: nn.Module, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute a layer's experts. ``transformers`` calls it in place of their module's own forward."""
    return hosted_by(experts)(x_TD, experts_TK, weights_TK)


def _register() -> None:
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(
            f"experts.transformers needs transformers 5.17 or later ({error}): {INSTALL}"
        ) from None
    ExpertsInterface.register(IMPLEMENTATION, _experts_forward)


def _select(model: Any, implementation: str) -> None:
    """Choose an implementation for all experts of a model."""
    if not hasattr(model, "set_experts_implementation"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers 5.17 or later; give the model itself, "
            "not a wrapper around it"
        )
    model.set_experts_implementation(implementation)


def _experts_modules(model: nn.Module) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if is_experts_module(module)]
    if found:
        return found
    others = {
        type(module).__name__ for module in model.modules() if type(module).__name__.endswith("Experts")
    }
    if others:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(sorted(others))}, which the experts interface of "
            "transformers does not dispatch: its routers scale the experts' inputs, or its experts are "
            "modules of their own. Such a model trains in one process or data parallel, without "
            "experts.transformers"
        )
    raise ValueError(
        f"{type(model).__name__} has no experts; experts.transformers.use is for mixture-of-experts models. "
        "A dense model trains as it is"
    )


def _top_k(name: str, experts: Any) -> int:
    config = experts.config
    found = [getattr(config, key) for key in _TOP_K_NAMES if getattr(config, key, None)]
    if not found:
        raise ValueError(
            f"{name}: the config has none of {', '.join(_TOP_K_NAMES)}; the experts per token are unknown"
        )
    return found[0]


def _check_placement(name: str, experts: Any) -> None:
    """Refuse experts that ``transformers`` has distributed already."""
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in experts.parameters())
    if is_sharded or getattr(experts, "_is_expert_parallel", False):
        raise ValueError(
            f"{name} is distributed already; load the model without distributed_config, tp_plan and "
            "device_map: expert hosts divide its experts themselves"
        )
