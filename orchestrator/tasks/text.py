"""Text, byte by byte: Python's own manual, or any file given by ``--data-dir``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.model import initialise
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.nets import Decoder, Shape, classification_loss
from orchestrator.tasks.task import Loss, Task, WindowData

_VALIDATION_SHARE = 10  # the last tenth of the text is for validation


class Text(Task):
    """A small decoder-only transformer with MoE blocks that predicts the next byte."""

    unit = "tokens"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape = Shape.of(config.model, config.moe, width=128, layers=2, experts=8, hidden=128, top_k=2)
        self.units_per_sample = config.model.sequence_length or 128
        tokens = torch.frombuffer(bytearray(read_text(config.data.data_dir)), dtype=torch.uint8)
        num_train = len(tokens) - len(tokens) // _VALIDATION_SHARE
        try:
            self._train = WindowData(tokens[:num_train], self.units_per_sample)
            self._validation = WindowData(tokens[num_train:], self.units_per_sample)
        except ValueError as error:
            raise UserError(f"too little text: {error}") from None

    def build_model(self) -> nn.Module:
        model = Decoder(256, self.units_per_sample, self.shape)
        self.initialise(model)
        return model

    def initialise(self, model: nn.Module) -> None:
        initialise(model, self.config.run.seed)

    def train_data(self) -> WindowData:
        return self._train

    def validation_data(self) -> WindowData:
        return self._validation

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits, routings = model(batch[:, :-1])
        return classification_loss(model, logits, batch[:, 1:], routings, self.config.moe)


def read_text(source: Path | None) -> bytes:
    """Return the bytes to learn: of a file, of the .txt files of a folder by name, or of Python's manual."""
    if source is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)).encode()
    files = sorted(source.glob("*.txt")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise UserError(
            f"--data-dir {source} is neither a text file nor a folder with .txt files; give one of the two"
        )
    try:
        return b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
