"""Data that is read in order: JSONL files, shuffled in a buffer, stopped and resumed at the same sample.

python examples/streaming.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchestrator import Config, JsonLines, Trainer


def write_files(folder: Path) -> None:
    """Write three files of rows: a temperature in Fahrenheit, and the same in Celsius."""
    for part in range(3):
        degrees = [part * 40 + number / 10 for number in range(400)]
        rows = [{"fahrenheit": f, "celsius": (f - 32) / 1.8} for f in degrees]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"part-{part}.jsonl").write_text(lines, encoding="utf-8")


def as_sample(row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([row["fahrenheit"] / 100]), torch.tensor([row["celsius"] / 100])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    fahrenheit, celsius = batch
    return nn.functional.mse_loss(model(fahrenheit), celsius)


def train(folder: Path, max_steps: int) -> None:
    config = Config.of(
        run_dir=folder / "run",
        resume="auto",
        shuffle_buffer=256,
        global_batch_size=32,
        epochs=20,
        max_steps=max_steps,
        learning_rate=0.05,
    )
    rows = JsonLines(str(folder / "part-*.jsonl"), transform=as_sample)
    result = Trainer(nn.Linear(1, 1), data=rows, loss=loss, config=config).fit()
    print(f"at step {result.step}: loss {result.summary['train_loss']:.5f}")


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        train(Path(folder), max_steps=50)
        train(Path(folder), max_steps=150)  # continues with the sample after the last one of step 50


if __name__ == "__main__":
    main()
