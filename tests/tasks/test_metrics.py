"""Tests of the provided metrics against slow, obvious oracles."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.tasks.metrics import AUC, F1, Perplexity

CPU = torch.device("cpu")


def f1_oracle(predictions: list[int], labels: list[int], of_class: int) -> float:
    pairs = list(zip(predictions, labels, strict=True))
    hits = sum(p == of_class and y == of_class for p, y in pairs)
    wrong = sum((p == of_class) != (y == of_class) for p, y in pairs)
    return 2 * hits / (2 * hits + wrong) if hits + wrong else 0.0


@pytest.mark.parametrize("num_classes", [2, 7])
def test_f1_equals_its_definition_over_batches_of_any_size(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels_N = torch.randint(num_classes - 1, (53,), generator=generator)  # the last class never occurs
    scores_NC = torch.randn(53, num_classes, generator=generator)
    metric = F1(num_classes).fresh(CPU)
    for begin, end in ((0, 20), (20, 20), (20, 53)):
        metric.update(scores_NC[begin:end], labels_N[begin:end])
    predictions = scores_NC.argmax(-1).tolist()
    by_class = [f1_oracle(predictions, labels_N.tolist(), number) for number in range(num_classes)]
    expected = by_class[1] if num_classes == 2 else sum(by_class) / num_classes
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-12)


def test_auc_equals_the_comparison_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    scores_N = torch.randint(9, (40,), generator=generator) / 4  # many are equal
    labels_N = torch.randint(2, (40,), generator=generator)
    positive = scores_N[labels_N == 1].tolist()
    negative = scores_N[labels_N == 0].tolist()
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    metric = AUC().fresh(CPU)
    metric.update(scores_N[:7], labels_N[:7])
    metric.update(scores_N[7:], labels_N[7:])
    metric.set_state("scores_N", torch.cat(metric.state("scores_N")))
    metric.set_state("labels_N", torch.cat(metric.state("labels_N")))
    assert float(metric.compute()) == pytest.approx(wins / (len(positive) * len(negative)), rel=1e-12)


def test_auc_is_exact_with_more_samples_than_fp32_can_count() -> None:
    num_negative = 2**24 + 1
    scores_N = torch.zeros(num_negative + 2, dtype=torch.bool)
    scores_N[-2:] = True
    metric = AUC()
    metric.scores_N = scores_N
    metric.labels_N = scores_N.to(torch.uint8)
    assert float(metric.compute()) == 1.0


def test_perplexity_is_that_of_all_tokens_and_not_a_mean_over_batches() -> None:
    metric = Perplexity().fresh(CPU)
    metric.update(torch.tensor(3.0), 2)
    metric.update(torch.tensor(1.0), torch.tensor(6))
    assert float(metric.compute()) == pytest.approx(math.exp(4 / 8))
