"""Synthetic data of any shape, for measurements: sequences for a decoder, or vectors (``--sequence-length
0``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experts.model import initialise, mix
from orchestrator.config.settings import Config
from orchestrator.tasks.nets import Classifier, Decoder, Shape, classification_loss
from orchestrator.tasks.task import Loss, Task, TensorData

_CLASSES = 10
_DEFAULT_SAMPLES = 4096
_SURPRISE = 0.1  # share of tokens that do not follow the rule


class Synthetic(Task):
    """A decoder or classifier of the given sizes.

    There is something to learn: a fixed random teacher labels vectors, and tokens mostly follow a fixed
    rule.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.shape = Shape.of(config.model, config.moe, width=64, layers=2, experts=4, hidden=128, top_k=2)
        self.context = 64 if config.model.sequence_length is None else config.model.sequence_length
        self.vocabulary = config.model.vocabulary or 256
        self.unit = "tokens" if self.context else "samples"
        self.units_per_sample = self.context or 1

    def build_model(self) -> nn.Module:
        if self.context:
            model = Decoder(self.vocabulary, self.context, self.shape)
        else:
            model = Classifier(self.shape.width, _CLASSES, self.shape)
        self.initialise(model)
        return model

    def initialise(self, model: nn.Module) -> None:
        initialise(model, self.config.run.seed)

    def train_data(self) -> TensorData:
        return self._generate(self.config.data.samples or _DEFAULT_SAMPLES, "train")

    def validation_data(self) -> TensorData:
        samples = self.config.data.samples or _DEFAULT_SAMPLES
        return self._generate(max(1, samples // 16), "validation")

    def _generate(self, samples: int, part: str) -> TensorData:
        generator = torch.Generator().manual_seed(mix(self.config.run.seed, "synthetic", part))
        if self.context:
            return TensorData(self._generate_sequences(samples, generator))
        x = torch.randn(samples, self.shape.width, generator=generator)
        teacher = torch.randn(self.shape.width, _CLASSES, generator=torch.Generator().manual_seed(0))
        return TensorData(x, (x @ teacher).argmax(-1))

    def _generate_sequences(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return tokens that a fixed other token follows nine times in ten, and any token otherwise."""
        successor = torch.randperm(self.vocabulary, generator=torch.Generator().manual_seed(0))
        tokens = torch.randint(self.vocabulary, (samples, self.context + 1), generator=generator)
        surprise = torch.rand(samples, self.context + 1, generator=generator) < _SURPRISE
        for place in range(1, self.context + 1):
            expected = successor[tokens[:, place - 1]]
            tokens[:, place] = torch.where(surprise[:, place], tokens[:, place], expected)
        return tokens

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if not self.context:
            features, labels = batch
            logits, routings = model(features)
            return classification_loss(model, logits, labels, routings, self.config.moe)
        inputs, targets = batch[0][:, :-1], batch[0][:, 1:]
        output, routings = model(inputs, targets)
        return classification_loss(model, output, targets, routings, self.config.moe)
