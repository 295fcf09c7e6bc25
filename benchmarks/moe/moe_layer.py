"""Forward and backward of one MoE layer in bf16 on one GPU: our layer, one written by hand around
torch's grouped product, eager and compiled, and dense layers of the same FLOPs, eager and compiled.

Dense layers have neither gate nor routing: they are the bound, not a peer. With ``--skew`` scores fall
with the logarithm of the expert's number, so that tokens prefer few experts.

All compute the same: fp32 scores, softmax, top-k, normalised weights, the balance and the z loss,
SwiGLU experts; all gradients are taken, of the input, the experts and the gate. Figures are TFLOP/s
of the experts' products alone, so all other work lowers them. Rounds alternate between the
candidates; medians are compared.

Shapes: T tokens, D width, H hidden size, E experts, K experts per token, R rows (T × K, sorted by
expert).

With ``--fp8`` our layer with products in fp8 joins: its TFLOP/s, its speed over ours in bf16, and its error.

    python -m benchmarks.moe.moe_layer [--rounds 7] [--fp8] [--profile] [--out FILE]
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.kernels import launching
from experts.moe.layer import MoELayer

WARM_UP = 3
STEPS = 10
LARGEST_ERROR = 0.05
LARGEST_FP8_ERROR = 0.15
FP8 = "ours, fp8"
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
    def random(shape: Shape, device: torch.device, skew: float) -> Weights:
        """Draw weights. The first feature of a token is one: its weights make experts popular."""

        def normal(*sizes: int, fan_in: int) -> Tensor:
            drawn = torch.randn(*sizes, device=device) * fan_in**-0.5
            return drawn.to(torch.bfloat16).requires_grad_()

        gate_ED = normal(shape.experts, shape.width, fan_in=shape.width)
        rank_E = torch.arange(1, shape.experts + 1, device=device)
        with torch.no_grad():
            gate_ED[:, 0] = -skew * rank_E.log()
        return Weights(
            gate_ED,
            normal(shape.experts, shape.width, 2 * shape.hidden, fan_in=shape.width),
            normal(shape.experts, shape.hidden, shape.width, fan_in=shape.hidden),
            torch.ones(shape.experts, device=device),
        )

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The weights that are trained."""
        return self.gate_ED, self.up_EDH, self.down_EHD


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


def our_candidate(shape: Shape, leaves: tuple[Tensor, ...], fp8: bool) -> Candidate:
    """Return our layer with copies of these weights."""
    device = leaves[0].device
    layer = MoELayer(shape.width, [shape.hidden] * shape.experts, shape.top_k).to(device, torch.bfloat16)
    layer.bank.fp8 = fp8
    layer_leaves = (layer.gate.weight_ED, *(stack for _, _, stack in layer.bank.stacks()))
    with torch.no_grad():
        for layer_leaf, leaf in zip(layer_leaves, leaves, strict=True):
            layer_leaf.copy_(leaf)
    return Candidate(partial(ours, layer), layer_leaves)


def candidates(shape: Shape, device: torch.device, skew: float, fp8: bool = False) -> dict[str, Candidate]:
    """Return all candidates with experts, with the same weights."""
    weights = Weights.random(shape, device, skew)
    leaves = weights.leaves
    torch.compiler.reset()  # else torch compiles the second shape for any shape
    by_hand = partial(plain, weights, shape.top_k)
    return {
        "plain": Candidate(by_hand, leaves),
        "compiled": Candidate(torch.compile(by_hand, dynamic=False), leaves),
        "ours": our_candidate(shape, leaves, fp8=False),
    } | ({FP8: our_candidate(shape, leaves, fp8=True)} if fp8 else {})


def transformers_candidate(shape: Shape, device: torch.device, weights: Candidate) -> Candidate | None:
    """Return the block of Qwen3-MoE with transformers' grouped products, where it is installed.

    It has no balance and no z loss."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.width,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block: Any = Qwen3MoeSparseMoeBlock(config).to(device, torch.bfloat16)
    gate_ED, up_EDH, down_EHD = weights.leaves
    with torch.no_grad():
        block.gate.weight.copy_(gate_ED)
        block.experts.gate_up_proj.copy_(up_EDH.transpose(1, 2))
        block.experts.down_proj.copy_(down_EHD.transpose(1, 2))

    def step(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        result = block(x_TD.unsqueeze(0))
        y_TD = (result[0] if isinstance(result, tuple) else result).reshape(x_TD.shape)
        return y_TD, y_TD.new_zeros((), requires_grad=True)

    return Candidate(step, (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj))


def dense_candidates(shape: Shape, device: torch.device) -> dict[str, Candidate]:
    """Return a SwiGLU layer without experts whose tokens cost as much, eager and compiled."""
    hidden = shape.hidden * shape.top_k

    def normal(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, device=device) * sizes[0] ** -0.5).to(torch.bfloat16).requires_grad_()

    up_DH, down_HD = normal(shape.width, 2 * hidden), normal(hidden, shape.width)

    def dense(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        gate_TH, value_TH = (x_TD @ up_DH).chunk(2, -1)
        y_TD = (F.silu(gate_TH) * value_TH) @ down_HD
        return y_TD, y_TD.new_zeros((), requires_grad=True)

    compiled = torch.compile(dense, dynamic=False)
    leaves = (up_DH, down_HD)
    return {"dense": Candidate(dense, leaves), "dense, compiled": Candidate(compiled, leaves)}


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative difference of an output or a gradient.

    More than rounding means another layer.
    """
    pairs = [(result.float(), wanted.float()) for result, wanted in zip(results, expected, strict=True)]
    return max(float((result - wanted).norm() / wanted.norm()) for result, wanted in pairs)


def compare(shape: Shape, device: torch.device, rounds: int, skew: float, fp8: bool) -> list[str]:
    """Return a row of the table: TFLOP/s of each, ratios to the dense layers, errors and kept bytes."""
    named = candidates(shape, device, skew, fp8)
    x_TD, grad_TD = tokens_of(shape, device)
    errors = errors_of(named, x_TD, grad_TD, shape.top_k)
    bounds = {name: LARGEST_FP8_ERROR if name == FP8 else LARGEST_ERROR for name in named}
    if any(errors[name] > bounds[name] for name in named):
        raise RuntimeError(
            f"{shape}: results differ from fp32 by {errors}, rounding explains 1e-02 (fp8: 1e-01): "
            "these are not the same layer"
        )
    kept = {name: kept_bytes(named[name], x_TD) for name in ("plain", "ours")}
    load = load_of(named["ours"], x_TD, shape)
    peer = transformers_candidate(shape, device, named["plain"])
    named |= {} if peer is None else {"transformers": peer}
    named |= dense_candidates(shape, device)
    times = time_all(named, x_TD, grad_TD, rounds)
    medians = {name: statistics.median(times[name]) for name in times}
    columns = ("plain", "compiled", "transformers", "dense", "dense, compiled", "ours")
    speeds = [f"{shape.flops / medians[name] / 1e9:.0f}" if name in medians else "–" for name in columns]
    spread = f"{min(times['ours']):.2f}–{max(times['ours']):.2f}"
    ratios = [f"{medians[name] / medians['ours']:.2f}" for name in ("dense", "dense, compiled")]
    of_errors = [f"{errors[name]:.4f}" for name in ("plain", "ours")]
    of_kept = [f"{kept[name] / 1e6:,.0f}" for name in ("plain", "ours")]
    row = [str(shape), load, *speeds, *ratios, spread, *of_errors, *of_kept]
    if not fp8:
        return row
    speed = f"{shape.flops / medians[FP8] / 1e9:.0f}"
    return [*row, speed, f"{medians['ours'] / medians[FP8]:.2f}", f"{errors[FP8]:.4f}"]


COLUMNS = (
    "experts × d × h, tokens, top-k",
    "max/mean, empty",
    *("plain", "compiled", "transformers", "dense", "dense, compiled", "ours"),
    *("ours / dense", "ours / dense, compiled", "ours, ms"),
    *("error, plain", "error, ours", "kept MB, plain", "kept MB, ours"),
)
FP8_COLUMNS = (FP8, "ours, fp8 / ours", "error, fp8")


def time_all(
    named: dict[str, Candidate], x_TD: Tensor, grad_TD: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each candidate's steps, one round after another."""
    for candidate in named.values():
        for _ in range(WARM_UP):
            candidate.run(x_TD, grad_TD)
    times: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(rounds):
        for name, candidate in named.items():
            times[name].append(candidate.milliseconds(x_TD, grad_TD))
    return times


def errors_of(named: dict[str, Candidate], x_TD: Tensor, grad_TD: Tensor, top_k: int) -> dict[str, float]:
    """Return the largest relative error of an output or a gradient, against the layer in fp32."""
    gate_ED, up_EDH, down_EHD = (leaf.detach().float().requires_grad_() for leaf in named["plain"].leaves)
    weights = Weights(gate_ED, up_EDH, down_EHD, torch.ones(len(gate_ED), device=x_TD.device))
    oracle = Candidate(partial(plain, weights, top_k), (gate_ED, up_EDH, down_EHD))
    x_in_fp32 = x_TD.detach().float().requires_grad_()
    expected = oracle.results(x_in_fp32, grad_TD.float())
    return {name: difference(candidate.results(x_TD, grad_TD), expected) for name, candidate in named.items()}


def kept_bytes(candidate: Candidate, x_TD: Tensor) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, besides the weights."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output_TD, losses = candidate.step(x_TD)
    for leaf in candidate.leaves:
        kept.pop(leaf.untyped_storage().data_ptr(), None)
    del output_TD, losses
    return sum(kept.values())


def load_of(candidate: Candidate, x_TD: Tensor, shape: Shape) -> str:
    """Return the largest load of an expert over the mean, and the number of experts without tokens."""
    logits_TE = F.linear(x_TD.float(), candidate.leaves[0].float())
    chosen_R = logits_TE.topk(shape.top_k).indices.flatten()
    counts_E = torch.bincount(chosen_R, minlength=shape.experts)
    return f"{float(counts_E.max() / counts_E.float().mean()):.1f}, {int((counts_E == 0).sum())}"


def tokens_of(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random tokens, whose first feature is one, and a random gradient of the output."""
    x_TD = torch.randn(shape.tokens, shape.width, device=device)
    x_TD[:, 0] = 1.0
    return x_TD.to(torch.bfloat16).requires_grad_(), torch.randn_like(x_TD).to(torch.bfloat16)


def profile(shape: Shape, device: torch.device, names: tuple[str, ...], lines: int = 24) -> str:
    """Return the kernels that take most of the device's time, per step."""
    named = candidates(shape, device, skew=0.0, fp8=FP8 in names)
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


def peak(device: torch.device) -> float:
    """Return the TFLOP/s of a large product in bf16."""
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            begin.record()
        torch.mm(a, b)
    end.record()
    torch.cuda.synchronize()
    return 2 * 8192**3 * STEPS / begin.elapsed_time(end) / 1e9


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skew", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--fp8", action="store_true", help="also our layer with products in fp8")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes, for the second and the fourth shape"
    )
    arguments = parser.parse_args()
    if not launching.available():
        parser.error("a CUDA device and Triton are needed")
    device = torch.device("cuda:0")
    torch.set_float32_matmul_precision("high")
    title = "One MoE layer, forward and backward, TFLOP/s of the experts' products"
    text = header(title, arguments) + f"A product of 8192³ in bf16: {peak(device):.0f} TFLOP/s.\n"
    for skew in arguments.skew:
        rows = []
        for shape in SHAPES:
            rows.append(compare(shape, device, arguments.rounds, skew, arguments.fp8))
            torch.cuda.empty_cache()
            print(rows[-1], flush=True)
        text += f"\nScores lowered by {skew:g} × log of the expert's number:\n\n"
        text += markdown_table(COLUMNS + (FP8_COLUMNS if arguments.fp8 else ()), rows)
    if arguments.profile:
        for shape in (SHAPES[1], SHAPES[3]):
            text += profile(shape, device, ("ours", FP8) if arguments.fp8 else ("compiled", "ours"))
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
