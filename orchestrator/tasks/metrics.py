"""Metrics with a state: F1, area under the ROC curve, perplexity.

Shapes: B samples of a batch, C classes, N samples of the validation data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.config.metric import Metric


class F1(Metric):
    """F1 of a classification: of class 1 where there are two classes, else the mean over the classes.

    A class that neither occurs nor is predicted counts as 0."""

    true_C: Tensor
    predicted_C: Tensor
    actual_C: Tensor

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__("max")
        self.num_classes = num_classes
        for name in ("true_C", "predicted_C", "actual_C"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.int64))

    def update(self, outputs: Tensor, labels_B: Tensor) -> None:
        """``outputs`` are the numbers of the predicted classes, or scores with a column per class."""
        predictions_B = outputs.argmax(-1) if outputs.ndim > labels_B.ndim else outputs
        hits_B = labels_B[predictions_B == labels_B]
        self.true_C = self.true_C + torch.bincount(hits_B.flatten(), minlength=self.num_classes)
        self.predicted_C = self.predicted_C + torch.bincount(
            predictions_B.flatten(), minlength=self.num_classes
        )
        self.actual_C = self.actual_C + torch.bincount(labels_B.flatten(), minlength=self.num_classes)

    def compute(self) -> Tensor:
        f1_C = 2 * self.true_C.double() / (self.predicted_C + self.actual_C).clamp(min=1)
        return f1_C[1] if self.num_classes == 2 else f1_C.mean()


class AUC(Metric):
    """Area under the ROC curve: how often a positive sample has a higher score than a negative one.

    Equal scores count one half. It keeps the score of every validation sample."""

    scores_N: Tensor | list[Tensor]
    labels_N: Tensor | list[Tensor]

    def __init__(self) -> None:
        super().__init__("max")
        self.add_state("scores_N", reduce="gather")
        self.add_state("labels_N", reduce="gather")

    def update(self, scores_B: Tensor, labels_B: Tensor) -> None:
        """``labels_B`` are true or 1 for positive samples."""
        assert isinstance(self.scores_N, list)
        assert isinstance(self.labels_N, list)
        self.scores_N.append(scores_B.flatten())
        self.labels_N.append(labels_B.flatten().to(torch.uint8))

    def compute(self) -> Tensor:
        assert isinstance(self.scores_N, Tensor)
        assert isinstance(self.labels_N, Tensor)
        positive_N = self.labels_N > 0
        num_positive = positive_N.sum().double()
        num_negative = len(positive_N) - num_positive
        # The mean rank of each distinct score, from 1: samples with the same score share it.
        _, inverse_N, counts = torch.unique(self.scores_N, return_inverse=True, return_counts=True)
        # In fp64: fp32 has no halves above 2²³.
        ranks = counts.cumsum(0) - (counts.double() - 1) / 2
        rank_sum = ranks[inverse_N][positive_N].sum()
        above = rank_sum - num_positive * (num_positive + 1) / 2
        # Without positive or without negative samples there is no curve: nan.
        return above / (num_positive * num_negative)


class Perplexity(Metric):
    """Exponential of the mean negative log-likelihood of a token."""

    loss_sum: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        super().__init__("min")
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64))
        self.add_state("num_tokens", torch.zeros((), dtype=torch.float64))

    def update(self, loss_sum: Tensor, num_tokens: Tensor | int) -> None:
        """``loss_sum`` is the sum of the tokens' negative log-likelihoods."""
        self.loss_sum = self.loss_sum + loss_sum.double()
        self.num_tokens = self.num_tokens + num_tokens

    def compute(self) -> Tensor:
        return torch.exp(self.loss_sum / self.num_tokens)
