"""Families trained by the loss of the task lm with its auxiliary loss, on hosts, and by their eager code in
one process.

Shapes: B samples of a batch, S tokens of a sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.transformers.registration import use
from harness.lm.families import TOKENS, Fp32MeansFp64, build, tokens
from orchestrator.tasks.lm.balance import StepBalance
from orchestrator.tasks.lm.task import LanguageModel
from orchestrator.tasks.task import Loss

WEIGHT = 0.3
"""Weight of the auxiliary loss."""
SAMPLES = 14


class LmSamples:
    """Samples of one document each, some with padding, as the data of the task lm has them."""

    def __len__(self) -> int:
        return SAMPLES

    def gather(self, index_B: Tensor) -> dict[str, Tensor]:
        ids_BS = tokens(SAMPLES)
        mask_BS = torch.ones_like(ids_BS)
        mask_BS[1::3, 4:] = 0
        labels_BS = torch.full_like(ids_BS, -100)
        labels_BS[:, :-1] = torch.where(mask_BS[:, 1:] == 1, ids_BS[:, 1:], -100)
        columns = {
            "input_ids": ids_BS,
            "labels": labels_BS,
            "position_ids": torch.arange(TOKENS).expand_as(ids_BS),
            "mask": mask_BS,
        }
        return {name: column.index_select(0, index_B) for name, column in columns.items()}

    def to(self, device: torch.device) -> LmSamples:
        del device
        return self

    @property
    def nbytes(self) -> int:
        return 0


class FamilyLanguageModel(LanguageModel):
    """The task lm with a family's tiny model in fp64, and with an auxiliary loss."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.units_per_sample = TOKENS
        self.metrics = {}
        self._balance = StepBalance(WEIGHT)

    def build_model(self) -> nn.Module:
        return use(build(self.name))

    def initialise(self, model: nn.Module) -> None:
        """Leave the weights as they were built."""

    def train_data(self) -> Any:
        return LmSamples()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        with Fp32MeansFp64():
            return super().loss(model, batch)

    def _router_outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        with Fp32MeansFp64():
            return super()._router_outputs(model, batch)


def eager_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a whole batch with the auxiliary loss of ``transformers``."""
    with Fp32MeansFp64():
        outputs = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["mask"],
            position_ids=batch["position_ids"],
            output_router_logits=True,
        )
    cross_entropy = F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())
    return cross_entropy + WEIGHT * outputs.aux_loss
