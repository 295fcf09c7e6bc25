"""The digits from a JSONL file that is read in order, with faults and a record of the samples.

It is named on the command line as ``harness.runs.streamed_task:StreamedDigits``; the file is
``--data-dir``."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from harness.faults.faulty_task import FaultyDigits
from orchestrator.config.settings import Config
from orchestrator.data.json_lines import JsonLines
from orchestrator.tasks.digits import Digits
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.group.world import World


def write_digits(file: Path, count: int) -> None:
    """Write the first digits as one JSON object a line, with their numbers."""
    images, labels = Digits(Config()).train_data().tensors
    rows = zip(images[:count].tolist(), labels[:count].tolist(), strict=True)
    lines = [
        json.dumps({"image": image, "label": label, "id": id_}) for id_, (image, label) in enumerate(rows)
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def as_sample(row: dict[str, Any]) -> tuple[torch.Tensor, int, int]:
    return torch.tensor(row["image"]), row["label"], row["id"]


def streamed_steps(file: Path, global_batch: int, epochs: int, buffer: int) -> list[list[int]]:
    """The numbers of the samples of each step, of one process."""
    feed = open_feed(
        JsonLines(file, transform=as_sample),
        World.single_process(),
        global_batch=global_batch,
        micro_batch=global_batch,
        seed=0,
        loader=LoaderOptions(shuffle_buffer=buffer),
    )
    steps = chain.from_iterable(feed.steps(epoch) for epoch in range(epochs))
    return [step.micro_batches[0].fetch()[2].tolist() for step in steps]


class StreamedDigits(FaultyDigits):
    """The digits of a JSONL file."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.but(data_dir=None))
        self.file = config.data.data_dir

    def train_data(self) -> Any:
        return JsonLines(str(self.file), transform=as_sample)
