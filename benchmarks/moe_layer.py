"""Forward and backward of one MoE layer in bf16 on one GPU: ours beside the layer one would write by hand around torch's
grouped product, eager and compiled.

All compute the same: fp32 scores, softmax, top-k, normalised weights, the balance and the z loss, SwiGLU experts; all
gradients are taken, of the input, the experts and the gate. Figures are TFLOP/s of the experts' products alone, so
everything else shows as what is missing. Rounds alternate between the candidates; medians are compared.

    python -m benchmarks.moe_layer [--rounds 7] [--profile] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support import header, markdown_table, write_result
from experts.kernels import fused, fused_gate
from experts.layer import MoELayer

WARM_UP, STEPS = 3, 10
Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From tokens to what the layer makes of them, and the sum of its losses."""


@dataclass(frozen=True)
class Shape:
    experts: int
    width: int
    hidden: int
    tokens: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.experts} × {self.width} × {self.hidden}, {self.tokens:,}, {self.top_k}"

    @property
    def flops(self) -> float:
        """Of the experts' products: two in the forward pass, twice as many in the backward pass."""
        return 3 * 6 * self.tokens * self.top_k * self.width * self.hidden


SHAPES = (
    Shape(8, 4096, 14336, 8192, 2),
    Shape(64, 2048, 1408, 16384, 6),
    Shape(16, 1024, 4096, 32768, 2),
    Shape(128, 2048, 768, 16384, 8),
)


@dataclass(frozen=True)
class Weights:
    gate_ED: Tensor
    up_EDH: Tensor
    down_EHD: Tensor
    share_E: Tensor
    """What the balance loss weighs probabilities by."""

    @staticmethod
    def random(shape: Shape, device: torch.device) -> Weights:
        def normal(*sizes: int, fan_in: int) -> Tensor:
            drawn = torch.randn(*sizes, device=device) * fan_in**-0.5
            return drawn.to(torch.bfloat16).requires_grad_()

        return Weights(
            normal(shape.experts, shape.width, fan_in=shape.width),
            normal(shape.experts, shape.width, 2 * shape.hidden, fan_in=shape.width),
            normal(shape.experts, shape.hidden, shape.width, fan_in=shape.hidden),
            torch.ones(shape.experts, device=device),
        )


def route(x_TD: Tensor, weights: Weights, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gate as one writes it: weights and experts of each token, and the losses."""
    logits_TE = F.linear(x_TD.float(), weights.gate_ED.float())
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(top_k, dim=-1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    losses = (probabilities_TE * weights.share_E).sum() + logits_TE.logsumexp(-1).square().sum()
    return weights_TK, experts_TK, losses


def plain(weights: Weights, top_k: int, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The layer as one writes it around the grouped product. A gather and a sum over K at the end: with an
    ``index_add`` in their place it takes 1 to 17% longer, compiled."""
    weights_TK, experts_TK, losses = route(x_TD, weights, top_k)
    chosen_R = experts_TK.flatten()
    order_R = chosen_R.argsort(stable=True)
    counts_E = torch.zeros_like(weights.share_E, dtype=torch.int64).scatter_add_(
        0, chosen_R, torch.ones_like(chosen_R)
    )
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    gate_RH, value_RH = F.grouped_mm(x_TD[order_R // top_k], weights.up_EDH, offs=offsets_E).chunk(2, -1)
    made_RD = F.grouped_mm(F.silu(gate_RH) * value_RH, weights.down_EHD, offs=offsets_E)
    made_TKD = made_RD[back_R].view(*experts_TK.shape, -1)
    return (made_TKD * weights_TK.unsqueeze(-1).to(made_TKD.dtype)).sum(1), losses


def with_kernels(weights: Weights, top_k: int, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Our kernels in one function: the structure of our layer without its generality. Weights go into the experts before
    their second product, so that nothing but a sum is left to do behind it."""
    logits_TE = fused_gate.gate_logits(x_TD, weights.gate_ED)
    weights_TK, experts_TK, balance, z = fused_gate.choose(logits_TE, weights.share_E, top_k, normalise=True)
    keys_R, order_R = experts_TK.flatten().to(torch.uint8).sort(stable=True)
    ids_E = torch.arange(len(weights.share_E), device=x_TD.device).to(torch.uint8)
    offsets_E = torch.searchsorted(keys_R, ids_E, right=True, out_int32=True)
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    token_R, back_TK = order_R // top_k, back_R.view_as(experts_TK)
    weights_R: Any = _Permute.apply(weights_TK.flatten(), order_R, back_R)
    hidden_RH = F.grouped_mm(fused.gather_rows(x_TD, token_R, back_TK), weights.up_EDH, offs=offsets_E)
    made_RD = F.grouped_mm(fused.weighted_swiglu(hidden_RH, weights_R), weights.down_EHD, offs=offsets_E)
    return fused.sum_rows(made_RD, back_TK, token_R), balance + z


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return values[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


def ours(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    made_TD, routing = layer(x_TD)
    return made_TD, routing.balance + routing.z


@dataclass(frozen=True)
class Candidate:
    step: Step
    leaves: tuple[Tensor, ...]
    """The gate's weights, the experts' up and down."""

    def run(self, x_TD: Tensor, grad_TD: Tensor) -> Tensor:
        for leaf in (x_TD, *self.leaves):
            leaf.grad = None
        made_TD, losses = self.step(x_TD)
        torch.autograd.backward((made_TD, losses), (grad_TD, torch.full_like(losses, 1e-3 / len(x_TD))))
        return made_TD

    def results(self, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
        made_TD = self.run(x_TD, grad_TD).detach()
        return [made_TD, *(leaf.grad for leaf in (x_TD, *self.leaves) if leaf.grad is not None)]

    def milliseconds(self, x_TD: Tensor, grad_TD: Tensor) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            self.run(x_TD, grad_TD)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / STEPS


def candidates(shape: Shape, device: torch.device) -> dict[str, Candidate]:
    weights = Weights.random(shape, device)
    leaves = (weights.gate_ED, weights.up_EDH, weights.down_EHD)
    layer = MoELayer(shape.width, [shape.hidden] * shape.experts, shape.top_k).to(device, torch.bfloat16)
    layer_leaves = (layer.gate.weight_ED, *(stack for _, _, stack in layer.bank.stacks()))
    with torch.no_grad():
        for mine, theirs in zip(layer_leaves, leaves, strict=True):
            mine.copy_(theirs)
    torch.compiler.reset()  # or the second shape is compiled for any shape
    by_hand = partial(plain, weights, shape.top_k)
    return {
        "plain": Candidate(by_hand, leaves),
        "compiled": Candidate(torch.compile(by_hand, dynamic=False), leaves),
        "kernels": Candidate(partial(with_kernels, weights, shape.top_k), leaves),
        "ours": Candidate(partial(ours, layer), layer_leaves),
    }


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of an output or a gradient: rounding, or it is not the same layer."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def compare(shape: Shape, device: torch.device, rounds: int) -> list[str]:
    """One row of the table: TFLOP/s of each, ours against the compiled, and how far apart the results are."""
    named = candidates(shape, device)
    x_TD = torch.randn(shape.tokens, shape.width, device=device).to(torch.bfloat16).requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    expected = named["plain"].results(x_TD, grad_TD)
    apart = max(difference(candidate.results(x_TD, grad_TD), expected) for candidate in named.values())
    if apart > 0.05:
        raise RuntimeError(
            f"{shape}: results differ by {apart:.0e}, rounding explains 1e-02: these are not the same layer"
        )
    for candidate in named.values():
        for _ in range(WARM_UP):
            candidate.run(x_TD, grad_TD)
    times: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds):
        for name, candidate in named.items():
            times[name].append(candidate.milliseconds(x_TD, grad_TD))
    medians = {name: statistics.median(values) for name, values in times.items()}
    speeds = [f"{shape.flops / medians[name] / 1e9:.0f}" for name in named]
    ratios = [f"{medians['compiled'] / medians[name]:.3f}" for name in ("kernels", "ours")]
    return [str(shape), *speeds, *ratios, f"{medians['ours']:.2f}", f"{apart:.0e}"]


def profile(shape: Shape, device: torch.device, names: tuple[str, ...], lines: int = 24) -> str:
    """Where the device's time goes, per step."""
    named = candidates(shape, device)
    x_TD = torch.randn(shape.tokens, shape.width, device=device).to(torch.bfloat16).requires_grad_()
    grad_TD, text = torch.randn_like(x_TD), ""
    for name in names:
        for _ in range(WARM_UP):
            named[name].run(x_TD, grad_TD)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                named[name].run(x_TD, grad_TD)
            torch.cuda.synchronize()
        found = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in found) / STEPS
        rows = [
            [f"{e.self_device_time_total / STEPS:.0f}", e.count // STEPS, f"`{e.key[:90]}`"]
            for e in found[:lines]
        ]
        text += f"\n{shape}: {name}, {total:,.0f} µs on the device\n\n{markdown_table(['µs', 'launches', 'kernel'], rows)}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes, for the second and the fourth shape"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not fused.available():
        parser.error("a CUDA device and Triton are needed")
    device = torch.device("cuda:0")
    torch.set_float32_matmul_precision("high")
    rows = []
    for shape in SHAPES:
        rows.append(compare(shape, device, arguments.rounds))
        torch.cuda.empty_cache()
        print(rows[-1], flush=True)
    columns = ["experts × d × h, tokens, top-k", "plain", "compiled", "kernels", "ours"]
    columns += ["kernels / compiled", "ours / compiled", "ours, ms", "apart"]
    text = header(
        "One MoE layer, forward and backward, TFLOP/s of the experts' products", arguments
    ) + markdown_table(columns, rows)
    if arguments.profile:
        text += "".join(
            profile(shape, device, ("compiled", "kernels", "ours")) for shape in (SHAPES[1], SHAPES[3])
        )
    print(text)
    write_result(arguments.out, text)


if __name__ == "__main__":
    main()
