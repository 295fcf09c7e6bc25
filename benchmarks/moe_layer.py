"""Forward and backward of one MoE layer in bf16 on one GPU: our layer, and one written by hand
around torch's grouped product, eager and compiled.

All compute the same: fp32 scores, softmax, top-k, normalised weights, the balance and the z loss,
SwiGLU experts; all gradients are taken, of the input, the experts and the gate. Figures are TFLOP/s
of the experts' products alone, so all other work lowers them. Rounds alternate between the
candidates; medians are compared.

Shapes: T tokens, D width, H hidden size, E experts, K experts per token, R rows (T × K, sorted by
expert).

    python -m benchmarks.moe_layer [--rounds 7] [--profile] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.kernels import fused, fused_gate
from experts.layer import MoELayer

WARM_UP = 3
STEPS = 10
LARGEST_DIFFERENCE = 0.05
Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From tokens to the layer's output, and the sum of its losses."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer and of its batch."""

    experts: int
    width: int
    hidden: int
    tokens: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.experts} × {self.width} × {self.hidden}, {self.tokens:,}, {self.top_k}"

    @property
    def flops(self) -> float:
        """Operations of the experts' products: twice as many in the backward pass as in the forward pass."""
        return 3 * 6 * self.tokens * self.top_k * self.width * self.hidden


SHAPES = (
    Shape(8, 4096, 14336, 8192, 2),
    Shape(64, 2048, 1408, 16384, 6),
    Shape(16, 1024, 4096, 32768, 2),
    Shape(128, 2048, 768, 16384, 8),
)


@dataclass(frozen=True)
class Weights:
    """The weights of a layer written by hand."""

    gate_ED: Tensor
    up_EDH: Tensor
    down_EHD: Tensor
    share_E: Tensor
    """The factors of the probabilities in the balance loss."""

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
    """Return weights and experts of each token, and the losses: the gate, written plainly."""
    logits_TE = F.linear(x_TD.float(), weights.gate_ED.float())
    probabilities_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = probabilities_TE.topk(top_k, dim=-1)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    losses = (probabilities_TE * weights.share_E).sum() + logits_TE.logsumexp(-1).square().sum()
    return weights_TK, experts_TK, losses


def plain(weights: Weights, top_k: int, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the layer plainly around the grouped product.

    It ends with a gather and a sum over K: with an ``index_add`` instead it takes 1 to 17% longer,
    compiled.
    """
    weights_TK, experts_TK, losses = route(x_TD, weights, top_k)
    chosen_R = experts_TK.flatten()
    order_R = chosen_R.argsort(stable=True)
    counts_E = torch.zeros_like(weights.share_E, dtype=torch.int64)
    counts_E = counts_E.scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    back_R = inverse(order_R)
    gate_RH, value_RH = F.grouped_mm(x_TD[order_R // top_k], weights.up_EDH, offs=offsets_E).chunk(2, -1)
    output_RD = F.grouped_mm(F.silu(gate_RH) * value_RH, weights.down_EHD, offs=offsets_E)
    output_TKD = output_RD[back_R].view(*experts_TK.shape, -1)
    return (output_TKD * weights_TK.unsqueeze(-1).to(output_TKD.dtype)).sum(1), losses


def inverse(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))


def with_kernels(weights: Weights, top_k: int, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the layer by our kernels in one function: the structure of our layer without its
    generality.

    Weights are applied before the experts' second product, so that only a sum is left to do after
    it.
    """
    logits_TE = fused_gate.gate_logits(x_TD, weights.gate_ED)
    weights_TK, experts_TK, balance, z = fused_gate.choose(logits_TE, weights.share_E, top_k, normalise=True)
    keys_R, order_R = experts_TK.flatten().to(torch.uint8).sort(stable=True)
    ids_E = torch.arange(len(weights.share_E), device=x_TD.device).to(torch.uint8)
    offsets_E = torch.searchsorted(keys_R, ids_E, right=True, out_int32=True)
    back_R = inverse(order_R)
    back_TK = back_R.view_as(experts_TK)
    token_R = order_R // top_k
    weights_R: Any = _Permute.apply(weights_TK.flatten(), order_R, back_R)
    hidden_RH = F.grouped_mm(fused.gather_rows(x_TD, token_R, back_TK), weights.up_EDH, offs=offsets_E)
    output_RD = F.grouped_mm(fused.weighted_swiglu(hidden_RH, weights_R), weights.down_EHD, offs=offsets_E)
    return fused.sum_rows(output_RD, back_TK, token_R), balance + z


class _Permute(torch.autograd.Function):
    """A permutation whose backward pass gathers by the inverse, instead of scattering."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return values[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


def ours(layer: MoELayer, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    output_TD, routing = layer(x_TD)
    return output_TD, routing.balance + routing.z


@dataclass(frozen=True)
class Candidate:
    """A way to compute the layer, with its weights."""

    step: Step
    leaves: tuple[Tensor, ...]
    """The gate's weights, the experts' up and down."""

    def run(self, x_TD: Tensor, grad_TD: Tensor) -> Tensor:
        for leaf in (x_TD, *self.leaves):
            leaf.grad = None
        output_TD, losses = self.step(x_TD)
        loss_grad = torch.full_like(losses, 1e-3 / len(x_TD))
        torch.autograd.backward((output_TD, losses), (grad_TD, loss_grad))
        return output_TD

    def results(self, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
        """Return the output and all gradients."""
        output_TD = self.run(x_TD, grad_TD).detach()
        return [output_TD, *(leaf.grad for leaf in (x_TD, *self.leaves) if leaf.grad is not None)]

    def milliseconds(self, x_TD: Tensor, grad_TD: Tensor) -> float:
        """Return the time of a step, by the GPU's own clock."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(STEPS):
            self.run(x_TD, grad_TD)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / STEPS


def candidates(shape: Shape, device: torch.device) -> dict[str, Candidate]:
    """Return all candidates, with the same weights."""
    weights = Weights.random(shape, device)
    leaves = (weights.gate_ED, weights.up_EDH, weights.down_EHD)
    layer = MoELayer(shape.width, [shape.hidden] * shape.experts, shape.top_k).to(device, torch.bfloat16)
    layer_leaves = (layer.gate.weight_ED, *(stack for _, _, stack in layer.bank.stacks()))
    with torch.no_grad():
        for layer_leaf, leaf in zip(layer_leaves, leaves, strict=True):
            layer_leaf.copy_(leaf)
    torch.compiler.reset()  # else torch compiles the second shape for any shape
    by_hand = partial(plain, weights, shape.top_k)
    return {
        "plain": Candidate(by_hand, leaves),
        "compiled": Candidate(torch.compile(by_hand, dynamic=False), leaves),
        "kernels": Candidate(partial(with_kernels, weights, shape.top_k), leaves),
        "ours": Candidate(partial(ours, layer), layer_leaves),
    }


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference of an output or a gradient.

    More than rounding means another layer.
    """
    pairs = [(result.float(), wanted.float()) for result, wanted in zip(results, expected, strict=True)]
    return max(float((result - wanted).norm() / wanted.norm()) for result, wanted in pairs)


def compare(shape: Shape, device: torch.device, rounds: int) -> list[str]:
    """Return a row of the table: TFLOP/s of each, ours against the compiled, and how far apart the
    results are.
    """
    named = candidates(shape, device)
    x_TD, grad_TD = tokens_of(shape, device)
    expected = named["plain"].results(x_TD, grad_TD)
    apart = max(difference(candidate.results(x_TD, grad_TD), expected) for candidate in named.values())
    if apart > LARGEST_DIFFERENCE:
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


def tokens_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens and a random gradient of the output."""
    x_TD = torch.randn(shape.tokens, shape.width, device=device).to(torch.bfloat16).requires_grad_()
    return x_TD, torch.randn_like(x_TD)


def profile(shape: Shape, device: torch.device, names: tuple[str, ...], lines: int = 24) -> str:
    """Return the kernels that take most of the device's time, per step."""
    named = candidates(shape, device)
    x_TD, grad_TD = tokens_of(shape, device)
    text = ""
    for name in names:
        for _ in range(WARM_UP):
            named[name].run(x_TD, grad_TD)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(STEPS):
                named[name].run(x_TD, grad_TD)
            torch.cuda.synchronize()
        kernels = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
        total = sum(kernel.self_device_time_total for kernel in kernels) / STEPS
        rows = [
            [f"{kernel.self_device_time_total / STEPS:.0f}", kernel.count // STEPS, f"`{kernel.key[:90]}`"]
            for kernel in kernels[:lines]
        ]
        text += f"\n{shape}: {name}, {total:,.0f} µs on the device\n\n"
        text += markdown_table(["µs", "launches", "kernel"], rows)
    return text


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes, for the second and the fourth shape"
    )
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
    title = "One MoE layer, forward and backward, TFLOP/s of the experts' products"
    text = header(title, arguments) + markdown_table(columns, rows)
    if arguments.profile:
        for shape in (SHAPES[1], SHAPES[3]):
            text += profile(shape, device, ("compiled", "kernels", "ours"))
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
