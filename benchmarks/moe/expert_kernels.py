"""The experts' two kernels, forward and backward, at sizes from tiny to large: the basis of
``experts.kernels.grouped``.

python -m benchmarks.moe.expert_kernels [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.kernels.grouped import choose_kernel, experts_grouped
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
    """Return a function that runs one forward and backward pass over random rows."""
    draw = torch.Generator().manual_seed(0)
    sizes = ((rows, width), (experts, width, 2 * hidden), (experts, hidden, width), (rows,))
    x, up, down, weights = (torch.randn(size, generator=draw).requires_grad_() for size in sizes)
    counts = torch.full((experts,), rows // experts)
    # the rows need not be a multiple of the experts: the first takes the rest
    counts[0] += rows - counts.sum()
    upstream = torch.randn(rows, width, generator=draw)

    def run() -> None:
        for leaf in (x, up, down, weights):
            leaf.grad = None
        kernel(x, up, down, counts, weights, "swiglu").backward(upstream)

    return run


def milliseconds(run: Callable[[], None]) -> float:
    """Return the time of a step, the first one excluded."""
    run()
    begun = perf_counter()
    for _ in range(STEPS):
        run()
    return 1000 * (perf_counter() - begun) / STEPS


def measure(shape: tuple[int, int, int, int], rounds: int) -> list[str]:
    """Return the row of one shape. The kernels alternate, so that both see the same machine."""
    steps = {"loop": step(experts_loop, *shape), "grouped": step(experts_grouped, *shape)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            times[name].append(milliseconds(run))
    medians = {name: statistics.median(values) for name, values in times.items()}
    chosen = choose_kernel("auto", torch.device("cpu"), torch.float32, *shape[2:])
    share = min(medians.values()) / medians[chosen]
    cells = [f"{median:.2f}" for median in medians.values()]
    return [" × ".join(map(str, shape)), *cells, chosen, f"{share:.2f}"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many sizes")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {0})  # torch.set_num_threads does not reach every product
    torch.set_num_threads(1)
    rows = [measure(shape, arguments.rounds) for shape in SHAPES[: arguments.shapes]]
    columns = ["experts × rows × d × h", "loop, ms", "grouped, ms", "chosen", "best / chosen"]
    title = "The experts' kernels on one CPU thread in fp32, forward and backward"
    publish(header(title, arguments) + markdown_table(columns, rows), arguments.out)


if __name__ == "__main__":
    main()
