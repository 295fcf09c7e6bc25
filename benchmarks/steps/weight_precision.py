"""Losses of runs with weights in bf16, with stochastic or nearest rounding, beside those in fp32.

Each way trains the task ``text`` with each seed. The question is whether losses in bf16 lie within the spread
of the seeds in fp32, also where updates are smaller than the last digits of the weights.

    python -m benchmarks.steps.weight_precision [--steps 400] [--seeds 3] [--rates 3e-3 3e-4] [--out FILE]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.runs.loop_runs import run_loop
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.text import Text
from orchestrator.train.optim import stochastic_rounding

LAST_STEPS = 50
"""Steps at the end of a run whose losses are averaged."""
SETTINGS: Mapping[str, Any] = {
    "width": 32,
    "layers": 2,
    "experts": 4,
    "expert_hidden_size": (32,),
    "sequence_length": 32,
    "batch_size": 16,
    "schedule": "cosine",
    "warmup_steps": None,
    "epochs": 100,
    "gpu_mode": "cpu",
    "workers": 1,
    "log_every": 1,
    "trackers": (),
    "monitor_gpu": False,
}


@contextmanager
def to_the_nearest() -> Iterator[None]:
    """Round to the nearest number in place of stochastic rounding."""
    by_chance = stochastic_rounding.draws

    def halves(key_R: Tensor, first: int, columns: int) -> Tensor:
        del first
        return torch.full((len(key_R), columns), 2**15, dtype=torch.int32, device=key_R.device)

    stochastic_rounding.draws = halves
    try:
        yield
    finally:
        stochastic_rounding.draws = by_chance


WAYS: Mapping[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "fp32": ("fp32", nullcontext),
    "bf16, stochastic": ("bf16", nullcontext),
    "bf16, to the nearest": ("bf16", to_the_nearest),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3, 3e-4], help="peak learning rates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # operations this small take longer on several
    text = header("Losses with weights in bf16", arguments)
    text += f"Training loss is the mean of the last {LAST_STEPS} steps.\n"
    for rate in arguments.rates:
        rows = [
            (way, *_figures([_losses(way, rate, seed, arguments.steps) for seed in range(arguments.seeds)]))
            for way in WAYS
        ]
        columns = ("weights", "training loss", "of each seed", "validation loss", "of each seed")
        text += f"\nPeak learning rate {rate:g}:\n\n" + markdown_table(columns, rows)
    publish(text, arguments.out)


def _losses(way: str, rate: float, seed: int, steps: int) -> tuple[float, float]:
    """Train; return the training loss at the end, and the validation loss."""
    precision, rounding = WAYS[way]
    with tempfile.TemporaryDirectory() as folder, rounding():
        run_dir = Path(folder) / "run"
        settings = dict(SETTINGS) | {"learning_rate": rate, "seed": seed, "max_steps": steps}
        task = Text(Config.of(**settings))
        _, losses = run_loop(run_dir, task, weight_precision=precision, **settings)
        (evaluation, *_) = of_kind(read_events(run_dir / "events.jsonl"), "evaluate")[::-1]
    return statistics.mean(losses[-LAST_STEPS:]), evaluation["loss"]


def _figures(pairs: Sequence[tuple[float, float]]) -> Iterator[str]:
    for values in zip(*pairs, strict=True):
        yield f"{statistics.mean(values):.4f}"
        yield ", ".join(f"{value:.4f}" for value in values)


if __name__ == "__main__":
    main()
