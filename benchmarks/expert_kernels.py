"""The experts' two kernels, forward and backward, at sizes from tiny to large: what ``experts.kernels.choice`` goes by.

python -m benchmarks.expert_kernels [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.support import header, markdown_table, write_result
from experts.kernels.choice import choose_kernel
from experts.kernels.grouped import experts_grouped
from experts.kernels.loop import experts_loop

SHAPES = (  # experts, rows, width, hidden
    (8, 256, 64, 64),
    (8, 4096, 64, 64),
    (5, 200, 64, 128),
    (64, 512, 64, 64),
    (17, 100, 32, 32),
    (8, 4096, 128, 128),
    (8, 4096, 256, 256),
    (8, 512, 256, 512),
    (8, 4096, 256, 512),
    (8, 4096, 512, 1024),
)
STEPS = 5


def step(
    kernel: Callable[..., Tensor], experts: int, rows: int, width: int, hidden: int
) -> Callable[[], None]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((rows, width), (experts, width, 2 * hidden), (experts, hidden, width), (rows,))
    x, up, down, weights = (torch.randn(size, generator=draw).requires_grad_() for size in sizes)
    counts = torch.full((experts,), rows // experts)
    counts[0] += rows - counts.sum()
    upstream = torch.randn(rows, width, generator=draw)

    def run() -> None:
        for leaf in (x, up, down, weights):
            leaf.grad = None
        kernel(x, up, down, counts, weights, "swiglu").backward(upstream)

    return run


def milliseconds(run: Callable[[], None]) -> float:
    run()
    begun = perf_counter()
    for _ in range(STEPS):
        run()
    return 1000 * (perf_counter() - begun) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.sched_setaffinity(0, {0})  # torch.set_num_threads does not reach every product
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        steps = {"loop": step(experts_loop, *shape), "grouped": step(experts_grouped, *shape)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(given.rounds):
            for name, run in steps.items():
                times[name].append(milliseconds(run))
        medians = {name: statistics.median(values) for name, values in times.items()}
        chosen = choose_kernel("auto", torch.device("cpu"), torch.float32, *shape[2:])
        best = min(medians.values())
        rows.append(
            [
                " × ".join(map(str, shape)),
                *(f"{m:.2f}" for m in medians.values()),
                chosen,
                f"{best / medians[chosen]:.2f}",
            ]
        )
    columns = ["experts × rows × d × h", "loop, ms", "grouped, ms", "chosen", "best / chosen"]
    text = header(
        "The experts' kernels on one CPU thread in fp32, forward and backward", given
    ) + markdown_table(columns, rows)
    print(text)
    write_result(given.out, text)


if __name__ == "__main__":
    main()
