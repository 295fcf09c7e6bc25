"""Keys of graphs: batches for which a graph would repeat other work have other keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator.train.data.steps import MicroBatch, StepBatch
from orchestrator.train.step_graph.layout import layout_of_step

X = torch.zeros(2, 3)


def layout(data: Any, samples: int = 2, max_pass_samples: int = 2) -> Any:
    batch = StepBatch([MicroBatch(samples, lambda: data)], samples, all_have_samples=True)
    return layout_of_step(batch, [data], max_pass_samples)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X, torch.zeros(3, 2)),
        (X, X.double()),
        ((X, 1), (X, 2)),
        ((X, 1), (X, True)),
        ((X, 1), (X, 1.0)),
        ((X, X), [X, X]),
        ({"x": X}, {"y": X}),
        ((X, None), (X,)),
    ],
)
def test_other_batches_have_other_layouts(one: Any, other: Any) -> None:
    assert layout(one) is not None
    assert layout(one) != layout(other)


def test_batches_with_other_values_in_their_tensors_are_alike() -> None:
    assert layout({"x": X, "name": "a"}) == layout({"x": X + 1, "name": "a"})
    assert layout(X, max_pass_samples=1) != layout(X)


@pytest.mark.parametrize("data", [(X, object()), {"x": {1, 2}}])
def test_an_object_with_unknown_content_has_no_layout(data: Any) -> None:
    assert layout(data) is None


def test_dummy_samples_have_no_layout() -> None:
    assert layout(X, samples=0) is None
