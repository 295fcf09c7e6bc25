"""The weights of an experts module of ``transformers`` in our layout, and back.

Their default is ``gate_up_proj`` [E, 2H, D] and ``down_proj`` [E, D, H], which multiply from the left;
ours multiply from the right. GPT-OSS has our layout, with gate and value interleaved, and biases. See
``experts.types`` for the letters of shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from experts.moe.bank import ExpertBank, ExpertForm, without_memory


def is_experts_module(module: nn.Module) -> bool:
    """Whether the experts interface of ``transformers`` dispatches the module's forward pass."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate"))


def parameter_names(experts: Any) -> dict[str, str]:
    """Return the names of the module's parameters by our roles."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = {"up": up, "down": "down_proj"}
    if experts.has_bias:
        names |= {"up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    return names


def in_our_layout(experts: Any, tensor: Tensor) -> Tensor:
    """Return a view of a parameter in our layout, or of ours in the module's: a transpose does both."""
    return tensor if tensor.ndim < 3 or experts.is_transposed else tensor.transpose(1, 2)


@torch.no_grad()
def take_bank(experts: Any) -> ExpertBank:
    """Return a bank with the module's weights, and remove them from the module."""
    check_parameters(experts)
    names = parameter_names(experts)
    down_EHD = in_our_layout(experts, experts.down_proj)
    num_experts, hidden, width = down_EHD.shape
    with without_memory():
        bank = ExpertBank(width, [hidden] * num_experts, expert_form(experts))
    for group, role, _ in list(bank.stacks()):
        theirs: nn.Parameter = getattr(experts, names[role])
        weights = in_our_layout(experts, theirs.detach()).contiguous()
        bank.set_stack(group, role, weights, theirs.requires_grad)
        # One after another: a second copy of all weights would not fit beside the first.
        delattr(experts, names[role])
    bank.slot_E = bank.slot_E.to(_device(bank))
    return bank


def _device(bank: ExpertBank) -> torch.device:
    """Return the device for a bank's buffers. They have memory even where the weights have none yet."""
    device = next(bank.parameters()).device
    return torch.get_default_device() if device.type == "meta" else device


@torch.no_grad()
def return_weights(experts: Any, bank: ExpertBank) -> None:
    """Give the module its parameters back, from a bank that has all experts."""
    names = parameter_names(experts)
    for _, role, stack in bank.stacks():
        weights = in_our_layout(experts, stack.detach()).contiguous()
        experts.register_parameter(names[role], nn.Parameter(weights, stack.requires_grad))


def check_parameters(experts: Any) -> None:
    """Refuse a module with other parameters than two stacks and their biases."""
    found = set(dict(experts.named_parameters(recurse=False)))
    needed = set(parameter_names(experts).values())
    if found != needed:
        raise ValueError(
            f"{type(experts).__name__} holds {', '.join(sorted(found)) or 'nothing'}; needed were "
            f"{', '.join(sorted(needed))} and nothing else: quantised experts, and those with further "
            "parameters, cannot be trained on expert hosts"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError(
            f"{type(experts).__name__} applies a norm after each expert, which our experts have not"
        )


def expert_form(experts: Any) -> ExpertForm:
    """Return the computation of the module's experts."""
    kind = "swiglu" if experts.has_gate else "ffn"
    activation = experts._apply_gate if experts.has_gate else experts.act_fn
    if experts.has_gate and _is_swiglu(activation):
        activation = None  # the fused kernels have it
    return ExpertForm(kind, activation, experts.has_bias)


def _is_swiglu(activation: Any) -> bool:
    """Whether the activation is ours. By its values: names differ between versions of transformers."""
    # Real values on the CPU, also where the model is built without memory.
    with unset_fake_temporarily(), torch.device("cpu"):
        probe = torch.linspace(-100, 100, 22, dtype=torch.float64).reshape(2, 11).t().reshape(1, 22)
        gate, value = probe.chunk(2, dim=-1)
        expected = F.silu(gate) * value
        return torch.allclose(activation(probe), expected, rtol=1e-12, atol=0)
