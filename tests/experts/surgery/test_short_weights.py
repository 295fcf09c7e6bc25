"""Changes of experts whose weights are stored in bf16: those in fp32, rounded once to the nearest."""

from __future__ import annotations

import pytest
import torch

from experts.structure import Change
from experts.surgery.expert_transfer import StateSpec
from experts.surgery.surgery import Surgery, change_layer
from harness.moe.surgery import Model, born, make

CHANGES = {
    "merged": [Change("merged", 0, (3,), "a test", parents=(0, 2), size=6, weights=(0.3, 0.7))],
    "fresh": [born(3, size=5, warmup_steps=2)],
    "split": [born(3, parent=0)],
    "twin": [born(3, parent=0), Change("warmed", 0, (3,), "a test")],
    "pruned": [Change("pruned", 0, (1,), "a test")],
}


def changed(dtype: torch.dtype, changes: list[Change], top_k: int) -> Model:
    """Return a model whose weights are numbers of bf16, after changes in a type."""
    model, _ = make((6, 5, 6), top_k, steps=0)
    model.to(torch.bfloat16).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, change in enumerate(changes):
        change_layer(model, model.moe, change, Surgery(optimizer, StateSpec(dtype=dtype), seed=0, step=step))
    return model


@pytest.mark.parametrize(
    ("name", "top_k"), [("merged", 2), ("fresh", 2), ("split", 3), ("twin", 2), ("pruned", 2), ("merged", 3)]
)
def test_weights_are_rounded_once(name: str, top_k: int) -> None:
    short, full = (changed(dtype, CHANGES[name], top_k) for dtype in (torch.bfloat16, torch.float32))
    expected = dict(full.named_parameters())
    for key, parameter in short.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[key].bfloat16()), key
