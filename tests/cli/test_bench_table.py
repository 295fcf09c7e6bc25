"""The table of ``orchestrator bench`` fits a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Console

from orchestrator.cli.bench import bench_table
from orchestrator.measure.bench import BenchResult

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


def result(precision: str, seconds: float) -> BenchResult:
    phases = {"forward": seconds / 4, "backward": seconds / 2, "optimizer": seconds / 4, "total": seconds}
    return BenchResult(
        precision=precision,
        device="cuda:0",
        batch_size=64,
        iterations=20,
        samples_per_second=64 / seconds,
        median=phases,
        spread={name: value / 50 for name, value in phases.items()},
        peak_memory_bytes=123_456_789_012,
        loss=2.34567,
    )


def shown(results: list[BenchResult]) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(bench_table(results, "synthetic"))
    return captured.get().splitlines()


def test_five_precisions_fit_without_broken_words() -> None:
    lines = shown([result(name, 0.8 / (place + 1)) for place, name in enumerate(PRECISIONS)])
    rows = [[cell.strip() for cell in line.strip("│┃").split("┃" if "┃" in line else "│")] for line in lines]
    cells = {row[0]: row[1:] for row in rows if len(row) == len(PRECISIONS) + 1}
    assert cells["median"] == list(PRECISIONS)
    assert cells["backward"] == ["400 ms", "200 ms", "133 ms", "100 ms", "80 ms"]
    assert cells["±"] == ["2%"] * 5
    assert cells["against fp32"] == ["1.00×", "2.00×", "3.00×", "4.00×", "5.00×"]
    assert set(cells["loss"]) == {"2.3457"}
    assert "" not in cells


def test_one_precision_other_than_fp32_is_compared_with_none() -> None:
    text = "\n".join(shown([result("bf16", 0.8)]))
    assert "bf16" in text
    assert "against fp32" not in text
