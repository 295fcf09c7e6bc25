"""Made-up data of any shape, for measuring: sequences for a decoder, or vectors for a classifier (``--context-length 0``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experts.model import initialise, mix
from orchestrator.config.settings import Config
from orchestrator.tasks.nets import Classifier, Decoder, Shape, classification_loss
from orchestrator.tasks.task import Loss, Task, TensorData

_CLASSES = 10


class Synthetic(Task):
    """A decoder or classifier of the given sizes, with something to learn: vectors are labelled by a fixed random teacher,
    and tokens mostly follow a fixed rule."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape = Shape.of(config.model, config.moe, width=64, layers=2, experts=4, hidden=128, top_k=2)
        context = 64 if config.model.context_length is None else config.model.context_length
        self.context, self.vocabulary = context, config.model.vocabulary or 256
        self.unit, self.units_per_sample = ("tokens", context) if context else ("samples", 1)

    def build_model(self) -> nn.Module:
        width = self.shape.width
        model = (
            Decoder(self.vocabulary, self.context, self.shape)
            if self.context
            else Classifier(width, _CLASSES, self.shape)
        )
        self.initialise(model)
        return model

    def initialise(self, model: nn.Module) -> None:
        initialise(model, self.config.run.seed)

    def train_data(self) -> TensorData:
        return self._make(self.config.data.samples or 4096, "train")

    def validation_data(self) -> TensorData:
        return self._make(max(1, (self.config.data.samples or 4096) // 16), "validation")

    def _make(self, samples: int, part: str) -> TensorData:
        generator = torch.Generator().manual_seed(mix(self.config.run.seed, "synthetic", part))
        if self.context:
            return TensorData(self._sequences(samples, generator))
        x = torch.randn(samples, self.shape.width, generator=generator)
        teacher = torch.randn(self.shape.width, _CLASSES, generator=torch.Generator().manual_seed(0))
        return TensorData(x, (x @ teacher).argmax(-1))

    def _sequences(self, samples: int, generator: torch.Generator) -> torch.Tensor:
        """Each token is followed by a fixed other one nine times in ten, and by any one the tenth time."""
        following = torch.randperm(self.vocabulary, generator=torch.Generator().manual_seed(0))
        tokens = torch.randint(self.vocabulary, (samples, self.context + 1), generator=generator)
        surprise = torch.rand(samples, self.context + 1, generator=generator) < 0.1
        for place in range(1, self.context + 1):
            tokens[:, place] = torch.where(
                surprise[:, place], tokens[:, place], following[tokens[:, place - 1]]
            )
        return tokens

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        inputs, targets = (batch[0][:, :-1], batch[0][:, 1:]) if self.context else batch
        logits, routings = model(inputs)
        return classification_loss(model, logits, targets, routings, self.config.moe)
