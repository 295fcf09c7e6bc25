"""Experts of a Hugging Face ``transformers`` block into our layer and back: Mixtral, Qwen3-MoE and others that keep a
router ``gate.weight`` [E, D] and the stacks ``experts.gate_up_proj`` [E, 2H, D] and ``experts.down_proj`` [E, D, H].
Theirs multiply from the left, ours from the right: each expert is transposed. ``transformers`` is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.layer import MoELayer

_TENSORS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def from_block(block: nn.Module) -> MoELayer:
    """A layer that computes what the block computes, with copies of its weights, in their types and on their devices.
    Scores are computed in fp32 on both sides; a block in lower precision rounds the logits before, the layer does not."""
    found = _read(block)
    with found.router_ED.device:
        layer = MoELayer(found.width, [found.hidden] * found.experts, found.top_k, normalise=found.normalise)
    for ours, theirs in _pairs(layer, found):
        ours.data = theirs.detach().clone(memory_format=torch.contiguous_format)
    return layer


@torch.no_grad()
def into_block(layer: MoELayer, block: nn.Module) -> None:
    """Copies the layer's weights into the block, in place and in the block's types. Nothing is written when the two differ in
    anything else."""
    found, gate, bank = _read(block), layer.gate, layer.bank
    needed = {
        "width": (bank.width, found.width),
        "experts": (len(bank.sizes), found.experts),
        "hidden sizes": (sorted(set(bank.sizes)), [found.hidden]),
        "experts held here": (len(bank.held), found.experts),
        "kind": (bank.kind, "swiglu"),
        "scores": (gate.scores, "softmax"),
        "top_k": (gate.top_k, found.top_k),
        "normalise": (gate.normalise, found.normalise),
        "bias_rate": (gate.bias_rate, 0.0),
        "jitter": (layer.jitter, 0.0),
        "capacity": (layer.capacity, None),
        "shared": (layer.shared is not None, False),
    }
    wrong = [
        f"{name} {ours}, where the block needs {theirs}"
        for name, (ours, theirs) in needed.items()
        if ours != theirs
    ]
    if wrong:
        raise ValueError(f"the layer does not fit into the {type(block).__name__}: it has {'; '.join(wrong)}")
    for ours, theirs in _pairs(layer, found):
        theirs.copy_(ours)


@dataclass(frozen=True)
class _Block:
    """A block's tensors and what its router does with the scores."""

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


def _pairs(layer: MoELayer, found: _Block) -> list[tuple[Tensor, Tensor]]:
    """Our parameters beside views of theirs in our layout."""
    stacks = {role: stack for _, role, stack in layer.bank.stacks()}
    return [
        (layer.gate.weight_ED, found.router_ED),
        (stacks["up"], found.up_EHD.transpose(1, 2)),
        (stacks["down"], found.down_EDH.transpose(1, 2)),
    ]


def _read(block: nn.Module) -> _Block:
    state = block.state_dict(keep_vars=True)
    if set(state) != set(_TENSORS):
        raise ValueError(
            f"{type(block).__name__} holds {', '.join(sorted(state)) or 'nothing'}; needed were {', '.join(_TENSORS)} and nothing else: "
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
                f"{name} has the shape {list(tensor.shape)}; {shape} was needed with {experts} experts of width {width} (gate.weight) "
                f"and hidden size {hidden} (experts.down_proj)"
            )


def _check_form(block: nn.Module) -> None:
    """What shapes do not tell. ``transformers`` notes the layout of stacks on the experts; Mixtral may add noise in training."""
    experts: Any = block.experts
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        raise ValueError(
            f"{type(experts).__name__} is transposed or interleaved; stacks [E, 2H, D] with gate before value were needed"
        )
    probe = torch.linspace(-4, 4, 9)
    if not torch.allclose(experts.act_fn(probe), F.silu(probe)):
        raise ValueError(f"the experts' activation is {type(experts.act_fn).__name__}; SiLU was needed")
    if getattr(block, "jitter_noise", 0):
        raise ValueError(
            f"the block trains with jitter_noise {block.jitter_noise}, which the layer has not; set it to 0 first"
        )


def _normalises(gate: Any) -> bool:
    """Mixtral's router always does, Qwen's says so. Of others it is not known what they make of the scores."""
    told = getattr(gate, "norm_topk_prob", True if type(gate).__name__ == "MixtralTopKRouter" else None)
    if told is None:
        raise ValueError(
            f"the router is a {type(gate).__name__}; Mixtral's, or one with norm_topk_prob, was needed"
        )
    if told and gate.top_k == 1:
        raise ValueError(
            "the router gives its one expert per token the weight 1, which no layer does: it would cut the gate off from the loss"
        )
    return bool(told)
