"""Our MoE layer with even loads, with skewed ones, and with experts without tokens, in bf16 on one GPU.

The shapes and weights are those of ``moe_layer``. Scores fall with the logarithm of the expert's number
times a factor: 0 gives even loads, 1 loads like Zipf's law, 4 leaves experts without tokens in each shape.
The products have the same FLOPs in all of them. Rounds alternate between the loads; medians are compared.

    python -m benchmarks.moe.skewed_load [--rounds 7] [--out FILE]
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.moe.moe_layer import SHAPES, Shape, Weights, load_of, our_candidate, tokens_of
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.kernels import launching

SKEWS = (0.0, 1.0, 4.0)
WARM_UP = 5


def compare(shape: Shape, device: torch.device, rounds: int) -> list[list[str]]:
    """Return a row for each load: its time, and its speed over that of even loads."""
    x_TD, grad_TD = tokens_of(shape, device)
    layers = {
        skew: our_candidate(shape, Weights.random(shape, device, skew).leaves, fp8=False) for skew in SKEWS
    }
    for layer in layers.values():
        for _ in range(WARM_UP):
            layer.run(x_TD, grad_TD)
    times: dict[float, list[float]] = {skew: [] for skew in SKEWS}
    for _ in range(rounds):
        for skew, layer in layers.items():
            times[skew].append(layer.milliseconds(x_TD, grad_TD))
    even = times[SKEWS[0]]
    rows = []
    for skew, layer in layers.items():
        ratios = [of_even / own for of_even, own in zip(even, times[skew], strict=True)]
        rows.append(
            [
                str(shape),
                f"{skew:g}",
                load_of(layer, x_TD, shape),
                f"{statistics.median(times[skew]):.2f}",
                f"{min(times[skew]):.2f}–{max(times[skew]):.2f}",
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f}–{max(ratios):.3f}",
            ]
        )
    return rows


COLUMNS = (
    "experts × d × h, tokens, top-k",
    "factor",
    "max/mean, empty",
    "ms (median)",
    "range",
    "speed over even loads",
    "range of rounds",
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not launching.available():
        parser.error("a CUDA device and Triton are needed")
    device = torch.device("cuda:0")
    torch.set_float32_matmul_precision("high")
    rows = []
    for shape in SHAPES:
        rows += compare(shape, device, arguments.rounds)
        torch.cuda.empty_cache()
        print(*rows[-len(SKEWS) :], sep="\n", flush=True)
    text = header("One MoE layer with skewed loads", arguments) + markdown_table(COLUMNS, rows)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
