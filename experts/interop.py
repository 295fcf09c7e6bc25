"""Conversion of MoE blocks of Hugging Face ``transformers`` to our layer and back.

Supported are Mixtral, Qwen3-MoE and other blocks with a router ``gate.weight`` [E, D] and the
stacks ``experts.gate_up_proj`` [E, 2H, D] and ``experts.down_proj`` [E, D, H]. Their matrices
multiply from the left, ours from the right, so that each expert is transposed. ``transformers`` is
not imported. See ``types`` for the letters of shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.layer import MoELayer

_TENSORS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def from_block(block: nn.Module) -> MoELayer:
    """Return a layer equivalent to the block, with copies of its weights.

    Types and devices are those of the block. Both compute scores in fp32; a block in lower
    precision rounds the logits before, the layer does not."""
    source = _read(block)
    sizes = [source.hidden] * source.experts
    with source.router_ED.device:
        layer = MoELayer(source.width, sizes, source.top_k, normalise=source.normalise)
    for ours, theirs in _pairs(layer, source):
        ours.data = theirs.detach().clone(memory_format=torch.contiguous_format)
    return layer


@torch.no_grad()
def into_block(layer: MoELayer, block: nn.Module) -> None:
    """Copy the layer's weights into the block, in place and in the block's types.

    Raises ValueError, before anything is written, where layer and block differ in anything but
    weights."""
    target = _read(block)
    gate = layer.gate
    bank = layer.bank
    settings = {
        "width": (bank.width, target.width),
        "experts": (len(bank.sizes), target.experts),
        "hidden sizes": (sorted(set(bank.sizes)), [target.hidden]),
        "local experts": (len(bank.held), target.experts),
        "kind": (bank.kind, "swiglu"),
        "scores": (gate.scores, "softmax"),
        "top_k": (gate.top_k, target.top_k),
        "normalise": (gate.normalise, target.normalise),
        "bias_rate": (gate.bias_rate, 0.0),
        "prior": (gate.has_prior, False),
        "jitter": (layer.jitter, 0.0),
        "capacity": (layer.capacity, None),
        "shared": (layer.shared is not None, False),
    }
    differences = [
        f"{name} {ours}, where the block needs {theirs}"
        for name, (ours, theirs) in settings.items()
        if ours != theirs
    ]
    if differences:
        text = "; ".join(differences)
        raise ValueError(f"the layer does not fit into the {type(block).__name__}: it has {text}")
    for ours, theirs in _pairs(layer, target):
        theirs.copy_(ours)


@dataclass(frozen=True)
class _Block:
    """The tensors of a block, and how its router treats the scores."""

    router_ED: Tensor
    up_EHD: Tensor
    down_EDH: Tensor
    top_k: int
    normalise: bool

    @property
    def experts(self) -> int:
        return self.router_ED.shape[0]

    @property
    def width(self) -> int:
        return self.router_ED.shape[1]

    @property
    def hidden(self) -> int:
        return self.down_EDH.shape[2]


def _pairs(layer: MoELayer, block: _Block) -> list[tuple[Tensor, Tensor]]:
    """Return our parameters, each with a view of the block's in our layout."""
    stacks = {role: stack for _, role, stack in layer.bank.stacks()}
    return [
        (layer.gate.weight_ED, block.router_ED),
        (stacks["up"], block.up_EHD.transpose(1, 2)),
        (stacks["down"], block.down_EDH.transpose(1, 2)),
    ]


def _read(block: nn.Module) -> _Block:
    # keep_vars: the parameters themselves, which ``into_block`` writes to.
    state = block.state_dict(keep_vars=True)
    if set(state) != set(_TENSORS):
        names = ", ".join(sorted(state)) or "nothing"
        raise ValueError(
            f"{type(block).__name__} holds {names}; needed were {', '.join(_TENSORS)} and nothing else: "
            "shared experts and biases have no place in the layer"
        )
    router_ED, up_EHD, down_EDH = (state[name] for name in _TENSORS)
    _check_shapes(router_ED, up_EHD, down_EDH)
    _check_form(block)
    gate: Any = block.gate
    return _Block(router_ED, up_EHD, down_EDH, gate.top_k, _normalises(gate))


def _check_shapes(router_ED: Tensor, up_EHD: Tensor, down_EDH: Tensor) -> None:
    if router_ED.ndim != 2:
        raise ValueError(f"gate.weight has the shape {list(router_ED.shape)}; [experts, width] was needed")
    experts, width = router_ED.shape
    hidden = down_EDH.shape[-1] if down_EDH.ndim else 0
    needed = {
        "experts.down_proj": (down_EDH, [experts, width, hidden]),
        "experts.gate_up_proj": (up_EHD, [experts, 2 * hidden, width]),
    }
    for name, (tensor, shape) in needed.items():
        if list(tensor.shape) != shape:
            raise ValueError(
                f"{name} has the shape {list(tensor.shape)}; {shape} was needed with {experts} "
                f"experts of width "
                f"{width} (gate.weight) and hidden size {hidden} (experts.down_proj)"
            )


def _check_form(block: nn.Module) -> None:
    """Check properties that the shapes do not show.

    ``transformers`` notes the layout of stacks on the experts module; Mixtral may add noise in
    training."""
    experts: Any = block.experts
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        raise ValueError(
            f"{type(experts).__name__} is transposed or interleaved; stacks [E, 2H, D] with gate "
            f"before value were needed"
        )
    # By its values: the class of an activation may differ between versions of transformers.
    probe = torch.linspace(-4, 4, 9)
    if not torch.allclose(experts.act_fn(probe), F.silu(probe)):
        raise ValueError(f"the experts' activation is {type(experts.act_fn).__name__}; SiLU was needed")
    if getattr(block, "jitter_noise", 0):
        raise ValueError(
            f"the block trains with jitter_noise {block.jitter_noise}, which the layer has not; "
            f"set it to 0 first"
        )


def _normalises(gate: Any) -> bool:
    """Whether a router normalises the weights of a token's experts.

    Raises ValueError for unknown routers. Mixtral's router always does; Qwen's has the setting
    ``norm_topk_prob``."""
    default = True if type(gate).__name__ == "MixtralTopKRouter" else None
    normalises = getattr(gate, "norm_topk_prob", default)
    if normalises is None:
        raise ValueError(
            f"the router is a {type(gate).__name__}; Mixtral's, or one with norm_topk_prob, was needed"
        )
    if normalises and gate.top_k == 1:
        raise ValueError(
            "the router gives its one expert per token the weight 1; the layer does not, because "
            "that would cut the "
            "gate off from the loss"
        )
    return bool(normalises)
