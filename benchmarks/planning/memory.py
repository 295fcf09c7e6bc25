"""The plan's memory against measured peaks on the CPU: models, batch sizes, accumulation, optimizers,
recomputation, averages, and workers that copy, shard or divide the model.

Each configuration trains three steps in fresh processes, and torch's profiler counts the bytes that its
allocator had given out at the highest point. ``--measured`` keeps the peaks, to compare other models of
memory with them.

    python -m benchmarks.planning.memory [--only NUMBER ...] [--measured FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.planning.costmodel_cases import Case, digits, text, tokens, vectors
from benchmarks.planning.costmodel_steps import choose_plan, measure
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.types import MIB

_LARGE: dict[str, Any] = {"vocabulary": 50257, "sequence_length": 128, "layers": 2, "experts": 0}
_HOSTS: tuple[int, str] = (2, "expert_parallel")
_REPLICAS: tuple[int, str] = (2, "data_parallel")


def _digits(**settings: Any) -> dict[str, Any]:
    """Return digits whose experts stay as they are: the plan keeps memory for those that may be born."""
    return digits(evolution="off", **settings)


CASES = (
    Case(_digits(), 8),
    Case(_digits(), 64),
    Case(_digits(accumulation_steps=4), 32),
    Case(_digits(optimizer="sgd", momentum=0.0), 256),
    Case(_digits(experts=0, width=256, layers=4), 128),
    Case(_digits(experts=0, width=256, layers=4, ema_decay=0.99), 32),
    Case(_digits(experts=16, width=128, expert_hidden_size=256, recompute_experts=True), 256),
    Case(text(), 2),
    Case(text(), 8),
    Case(text(), 32),
    Case(text(activation_checkpointing="on"), 8),
    Case(text(activation_checkpointing="on", layers=6), 16),
    Case(text(recompute_experts=True), 16),
    Case(text(experts=0), 8),
    Case(text(experts=0, accumulation_steps=2), 8),
    Case(text(experts=0, optimizer="muon"), 8),
    Case(text(experts=0, optimizer="adamw8bit"), 8),
    Case(text(experts=0, optimizer="sgd"), 4),
    Case(text(width=256, layers=4, expert_hidden_size=256, ema_decay=0.99), 4),
    Case(text(experts=0, width=384, layers=3, sequence_length=256), 2),
    Case(text(experts=0, layers=12, width=64), 8),
    Case(text(experts=0, layers=12, width=64, activation_checkpointing="on"), 8),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024),
    Case(vectors(width=320, experts=12, expert_hidden_size=160, layers=3), 400),
    Case(vectors(width=512, experts=0, layers=3, accumulation_steps=2), 64),
    Case(tokens(experts=0, width=192, sequence_length=64, vocabulary=8192), 16),
    Case(tokens(width=64, **_LARGE), 2),
    Case(tokens(width=64, **_LARGE), 16),
    Case(tokens(width=128, **_LARGE), 40),
    Case(tokens(width=64, accumulation_steps=2, **_LARGE), 24),
    Case(tokens(width=192, activation_checkpointing="on", **_LARGE), 8),
    Case(text(), 8, *_REPLICAS),
    Case(text(experts=0, accumulation_steps=2), 8, *_REPLICAS),
    Case(_digits(experts=0, width=256, layers=4), 64, *_REPLICAS),
    Case(text(experts=0, width=256, layers=4, sharding="zero2"), 4, *_REPLICAS),
    Case(text(experts=0, width=256, layers=4, sharding="zero3"), 4, *_REPLICAS),
    Case(text(), 8, *_HOSTS),
    Case(text(accumulation_steps=2), 8, *_HOSTS),
    Case(text(activation_checkpointing="on"), 8, *_HOSTS),
    Case(text(width=192, sharding="zero2"), 4, *_HOSTS),
    Case(_digits(width=128, expert_hidden_size=256), 256, *_HOSTS),
    Case(vectors(width=256, experts=8, expert_hidden_size=512, layers=1), 1024, *_HOSTS),
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", type=int, help="only configurations with these numbers, from 0")
    parser.add_argument("--measured", type=Path, help="peaks that are known, and where new ones are kept")
    arguments = parser.parse_args()
    publish(header("The plan's memory", arguments) + _compare(arguments), arguments.out)


def _compare(arguments: argparse.Namespace) -> str:
    path: Path | None = arguments.measured
    peaks: dict[str, float] = json.loads(path.read_text()) if path and path.exists() else {}
    rows = []
    errors = []
    for number, case in enumerate(CASES):
        if arguments.only and number not in arguments.only:
            continue
        name = f"{case.where}, {case.name}"
        if name not in peaks:
            peaks[name] = measure(case, 1)[1]
            if path:
                path.write_text(json.dumps(peaks, indent=1))
        planned = choose_plan(case, on_gpu=False)[1].memory.total
        errors.append(planned / peaks[name] - 1)
        cells = (f"{planned / MIB:,.1f}", f"{peaks[name] / MIB:,.1f}", f"{errors[-1]:+.1%}")
        rows.append((str(number), name, *cells))
        print(*rows[-1], flush=True)
    sizes = sorted(abs(error) for error in errors)
    p95 = sizes[int(0.95 * (len(sizes) - 1))]
    verdict = f"Errors: median {statistics.median(sizes):.1%}, p95 {p95:.1%}, worst {sizes[-1]:.1%}.\n"
    return markdown_table(("", "configuration", "plan MiB", "peak MiB", "error"), rows) + "\n" + verdict


if __name__ == "__main__":
    main()
